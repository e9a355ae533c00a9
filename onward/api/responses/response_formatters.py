"""A response as a stream of events, for a client or for a router in front of one.

What a token brings about may be several events, of which the last has the `id:` line; the router is told to pass them on
together. An attempt that goes on with an answer replays the tokens that were told before and counts their events.
"""

from typing import Any

import msgspec

from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.endpoint_adapter import ObjectHeader, OutputJsonWriter
from onward.api.lifecycle.request_builder import ActiveRequest
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.lifecycle.resume import prior_choices
from onward.api.lifecycle.stream_formatters import CursorTracker, PromptUsageEvent, RoutedBodyFormatter, StreamFormatter
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.text_processor import TextProcessor
from onward.api.responses.chat_request import ResponseChatRequest
from onward.api.responses.event_builder import (
    EventGroup,
    ResponseEvent,
    ResponseEventBuilder,
    UsageFunction,
    make_event_builder,
)
from onward.proto.cursor import ChoiceCursor
from onward.proto.engine import ErrorInfo
from onward.text.tool_calls.call_ids import IdStyle
from onward.web import sse


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


def make_response_formatter(active: ActiveRequest) -> StreamFormatter:
    if not active.prepared.is_routed:
        return ResponseFormatter(active)
    return RoutedBodyFormatter(active) if active.prepared.returns_whole_body else RoutedResponseFormatter(active)


def event_bytes(event: ResponseEvent, cursor: str | None = None) -> bytes:
    return sse.named_event(event.name, event.data, cursor)


class ResponseFormatter(StreamFormatter):
    terminator = b""
    """The last event says that it is the last."""
    has_sequence_numbers = True

    def __init__(self, active: ActiveRequest) -> None:
        assert isinstance(active.writer, ResponseJsonWriter)
        self._active = active
        self._event_builder: ResponseEventBuilder = active.writer.event_builder(active.header, active.output.usage)
        prior = prior_choices(active.prepared)[0]
        self._num_sent = len(prior.token_ids)
        """Tokens whose events the reader has had, in an earlier attempt."""
        self._is_end_sent = prior.finish_reason is not None
        self._num_applied = 0
        self._cursors = CursorTracker(active.prepared.attempt, [self._num_sent], [ChoiceCursor(self._num_sent)])

    def format_opening(self) -> list[bytes]:
        opening = [self.format_held(event) for event in self._event_builder.opening()]
        replayed = self.format_updates(self._active.replayed_updates)
        return replayed if self._active.prepared.is_resumed else opening + replayed

    def format_updates(self, updates: list[ChoiceUpdate]) -> list[bytes]:
        events: list[bytes] = []
        for update in updates:
            for group in self._event_builder.apply(update):
                events += self._format_group(group, is_known=update.is_known_to_reader)
        return events

    def format_end(self) -> list[bytes]:
        """What has waited for scores that did not come."""
        return [
            event
            for group in self._event_builder.flush_without_logprobs()
            for event in self._format_group(group, is_known=False)
        ]

    def format_error(self, info: ErrorInfo) -> list[bytes]:
        # Tokens that wait for their scores come before the failure: it has the number and the output that follow from them.
        return [*self.format_end(), event_bytes(self._event_builder.fail(info))]

    def _format_group(self, group: EventGroup, *, is_known: bool) -> list[bytes]:
        num_known = max(0, self._num_sent - self._num_applied)
        self._num_applied += len(group.token_ids)
        new_token_ids, finish_reason = group.token_ids[num_known:], group.finish_reason
        if not new_token_ids and (finish_reason is None or self._is_end_sent):
            return []
        cursor = self._cursors.advance(ChoiceUpdate(0, new_token_ids, "", finish_reason))
        assert cursor is not None, "it has tokens or an end that nobody has been told"
        if is_known or not group.events:
            return self.format_silent_tokens(cursor)
        *held, last = group.events
        return [*map(self.format_held, held), event_bytes(last, cursor)]

    def format_held(self, event: ResponseEvent) -> bytes:
        """One that goes with the next."""
        return event_bytes(event)

    def format_silent_tokens(self, cursor: str) -> list[bytes]:
        """Tokens of which a reader learns nothing yet."""
        return []


class RoutedResponseFormatter(ResponseFormatter):
    """The same for a router, which is told more."""

    terminator = sse.DONE
    has_sequence_numbers = False

    def __init__(self, active: ActiveRequest) -> None:
        super().__init__(active)
        self._prompt_usage = PromptUsageEvent(active)

    def format_updates(self, updates: list[ChoiceUpdate]) -> list[bytes]:
        return self._prompt_usage.event_before(updates) + super().format_updates(updates)

    def format_error(self, info: ErrorInfo) -> list[bytes]:
        return [sse.error_event(info)]

    def format_held(self, event: ResponseEvent) -> bytes:
        return sse.HELD_COMMENT + event_bytes(event)

    def format_silent_tokens(self, cursor: str) -> list[bytes]:
        return [sse.cursor_event(cursor)]
