"""Writes the answer to one request for a response: as a whole here, as a stream by `response_formatters`."""

from typing import Any

import msgspec

from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.endpoint_adapter import ObjectHeader, OutputJsonWriter
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.text_processor import TextProcessor
from onward.api.responses.chat_request import ResponseChatRequest
from onward.api.responses.event_builder import ResponseEventBuilder, UsageFunction, make_event_builder
from onward.text.tool_calls.call_ids import IdStyle


class ResponseJsonWriter(OutputJsonWriter):
    """Whole answers only; a stream has events instead of chunks."""

    def __init__(self, text_processor: TextProcessor, prepared: PreparedRequest) -> None:
        assert isinstance(prepared.request, ResponseChatRequest)
        self._request = prepared.request
        self._request_id = prepared.attempt.request_id
        self._id_style: IdStyle = text_processor.message_parsers.id_style
        self._token_strings = text_processor.token_strings

    def event_builder(self, header: ObjectHeader, usage_of: UsageFunction) -> ResponseEventBuilder:
        return make_event_builder(
            header, self._request, self._request_id, self._id_style, self._token_strings, usage_of
        )

    def whole_body(
        self, header: ObjectHeader, choices: list[ChoiceUpdate], usage: TokenUsage, extra_fields: dict[str, Any]
    ) -> bytes:
        builder = self.event_builder(header, lambda _: usage)
        builder.apply(choices[0])
        builder.flush_without_logprobs()
        if choices[0].finish_reason is None and choices[0].error is not None:
            builder.fail(choices[0].error)
        return msgspec.json.encode(builder.response())
