"""A response as a stream of events, for a client or for a router in front of one.

What a token brings about may be several events, of which the last has the `id:` line; the router is told to pass them on
together. An attempt that goes on with an answer replays the tokens that were told before and counts their events.
"""

from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.cursor_tracker import CursorTracker
from onward.api.lifecycle.request_builder import ActiveRequest
from onward.api.lifecycle.resume import prior_choices
from onward.api.lifecycle.stream_formatters import PromptUsageEvent, RoutedBodyFormatter, StreamFormatter
from onward.api.responses.event_builder import EventGroup, ResponseEvent, ResponseEventBuilder
from onward.api.responses.response_json import ResponseJsonWriter
from onward.proto.cursor import ChoiceCursor
from onward.proto.engine import ErrorInfo
from onward.web import sse


def make_response_formatter(job: ActiveRequest) -> StreamFormatter:
    if not job.prepared.is_routed:
        return ResponseFormatter(job)
    return RoutedBodyFormatter(job) if job.prepared.returns_whole_body else RoutedResponseFormatter(job)


def event_bytes(event: ResponseEvent, cursor: str | None = None) -> bytes:
    return sse.named_event(event.name, event.data, cursor)


class ResponseFormatter:
    terminator = b""
    """The last event says that it is the last."""
    has_sequence_numbers = True

    def __init__(self, job: ActiveRequest) -> None:
        assert isinstance(job.writer, ResponseJsonWriter)
        self._job = job
        self._teller: ResponseEventBuilder = job.writer.event_builder(job.header, job.output.usage)
        given = prior_choices(job.prepared)[0]
        self._num_told = len(given.token_ids)
        """Tokens whose events the reader has had, in an earlier attempt."""
        self._end_is_told = given.finish_reason is not None
        self._num_heard = 0
        self._cursors = CursorTracker(job.prepared.attempt, [self._num_told], [ChoiceCursor(self._num_told)])

    def format_opening(self) -> list[bytes]:
        opening = [self.format_held(event) for event in self._teller.opening()]
        replayed = self.format_updates(self._job.replayed_updates)
        return replayed if self._job.prepared.is_resumed else opening + replayed

    def format_updates(self, pieces: list[ChoiceUpdate]) -> list[bytes]:
        told: list[bytes] = []
        for piece in pieces:
            for group in self._teller.apply(piece):
                told += self._format_group(group, is_known=piece.is_known_to_reader)
        return told

    def format_end(self) -> list[bytes]:
        """What has waited for scores that did not come."""
        return [
            one for group in self._teller.flush_without_logprobs() for one in self._format_group(group, is_known=False)
        ]

    def format_error(self, info: ErrorInfo) -> list[bytes]:
        # Tokens that wait for their scores come before the failure: it has the number and the output that follow from them.
        return [*self.format_end(), event_bytes(self._teller.fail(info))]

    def _format_group(self, group: EventGroup, *, is_known: bool) -> list[bytes]:
        num_known = max(0, self._num_told - self._num_heard)
        self._num_heard += len(group.token_ids)
        new, reason = group.token_ids[num_known:], group.finish_reason
        if not new and (reason is None or self._end_is_told):
            return []
        cursor = self._cursors.advance(ChoiceUpdate(0, new, "", reason))
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

    def __init__(self, job: ActiveRequest) -> None:
        super().__init__(job)
        self._facts = PromptUsageEvent(job)

    def format_updates(self, pieces: list[ChoiceUpdate]) -> list[bytes]:
        return self._facts.event_before(pieces) + super().format_updates(pieces)

    def format_error(self, info: ErrorInfo) -> list[bytes]:
        return [sse.error_event(info)]

    def format_held(self, event: ResponseEvent) -> bytes:
        return sse.HELD_COMMENT + event_bytes(event)

    def format_silent_tokens(self, cursor: str) -> list[bytes]:
        return [sse.cursor_event(cursor)]
