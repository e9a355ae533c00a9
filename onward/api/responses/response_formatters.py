"""Writes a response as a stream of events or as one body, for a client or for a router."""

from typing import Any

import msgspec

from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.endpoint_adapter import ObjectHeader, OutputJsonWriter
from onward.api.lifecycle.event_group_formatter import EventGroupFormatter, event_bytes
from onward.api.lifecycle.request_builder import ActiveRequest
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.lifecycle.stream_formatters import RoutedBodyFormatter, StreamFormatter
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.text_processor import TextProcessor
from onward.api.responses.chat_request import ResponseChatRequest
from onward.api.responses.event_builder import ResponseEventBuilder, UsageFunction, make_event_builder
from onward.proto.engine import ErrorInfo
from onward.text.tool_calls.call_ids import IdStyle
from onward.web import sse


class ResponseJsonWriter(OutputJsonWriter):
    """Writes whole responses only. Streams have events in place of chunks; see `ResponseFormatter`."""

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
        builder.flush()
        if choices[0].finish_reason is None and choices[0].error is not None:
            builder.fail(choices[0].error)
        return msgspec.json.encode(builder.response())


def make_response_formatter(active: ActiveRequest) -> StreamFormatter:
    if active.prepared.returns_whole_body:
        return RoutedBodyFormatter(active)
    return ResponseFormatter(active, for_router=active.prepared.is_routed)


class ResponseFormatter(EventGroupFormatter):
    def __init__(self, active: ActiveRequest, *, for_router: bool) -> None:
        assert isinstance(active.writer, ResponseJsonWriter)
        builder = active.writer.event_builder(active.header, active.output.usage)
        super().__init__(active, builder, for_router=for_router)
        self._event_builder: ResponseEventBuilder = builder

    @property
    def has_sequence_numbers(self) -> bool:
        return not self.for_router

    def format_updates(self, updates: list[ChoiceUpdate]) -> list[bytes]:
        self._event_builder.header = self.active.header
        return super().format_updates(updates)

    def format_end(self) -> list[bytes]:
        self._event_builder.header = self.active.header
        return super().format_end()

    def format_error(self, info: ErrorInfo) -> list[bytes]:
        if self.for_router:
            return [sse.error_event(info)]
        # The events of tokens that wait for logprobs precede the failure, whose number and output include them.
        return [*self.format_end(), event_bytes(self._event_builder.fail(info))]
