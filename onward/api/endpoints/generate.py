"""`/v1/generate`: token ids in, token ids out. No template, and no tokenizer unless a stop string or bad word needs one.

With the internal adapter, the token that ended the output is not shown (`choice_update.shown_token_ids`), nor its logprobs.
"""

from typing import Any

import msgspec

from onward.api.lifecycle import logprobs_json, resume_fields
from onward.api.lifecycle.choice_update import ChoiceUpdate, NullTextStream, OutputTextStream, shown_token_ids
from onward.api.lifecycle.endpoint_adapter import EndpointAdapter, ObjectHeader, OutputJsonWriter
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.requests.decoding import decode_tokens
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.schemas import GenerateRequest, ValidationContext
from onward.api.requests.text_processor import TextProcessor
from onward.proto.sampling_params import SamplingParams


class GenerateAdapter(EndpointAdapter):
    id_prefix = "gen-"
    returns_text = False

    def __init__(self, text_processor: TextProcessor, internal_adapter: bool) -> None:
        self._text_processor = text_processor
        self._hides_end = internal_adapter

    def decode(self, body: bytes, context: ValidationContext) -> tuple[GenerateRequest, tuple[str, ...]]:
        return decode_tokens(body, context)

    def tokenize_prompts(self, request: GenerateRequest, created_s: int) -> list[list[int]]:
        return [request.prompt_token_ids]

    def prompt_path(self, request: GenerateRequest, index: int) -> str:
        return "prompt_token_ids"

    def new_text_stream(self, prepared: PreparedRequest, sampling: SamplingParams) -> OutputTextStream:
        needs_text = prepared.request.stop_strings() or prepared.stop_patterns
        return self._text_processor.new_text_stream(prepared, sampling) if needs_text else NullTextStream()

    def json_writer(self, prepared: PreparedRequest) -> "GenerateJsonWriter":
        return GenerateJsonWriter(self._hides_end)


class GenerateJsonWriter(OutputJsonWriter):
    chunk_object = "generate.chunk"

    def __init__(self, hides_end: bool) -> None:
        self._hides_end = hides_end

    def content_json(self, update: ChoiceUpdate) -> bytes:
        return b'"token_ids":' + msgspec.json.encode(shown_token_ids(update, hides_end=self._hides_end))

    def logprobs(self, update: ChoiceUpdate) -> list[Any]:
        num_shown = len(update.rescored_token_ids) + len(shown_token_ids(update, hides_end=self._hides_end))
        return logprobs_json.token_logprobs(update.scored_token_ids[:num_shown], (update.logprobs or [])[:num_shown])

    def extra_top_level_fields(self, update: ChoiceUpdate) -> dict[str, Any]:
        if update.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": logprobs_json.prompt_logprobs(update.prompt_logprobs, None)}

    def whole_body(
        self, header: ObjectHeader, choices: list[ChoiceUpdate], usage: TokenUsage, extra_fields: dict[str, Any]
    ) -> bytes:
        choice_fields = [self._choice(update) for update in choices]
        fields = header.fields("generate") | {"choices": choice_fields, "usage": usage.as_json()} | extra_fields
        return msgspec.json.encode(fields | self.extra_top_level_fields(choices[0]))

    def _choice(self, update: ChoiceUpdate) -> dict[str, Any]:
        return {
            "index": update.choice_index,
            "token_ids": shown_token_ids(update, hides_end=self._hides_end),
            "logprobs": None if update.logprobs is None else self.logprobs(update),
            "finish_reason": update.finish_reason,
        } | resume_fields.choice_resume_fields(update)
