"""Writes a message as a stream of events or as one body, for a client or for a router."""

from typing import Any

import msgspec

from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.endpoint_adapter import ObjectHeader, OutputJsonWriter
from onward.api.lifecycle.event_group_formatter import EventGroupFormatter
from onward.api.lifecycle.request_builder import ActiveRequest
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.lifecycle.resume_fields import choice_resume_fields
from onward.api.lifecycle.stream_formatters import RoutedBodyFormatter, StreamFormatter
from onward.api.messages.chat_request import MessageChatRequest
from onward.api.messages.message_event_builder import (
    MessageEventBuilder,
    ResumeFields,
    UsageFunction,
    with_merged_steps,
)
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.text_processor import TextProcessor
from onward.proto.engine import ErrorInfo
from onward.text.tool_calls.call_ids import IdStyle
from onward.web import sse
from onward.web.anthropic_api.error_format import message_error_event
from onward.web.error_handlers import INTERNAL_ERROR


class MessageJsonWriter(OutputJsonWriter):
    """Writes whole messages only. Streams have events in place of chunks; see `MessageFormatter`."""

    def __init__(self, text_processor: TextProcessor, prepared: PreparedRequest) -> None:
        assert isinstance(prepared.request, MessageChatRequest)
        self._shows_thinking = prepared.request.shows_thinking
        self._request_id = prepared.attempt.request_id
        model_style = text_processor.message_parsers.id_style
        self._id_style: IdStyle = "anthropic" if model_style == "openai" else model_style

    def event_builder(
        self, header: ObjectHeader, usage_of: UsageFunction, resume_fields: ResumeFields
    ) -> MessageEventBuilder:
        return MessageEventBuilder(
            header, self._request_id, self._id_style, usage_of, resume_fields, shows_thinking=self._shows_thinking
        )

    def whole_body(
        self, header: ObjectHeader, choices: list[ChoiceUpdate], usage: TokenUsage, extra_fields: dict[str, Any]
    ) -> bytes:
        [update] = choices
        builder = self.event_builder(header, lambda _: usage, lambda: extra_fields)
        builder.apply(update)
        message = builder.message()
        if update.finish_reason is None:  # the request has failed, and this is `partial` beside the error
            message |= choice_resume_fields(msgspec.structs.replace(update, error=None)) | extra_fields
        return msgspec.json.encode(message)


def make_message_formatter(active: ActiveRequest) -> StreamFormatter:
    if active.prepared.returns_whole_body:
        return RoutedBodyFormatter(active)
    return MessageFormatter(active, for_router=active.prepared.is_routed)


def make_client_formatter(active: ActiveRequest) -> StreamFormatter:
    """Returns a formatter for the last events of a stream that a router gives up."""
    return MessageFormatter(active, for_router=False)


class MessageFormatter(EventGroupFormatter):
    def __init__(self, active: ActiveRequest, *, for_router: bool) -> None:
        assert isinstance(active.writer, MessageJsonWriter)
        builder = active.writer.event_builder(active.header, active.output.usage, active.resume_fields)
        super().__init__(active, builder, for_router=for_router)
        self._given: list[ChoiceUpdate] = []
        """Updates for the tokens that the client of a new response has sent. They are held until `message_start`, which
        waits for the engine's count of cached tokens."""

    def format_opening(self) -> list[bytes]:
        if self.active.prepared.is_resumed:
            return super().format_opening()
        self._given = list(map(with_merged_steps, self.active.replayed_updates))
        return []

    def format_updates(self, updates: list[ChoiceUpdate]) -> list[bytes]:
        if not updates:
            return []
        given, self._given = self._given, []
        return super().format_updates(given + updates)

    def format_end(self) -> list[bytes]:
        given, self._given = self._given, []
        return super().format_updates(given) + super().format_end()

    def format_error(self, info: ErrorInfo) -> list[bytes]:
        # After an internal error the output so far cannot be trusted.
        partial = None if info is INTERNAL_ERROR else self._partial()
        return [sse.error_event(info, partial) if self.for_router else message_error_event(info, partial)]

    def _partial(self) -> bytes | None:
        output = self.active.output
        if not output.has_partial:
            return None
        fields = choice_resume_fields(output.partial_update(0)) | self.active.resume_fields()
        return msgspec.json.encode(fields)
