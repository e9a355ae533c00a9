"""`/v1/chat/completions`: messages in, an assistant's message out."""

from typing import Any

import msgspec

from onward.api.lifecycle import logprobs_json, resume_fields
from onward.api.lifecycle.choice_update import ChoiceUpdate, OutputTextStream, shown_token_ids
from onward.api.lifecycle.endpoint_adapter import ObjectHeader, OpeningChunk
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.message_json import CallId, delta_fields, message_fields
from onward.api.requests.decoding import decode_chat
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.reasoning_builder import build_reasoning_params
from onward.api.requests.schemas import ChatCompletionRequest, ValidationContext
from onward.api.requests.text_processor import TextProcessor
from onward.proto.reasoning_params import ReasoningParams
from onward.proto.sampling_params import SamplingParams
from onward.text.parsed_text_stream import ParsedTextStream
from onward.text.tool_calls.call_ids import IdStyle, tool_call_id


class ChatAdapter:
    id_prefix = "chatcmpl-"
    returns_text = True

    def __init__(self, prompts: TextProcessor, internal_adapter: bool = False) -> None:
        self._prompts = prompts
        self._hides_end = internal_adapter

    def decode(self, body: bytes, bounds: ValidationContext) -> tuple[ChatCompletionRequest, tuple[str, ...]]:
        return decode_chat(body, bounds)

    def tokenize_prompts(self, request: ChatCompletionRequest, created_s: int) -> list[list[int]]:
        return [self._prompts.tokenize_chat(request, created_s)]

    def prompt_path(self, request: ChatCompletionRequest, index: int) -> str:
        return "messages" if request.prompt_token_ids is None else "prompt_token_ids"

    def reasoning_params(
        self, request: ChatCompletionRequest, prompts: list[list[int]], *, has_grammar: bool
    ) -> ReasoningParams | None:
        return build_reasoning_params(
            self._prompts.message_parsers.reasoning,
            self._prompts.prompt_tokenizer.tokenizer,
            prompts[0],
            request.thinking_budget,
            has_grammar=has_grammar,
            continues_message=bool(request.continue_final_message),
        )

    def new_text_stream(self, prepared: PreparedRequest, sampling: SamplingParams) -> OutputTextStream:
        request = prepared.request
        assert isinstance(request, ChatCompletionRequest)
        take_apart = self._prompts.message_parsers.new_parser(prepared)
        shows_stop = bool(request.include_stop_str_in_output)
        if take_apart is None:
            return self._prompts.new_text_stream(request.stop_strings(), sampling, shows_stop)
        return ParsedTextStream(
            self._prompts.new_text_stream_with_markers(request.stop_strings(), sampling, shows_stop), take_apart
        )

    def json_writer(self, prepared: PreparedRequest) -> "ChatJsonWriter":
        return ChatJsonWriter(self._prompts, prepared, self._hides_end)


class ChatJsonWriter:
    chunk_object = "chat.completion.chunk"

    def __init__(self, prompts: TextProcessor, prepared: PreparedRequest, hides_end: bool) -> None:
        request = prepared.request
        assert isinstance(request, ChatCompletionRequest)
        self._names = prompts.token_strings
        self._hides_end = hides_end
        self._plan = prepared.tools
        self._request_id = prepared.attempt.request_id
        self._id_style: IdStyle = prompts.message_parsers.id_style
        self.has_extra_choice_fields = bool(request.return_token_ids)
        self._told_prompt = {"prompt_token_ids": prepared.prompt_token_ids[0]} if request.return_token_ids else {}

    def opening_chunk(self, choice: int) -> OpeningChunk:
        beside = self._told_prompt if choice == 0 else {}
        # An answer that only calls has no content, not an empty one.
        content = b'""' if self._plan.tool_choice == "none" else b"null"
        return OpeningChunk(b'"delta":{"role":"assistant","content":%b}' % content, extra_top_level_fields=beside)

    def client_finish_reason(self, piece: ChoiceUpdate) -> str | None:
        return self._plan.client_finish_reason(piece.finish_reason, piece.has_tool_calls)

    def content_json(self, piece: ChoiceUpdate) -> bytes:
        if piece.events is not None:
            return b'"delta":' + msgspec.json.encode(delta_fields(piece.events, self._call_ids(piece)))
        if not piece.text and piece.finish_reason is not None:
            return b'"delta":{}'
        return b'"delta":{"content":%b}' % msgspec.json.encode(piece.text)

    def logprobs(self, piece: ChoiceUpdate) -> dict[str, Any]:
        return logprobs_json.chat_logprobs(self._names, piece.scored_token_ids, piece.logprobs or [])

    def extra_choice_fields(self, piece: ChoiceUpdate) -> dict[str, Any]:
        if not self.has_extra_choice_fields:
            return {}
        return {"token_ids": shown_token_ids(piece, hides_end=self._hides_end)}

    def extra_top_level_fields(self, piece: ChoiceUpdate) -> dict[str, Any]:
        if piece.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": logprobs_json.prompt_logprobs(piece.prompt_logprobs, self._names)}

    def whole_body(
        self, head: ObjectHeader, choices: list[ChoiceUpdate], usage: TokenUsage, beside: dict[str, Any]
    ) -> bytes:
        listed = [self._choice(piece) for piece in choices]
        fields = head.fields("chat.completion") | {"choices": listed, "usage": usage.as_json()}
        return msgspec.json.encode(fields | beside | self._told_prompt | self.extra_top_level_fields(choices[0]))

    def _call_ids(self, piece: ChoiceUpdate) -> CallId:
        return lambda index: tool_call_id(self._request_id, piece.choice_index, index, self._id_style)

    def _message(self, piece: ChoiceUpdate) -> dict[str, Any]:
        if piece.events is None:
            return {"role": "assistant", "content": piece.text, "refusal": None}
        return message_fields(piece.events, self._call_ids(piece))

    def _choice(self, piece: ChoiceUpdate) -> dict[str, Any]:
        return {
            "index": piece.choice_index,
            "message": self._message(piece),
            "logprobs": None if piece.logprobs is None else self.logprobs(piece),
            "finish_reason": self.client_finish_reason(piece),
            **self.extra_choice_fields(piece),
            **resume_fields.choice_resume_fields(piece),
        }
