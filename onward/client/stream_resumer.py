"""One stream over several connections: what to send, what to deliver, when to connect again. No I/O and no clock.

    begin_attempt ──> feed … ──> is_complete
         ^              │ failure: the connection is lost, the server refuses, or ends the stream with an error
         └─ retry_delay ┘ after a delay, or StreamFailed

The `id:` line of an event is the position after it. An event without one is held until the next event with one: the
server sends it again to a client whose connection breaks between the two. So each event is delivered once. A connection
that breaks before the first id has delivered nothing, and the request is sent as a new one.
"""

from collections.abc import Callable

from onward.client.event_parser import EventParser, EventTooLarge, ServerSentEvent
from onward.client.failures import (
    STALE_ATTEMPT,
    ConnectionFailure,
    ReceivedOutput,
    StreamFailed,
    error_event_failure,
    response_failure,
)
from onward.client.options import OnResume, ResumeOptions

LONGEST_WAIT_S = 1e6
"""Bound of each timeout and delay. Sockets and event loops refuse infinite times and those of many years."""
_DONE = b"[DONE]"
_LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")
_LOST = ConnectionFailure("the connection ended before the stream did")
_LATE = ConnectionFailure("the deadline has passed", is_retryable=False)


class StreamResumer:
    def __init__(
        self,
        options: ResumeOptions,
        now_s: float,
        random: Callable[[], float],
        *,
        last_event_id: str = "",
        on_resume: OnResume | None = None,
    ) -> None:
        """`random` returns numbers from 0 to 1. `last_event_id` is the position at which another client left the
        stream."""
        self.is_complete = False
        self.failure: ConnectionFailure | None = None
        """Failure of the current attempt, which delivers no more events."""
        self._options = options
        self._deadline_at_s = now_s + options.deadline_s
        self._random = random
        self._on_resume = on_resume
        self._last_event_id = last_event_id
        self._received: list[bytes] = []
        self._parser = EventParser(options.max_event_bytes)
        self._held: list[ServerSentEvent] = []
        self._num_held_bytes = 0
        self._num_attempts = self._num_failures = self._num_lost = self._num_stale = 0
        self._lost_at_s: float | None = None
        """Time of the first failure since the last delivered event."""

    @property
    def partial(self) -> ReceivedOutput:
        return ReceivedOutput(self._last_event_id, self._received)

    def begin_attempt(self) -> dict[str, str]:
        """Begins an attempt. Returns the headers that its request needs in addition."""
        self._num_attempts += 1
        self.failure = None
        self._parser, self._held, self._num_held_bytes = EventParser(self._options.max_event_bytes), [], 0
        return {"Last-Event-ID": self._last_event_id} if self._last_event_id else {}

    def read_timeout_s(self, now_s: float) -> float:
        return max(0.001, min(self._options.read_timeout_s, self._deadline_at_s - now_s, LONGEST_WAIT_S))

    def feed(self, received: bytes, now_s: float) -> bytes:
        """Returns the events that can be delivered now. Afterwards `is_complete` or `failure` may be set."""
        try:
            events = self._parser.feed(received)
        except EventTooLarge as fault:
            events, self.failure = [], ConnectionFailure(str(fault), is_retryable=False)
        delivered: list[ServerSentEvent] = []
        for event in events:
            self._take(event, delivered)
            if self.is_complete or self.failure is not None:
                break
        if delivered:
            self._note_delivery(delivered, now_s)
        if not self.is_complete and self.failure is None and now_s >= self._deadline_at_s:
            self.failure = _LATE
        return b"".join(event.raw for event in delivered)

    def end_connection(self) -> None:
        """Handles a connection that was closed properly. That does not end the stream: the connection of a killed
        server may be closed in the same way."""
        if not self.is_complete and self.failure is None:
            self.failure = _LOST

    def retry_delay(self, failure: ConnectionFailure, now_s: float) -> float:
        """Returns how long to wait before the next attempt. Raises StreamFailed if there is none."""
        options = self._options
        if self._lost_at_s is None:
            self._lost_at_s = now_s
        if not failure.is_retryable:
            raise self._error(failure.message, failure)
        self._num_failures += 1
        self._num_lost += failure.code != STALE_ATTEMPT
        if self._num_failures > options.max_failures:
            raise self._error(f"{self._num_failures} connections in a row have failed: {failure.message}", failure)
        delay_s = min(options.max_delay_s, options.first_delay_s * 2.0 ** min(self._num_failures - 1, 32))
        delay_s = max(delay_s * (1 - self._random() / 2), failure.retry_after_s)
        if now_s + delay_s >= self._deadline_at_s:
            after = f", and asks for {failure.retry_after_s:g} s" if failure.retry_after_s else ""
            raise self._error(f"the deadline of {options.deadline_s:g} s passes: {failure.message}{after}", failure)
        return min(delay_s, LONGEST_WAIT_S)

    def _take(self, event: ServerSentEvent, delivered: list[ServerSentEvent]) -> None:
        if event.name == "error":
            self.failure = self._bounded_if_stale(error_event_failure(event.data))
            return
        if event.name == "response.failed":
            failure = self._bounded_if_stale(response_failure(event.data))
            if failure.is_retryable:
                self.failure = failure
                return
        self._held.append(event)
        self._num_held_bytes += len(event.raw)
        self.is_complete = event.data == _DONE or event.name in _LAST_EVENTS
        if event.event_id or self.is_complete:
            self._last_event_id = event.event_id or self._last_event_id
            delivered += self._held
            self._held, self._num_held_bytes = [], 0
        elif self._num_held_bytes > self._options.max_event_bytes:
            limit = f"over {self._options.max_event_bytes} bytes (max_event_bytes)"
            self.failure = ConnectionFailure(f"the server sent events without an id of {limit}", False)

    def _bounded_if_stale(self, failure: ConnectionFailure) -> ConnectionFailure:
        """Limits the retries of an attempt that a later attempt has replaced. The later one may be an earlier request
        of this client that arrived late, so there are as many retries as this client has lost connections. Any further
        one comes from another client, which now has the stream."""
        if failure.code != STALE_ATTEMPT:
            return failure
        self._num_stale += 1
        return ConnectionFailure(failure.message, self._num_stale <= self._num_lost, code=failure.code)

    def _note_delivery(self, delivered: list[ServerSentEvent], now_s: float) -> None:
        was_delivering = bool(self._received)
        self._received += [event.data for event in delivered if event.data and event.data != _DONE]
        self._num_failures = 0
        lost_at_s, self._lost_at_s = self._lost_at_s, None
        if lost_at_s is not None and was_delivering and self._on_resume is not None:
            self._on_resume(now_s - lost_at_s, self._num_attempts)

    def _error(self, message: str, failure: ConnectionFailure) -> StreamFailed:
        return StreamFailed(message, failure, self.partial)
