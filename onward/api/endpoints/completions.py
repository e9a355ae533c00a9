"""`/v1/completions`: prompts in, their continuations out.

With `echo` a choice's text begins with its prompt, and with `max_tokens: 0` it is the prompt. A stream has the prompt in
the opening chunk of the choice, or, with logprobs, in the chunk with the prompt's logprobs. A client that sends tokens of
an earlier response (`generated_token_ids`) already has the prompt.
"""

from typing import Any

import msgspec
from msgspec.structs import replace

from onward.api.lifecycle import logprobs_json, resume_fields
from onward.api.lifecycle.choice_update import ChoiceUpdate, OutputTextStream, matched_stop_fields, shown_token_ids
from onward.api.lifecycle.endpoint_adapter import EndpointAdapter, ObjectHeader, OpeningChunk, OutputJsonWriter
from onward.api.lifecycle.logprobs_json import TextOffsets
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.requests.decoding import decode_completion
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.schemas import CompletionRequest, ValidationContext
from onward.api.requests.text_processor import TextProcessor
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import TokenLogprobs


class CompletionsAdapter(EndpointAdapter):
    id_prefix = "cmpl-"

    def __init__(self, text_processor: TextProcessor, internal_adapter: bool = False) -> None:
        self._text_processor = text_processor
        self._hides_end = internal_adapter

    def decode(self, body: bytes, context: ValidationContext) -> tuple[CompletionRequest, tuple[str, ...]]:
        return decode_completion(body, context)

    def tokenize_prompts(self, request: CompletionRequest, created_s: int) -> list[list[int]]:
        return self._text_processor.tokenize_completion(request)

    def prompt_path(self, request: CompletionRequest, index: int) -> str:
        return request.prompt_path(index)

    def new_text_stream(self, prepared: PreparedRequest, sampling: SamplingParams) -> OutputTextStream:
        request = prepared.request
        assert isinstance(request, CompletionRequest)
        return self._text_processor.new_text_stream(prepared, sampling, bool(request.include_stop_str_in_output))

    def json_writer(self, prepared: PreparedRequest) -> "CompletionJsonWriter":
        assert isinstance(prepared.request, CompletionRequest)
        return CompletionJsonWriter(self._text_processor, prepared.request, prepared.prompt_token_ids, self._hides_end)


class CompletionJsonWriter(OutputJsonWriter):
    chunk_object = "text_completion"

    def __init__(
        self,
        text_processor: TextProcessor,
        request: CompletionRequest,
        prompt_token_ids: list[list[int]],
        hides_end: bool,
    ) -> None:
        self._text_processor = text_processor
        self._hides_end = hides_end
        self._prompt_token_ids = prompt_token_ids
        self._token_strings = text_processor.token_strings_of(request)
        self._stop_token_ids = frozenset(request.stop_token_ids or ())
        self._num_returned = request.num_returned
        self._echoes_logprobs = request.echoes_prompt_logprobs
        self._only_echoes = request.only_echoes
        self._num_logprobs, self._num_prompt_logprobs = request.logprobs, request.prompt_logprobs
        self._opens_by_prompt = (
            bool(request.echo) and not request.echoes_prompt_logprobs and request.resumed_tokens is None
        )
        self._echoed = self._prompt_texts(request) if request.echo else [""] * len(prompt_token_ids)
        self.has_extra_choice_fields = bool(request.return_token_ids)

    def _prompt_texts(self, request: CompletionRequest) -> list[str]:
        prompts = request.prompts()
        return [
            prompt if isinstance(prompt, str) else self._text_processor.decode(prompt, with_special=True)
            for prompt in prompts
        ]

    def opening_chunk(self, choice: int) -> OpeningChunk | None:
        if not (self._opens_by_prompt or self.has_extra_choice_fields):
            return None
        text = self._echoed[self._prompt_index(choice)] if self._opens_by_prompt else ""
        return OpeningChunk(b'"text":' + msgspec.json.encode(text), extra_choice_fields=self._prompt_fields(choice))

    def client_finish_reason(self, update: ChoiceUpdate) -> str | None:
        return "length" if self._only_echoes and update.finish_reason == "stop" else update.finish_reason

    def content_json(self, update: ChoiceUpdate) -> bytes:
        update = self._shown(update)
        return b'"text":' + msgspec.json.encode(self._scored_echo(update) + update.text)

    def _shown(self, update: ChoiceUpdate) -> ChoiceUpdate:
        """Returns the update without the token that is computed beside an echo."""
        if not self._only_echoes:
            return update
        scores = None if update.logprobs is None else list[TokenLogprobs]()
        return replace(update, token_ids=[], text="", logprobs=scores, text_offsets=[], matched_stop=None)

    def logprobs(self, update: ChoiceUpdate) -> dict[str, Any]:
        update = self._shown(update)
        prompt_index, token_strings = self._prompt_index(update.choice_index), self._token_strings
        offsets = [len(self._echoed[prompt_index]) + offset for offset in update.text_offsets or []]
        fields = logprobs_json.completion_logprobs(
            token_strings, update.scored_token_ids, update.logprobs or [], offsets
        )
        if not self._echoes_logprobs or update.prompt_logprobs is None:
            return fields
        prompt_values = logprobs_json.echoed_prompt_logprobs(
            token_strings,
            self._prompt_token_ids[prompt_index],
            logprobs_json.with_num_top(update.prompt_logprobs, self._num_logprobs or 0),
            self._prompt_offsets(prompt_index),
        )
        return {name: prompt_values[name] + values for name, values in fields.items()}

    def _prompt_offsets(self, prompt_index: int) -> TextOffsets:
        """Returns text offsets for an echoed prompt. Special tokens count if the client gave them as ids, and not if the
        tokenizer has added them to a string."""
        prompt_token_ids = self._prompt_token_ids[prompt_index]
        includes_special = (
            self._text_processor.decode(prompt_token_ids, with_special=True) == self._echoed[prompt_index]
        )
        return self._text_processor.new_text_offsets(with_special=includes_special)

    def extra_choice_fields(self, update: ChoiceUpdate) -> dict[str, Any]:
        update = self._shown(update)
        fields = matched_stop_fields(update, self._stop_token_ids)
        if update.prompt_logprobs is not None and self._num_prompt_logprobs is not None:
            values = logprobs_json.with_num_top(update.prompt_logprobs, self._num_prompt_logprobs)
            fields["prompt_logprobs"] = logprobs_json.prompt_logprobs(values, self._token_strings)
        if self.has_extra_choice_fields:
            fields["token_ids"] = shown_token_ids(update, hides_end=self._hides_end)
        return fields

    def whole_body(
        self, header: ObjectHeader, choices: list[ChoiceUpdate], usage: TokenUsage, extra_fields: dict[str, Any]
    ) -> bytes:
        choice_fields = [self._choice(update) for update in choices]
        fields = header.fields("text_completion") | {"choices": choice_fields, "usage": usage.as_json()} | extra_fields
        return msgspec.json.encode(fields)

    def _choice(self, update: ChoiceUpdate) -> dict[str, Any]:
        update = self._shown(update)
        prefix = self._echoed[self._prompt_index(update.choice_index)] if self._opens_by_prompt else ""
        return {
            "index": update.choice_index,
            "text": prefix + self._scored_echo(update) + update.text,
            "logprobs": None if update.logprobs is None else self.logprobs(update),
            "finish_reason": self.client_finish_reason(update),
            **self._prompt_fields(update.choice_index),
            **self.extra_choice_fields(update),
            **resume_fields.choice_resume_fields(update),
        }

    def _prompt_index(self, choice: int) -> int:
        """Returns the index of the choice's prompt."""
        return choice // self._num_returned

    def _prompt_fields(self, choice: int) -> dict[str, Any]:
        return (
            {"prompt_token_ids": self._prompt_token_ids[self._prompt_index(choice)]}
            if self.has_extra_choice_fields
            else {}
        )

    def _scored_echo(self, update: ChoiceUpdate) -> str:
        has_prompt_logprobs = self._echoes_logprobs and update.prompt_logprobs is not None
        return self._echoed[self._prompt_index(update.choice_index)] if has_prompt_logprobs else ""
