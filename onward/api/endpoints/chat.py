"""`/v1/chat/completions`: messages in, an assistant's message out."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from onward.api.lifecycle import logprobs_json, resume_fields
from onward.api.lifecycle.choice_update import ChoiceUpdate, OutputTextStream, matched_stop_fields, shown_token_ids
from onward.api.lifecycle.endpoint_adapter import EndpointAdapter, ObjectHeader, OpeningChunk, OutputJsonWriter
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.requests.decoding import decode_chat
from onward.api.requests.message_parser_factory import build_reasoning_params
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.schemas import ChatCompletionRequest, ValidationContext
from onward.api.requests.text_processor import TextProcessor
from onward.proto.reasoning_params import ReasoningParams
from onward.proto.sampling_params import SamplingParams
from onward.text.message_events import (
    ContentText,
    CustomToolInput,
    MessageEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallStarted,
)
from onward.text.parsed_text_stream import ParsedTextStream
from onward.text.tool_calls.call_ids import IdStyle, tool_call_id

CallId = Callable[[int], str]
"""Returns the id of the call with this index."""


def delta_fields(events: Iterable[MessageEvent], call_id: CallId) -> dict[str, Any]:
    """Returns the fields of one chunk's `delta`. Empty if no event has text or calls for the client."""
    fields: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case ReasoningText(text):
                fields["reasoning_content"] = fields.get("reasoning_content", "") + text
            case ContentText(text):
                fields["content"] = fields.get("content", "") + text
            case ToolCallStarted(index, name, is_custom=True):
                call = {"index": index, "id": call_id(index), "type": "custom"}
                calls[index] = call | {"custom": {"name": name, "input": ""}}
            case ToolCallStarted(index, name):
                calls[index] = {
                    "index": index,
                    "id": call_id(index),
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
            case ToolCallArguments(index, delta):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += delta
            case CustomToolInput(index, delta) if delta:
                call = calls.setdefault(index, {"index": index, "custom": {"input": ""}})
                call["custom"]["input"] += delta
            case _:
                pass
    if calls:
        fields["tool_calls"] = list(calls.values())
    return fields


def legacy_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields with `function_call`, the older form, in the place of `tool_calls`. There is one call at most."""
    calls = fields.pop("tool_calls", None)
    return fields | {"function_call": calls[0]["function"]} if calls else fields


def message_fields(events: Iterable[MessageEvent], call_id: CallId) -> dict[str, Any]:
    """Returns the fields of the message in a body. `content` is null if there are calls and no text."""
    delta = delta_fields(events, call_id)
    calls = delta.pop("tool_calls", [])
    fields = {"role": "assistant", "content": delta.pop("content", None if calls else ""), "refusal": None} | delta
    if calls:
        fields["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    return fields


class ChatAdapter(EndpointAdapter):
    id_prefix = "chatcmpl-"

    def __init__(self, text_processor: TextProcessor, internal_adapter: bool = False) -> None:
        self._text_processor = text_processor
        self._hides_end = internal_adapter

    def decode(self, body: bytes, context: ValidationContext) -> tuple[ChatCompletionRequest, tuple[str, ...]]:
        return decode_chat(body, context)

    def tokenize_prompts(self, request: ChatCompletionRequest, created_s: int) -> list[list[int]]:
        return [self._text_processor.tokenize_chat(request, created_s)]

    def prompt_path(self, request: ChatCompletionRequest, index: int) -> str:
        return "messages" if request.prompt_token_ids is None else "prompt_token_ids"

    def reasoning_params(
        self, request: ChatCompletionRequest, prompts: list[list[int]], *, has_grammar: bool
    ) -> ReasoningParams | None:
        return build_reasoning_params(
            self._text_processor.message_parsers.reasoning,
            self._text_processor.prompt_tokenizer.tokenizer,
            prompts[0],
            request.thinking_budget,
            has_grammar=has_grammar,
            continues_message=bool(request.continue_final_message),
        )

    def new_text_stream(self, prepared: PreparedRequest, sampling: SamplingParams) -> OutputTextStream:
        request = prepared.request
        assert isinstance(request, ChatCompletionRequest)
        parser = self._text_processor.message_parsers.new_parser(prepared)
        include_stop = bool(request.include_stop_str_in_output)
        if parser is None:
            return self._text_processor.new_text_stream(prepared, sampling, include_stop)
        return ParsedTextStream(
            self._text_processor.new_text_stream_with_markers(prepared, sampling, include_stop), parser
        )

    def json_writer(self, prepared: PreparedRequest) -> OutputJsonWriter:
        return ChatJsonWriter(self._text_processor, prepared, self._hides_end)


class ChatJsonWriter(OutputJsonWriter):
    chunk_object = "chat.completion.chunk"

    def __init__(self, text_processor: TextProcessor, prepared: PreparedRequest, hides_end: bool) -> None:
        request = prepared.request
        assert isinstance(request, ChatCompletionRequest)
        self._token_strings = text_processor.token_strings_of(request)
        self._stop_token_ids = frozenset(request.stop_token_ids or ())
        self._hides_end = hides_end
        self._tools = prepared.tools
        self._request_id = prepared.attempt.request_id
        self._id_style: IdStyle = text_processor.message_parsers.id_style
        self._echoed = request.echoed_text()
        self.has_extra_choice_fields = bool(request.return_token_ids)
        self._prompt_fields = {"prompt_token_ids": prepared.prompt_token_ids[0]} if request.return_token_ids else {}

    def opening_chunk(self, choice: int) -> OpeningChunk:
        top_level_fields = self._prompt_fields if choice == 0 else {}
        # A message with calls alone has null as its content, not an empty string.
        has_text = bool(self._echoed) or self._tools.tool_choice == "none"
        content = msgspec.json.encode(self._echoed) if has_text else b"null"
        return OpeningChunk(
            b'"delta":{"role":"assistant","content":%b}' % content, extra_top_level_fields=top_level_fields
        )

    def client_finish_reason(self, update: ChoiceUpdate) -> str | None:
        return self._tools.client_finish_reason(update.finish_reason, update.has_tool_calls)

    def content_json(self, update: ChoiceUpdate) -> bytes:
        if update.events is not None:
            fields = delta_fields(update.events, self._call_ids(update))
            return b'"delta":' + msgspec.json.encode(legacy_fields(fields) if self._tools.is_legacy else fields)
        if not update.text and update.finish_reason is not None:
            return b'"delta":{}'
        return b'"delta":{"content":%b}' % msgspec.json.encode(update.text)

    def logprobs(self, update: ChoiceUpdate) -> dict[str, Any]:
        return logprobs_json.chat_logprobs(self._token_strings, update.scored_token_ids, update.logprobs or [])

    def extra_choice_fields(self, update: ChoiceUpdate) -> dict[str, Any]:
        fields = matched_stop_fields(update, self._stop_token_ids)
        if self.has_extra_choice_fields:
            fields["token_ids"] = shown_token_ids(update, hides_end=self._hides_end)
        return fields

    def extra_top_level_fields(self, update: ChoiceUpdate) -> dict[str, Any]:
        if update.prompt_logprobs is None:
            return {}
        return {"prompt_logprobs": logprobs_json.prompt_logprobs(update.prompt_logprobs, self._token_strings)}

    def whole_body(
        self, header: ObjectHeader, choices: list[ChoiceUpdate], usage: TokenUsage, extra_fields: dict[str, Any]
    ) -> bytes:
        choice_fields = [self._choice(update) for update in choices]
        fields = header.fields("chat.completion") | {"choices": choice_fields, "usage": usage.as_json()}
        return msgspec.json.encode(
            fields | extra_fields | self._prompt_fields | self.extra_top_level_fields(choices[0])
        )

    def _call_ids(self, update: ChoiceUpdate) -> CallId:
        return lambda index: tool_call_id(self._request_id, update.choice_index, index, self._id_style)

    def _message(self, update: ChoiceUpdate) -> dict[str, Any]:
        if update.events is None:
            return {"role": "assistant", "content": self._echoed + update.text, "refusal": None}
        fields = message_fields(update.events, self._call_ids(update))
        if self._echoed:
            fields["content"] = self._echoed + (fields["content"] or "")
        return legacy_fields(fields) if self._tools.is_legacy else fields

    def _choice(self, update: ChoiceUpdate) -> dict[str, Any]:
        return {
            "index": update.choice_index,
            "message": self._message(update),
            "logprobs": None if update.logprobs is None else self.logprobs(update),
            "finish_reason": self.client_finish_reason(update),
            **self.extra_choice_fields(update),
            **resume_fields.choice_resume_fields(update),
        }
