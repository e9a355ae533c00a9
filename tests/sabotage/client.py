"""Deliberate bugs in the client that resumes streams."""

from collections.abc import Callable
from dataclasses import replace

from onward.client import failures, resuming_client, resuming_transport
from onward.client.event_parser import EventParser
from onward.client.failures import ConnectionFailure
from onward.client.stream_resumer import StreamResumer
from tests.sabotage.patches import Patches, Sabotage

CORE = "tests/client/test_stream_resumer.py::"


def _begins_again_after_a_break(patch: Patches) -> None:
    def begin_attempt(original: Callable, self: StreamResumer) -> dict[str, str]:
        original(self)
        return {}

    patch.around(StreamResumer, "begin_attempt", begin_attempt)


def _delivers_events_without_an_id(patch: Patches) -> None:
    def take(original: Callable, self: StreamResumer, event: object, delivered: list) -> None:
        original(self, event, delivered)
        delivered += self._held
        self._held = []

    patch.around(StreamResumer, "_take", take)


def _keeps_half_an_event(patch: Patches) -> None:
    def begin_attempt(original: Callable, self: StreamResumer) -> dict[str, str]:
        parser = self._parser
        headers = original(self)
        self._parser = parser
        return headers

    patch.around(StreamResumer, "begin_attempt", begin_attempt)


def _takes_the_id_before_the_blank_line(patch: Patches) -> None:
    def feed(original: Callable, self: StreamResumer, received: bytes, now_s: float) -> bytes:
        delivered = original(self, received, now_s)
        for line in self._parser._lines:
            if line.startswith(b"id: "):
                self._last_event_id = line[4:].decode()
        return delivered

    patch.around(StreamResumer, "feed", feed)


def _an_orderly_close_is_an_end(patch: Patches) -> None:
    def end_connection(self: StreamResumer) -> None:
        self.is_complete = True

    patch.put(StreamResumer, "end_connection", end_connection)


def _retries_for_ever(patch: Patches) -> None:
    def retry_delay(original: Callable, self: StreamResumer, failure: ConnectionFailure, now_s: float) -> float:
        self._num_failures = 0
        return original(self, failure, now_s)

    patch.around(StreamResumer, "retry_delay", retry_delay)


def _comes_back_before_it_may(patch: Patches) -> None:
    def retry_delay(original: Callable, self: StreamResumer, failure: ConnectionFailure, now_s: float) -> float:
        return original(self, ConnectionFailure(failure.message, failure.is_retryable), now_s)

    patch.around(StreamResumer, "retry_delay", retry_delay)


def _never_too_late(patch: Patches) -> None:
    def feed(original: Callable, self: StreamResumer, received: bytes, now_s: float) -> bytes:
        return original(self, received, 0.0)

    patch.around(StreamResumer, "feed", feed)


def _retries_a_wrong_request(patch: Patches) -> None:
    def refusal(original: Callable, status: int, headers: object, body: bytes) -> ConnectionFailure:
        return ConnectionFailure(original(status, headers, body).message, status=status)

    for module in (failures, resuming_client, resuming_transport):
        patch.around(module, "refusal", refusal)


def _fights_another_client(patch: Patches) -> None:
    patch.put(
        StreamResumer,
        "_bounded_if_stale",
        lambda self, failure: ConnectionFailure(failure.message, code=failure.code),
    )


def _holds_without_a_bound(patch: Patches) -> None:
    def begin_attempt(original: Callable, self: StreamResumer) -> dict[str, str]:
        self._options = replace(self._options, max_event_bytes=1 << 40)
        return original(self)

    patch.around(StreamResumer, "begin_attempt", begin_attempt)


def _loses_the_rest_of_a_piece(patch: Patches) -> None:
    def feed(original: Callable, self: EventParser, received: bytes) -> list:
        events = original(self, received)
        self._rest.clear()
        return events

    patch.around(EventParser, "feed", feed)


TABLE = [
    Sabotage(
        "client-begins-again",
        "a client whose connection broke sends its request as a new one",
        _begins_again_after_a_break,
        [CORE + "test_a_break_at_each_byte_of_a_short_stream_is_not_to_be_seen"],
    ),
    Sabotage(
        "client-without-holding",
        "a client delivers events without an id, which the server sends again",
        _delivers_events_without_an_id,
        [
            CORE + "test_nothing_is_delivered_before_the_first_id_so_that_the_request_can_be_sent_anew",
            CORE + "test_each_event_is_delivered_once_and_in_order_wherever_connections_break",
        ],
    ),
    Sabotage(
        "client-half-an-event",
        "a client joins the half of an event to what the next connection brings",
        _keeps_half_an_event,
        [CORE + "test_a_break_at_each_byte_of_a_short_stream_is_not_to_be_seen"],
    ),
    Sabotage(
        "client-id-too-early",
        "a client resumes behind an event whose blank line has not come",
        _takes_the_id_before_the_blank_line,
        [CORE + "test_a_break_at_each_byte_of_a_short_stream_is_not_to_be_seen"],
    ),
    Sabotage(
        "client-close-is-end",
        "a client takes a connection that is closed in order for the end of its stream",
        _an_orderly_close_is_an_end,
        [CORE + "test_a_connection_that_is_closed_in_order_is_no_end"],
    ),
    Sabotage(
        "client-retries-for-ever",
        "a client connects again without a bound",
        _retries_for_ever,
        [CORE + "test_failures_in_a_row_are_bounded_and_an_event_starts_the_count_again"],
    ),
    Sabotage(
        "client-ignores-retry-after",
        "a client connects before the time that the server names",
        _comes_back_before_it_may,
        [CORE + "test_retry_after_is_the_least_delay"],
    ),
    Sabotage(
        "client-without-deadline",
        "a stream that brings events outlasts its deadline",
        _never_too_late,
        [CORE + "test_the_deadline_ends_a_stream_that_still_brings_events_and_delivers_them"],
    ),
    Sabotage(
        "client-retries-a-wrong-request",
        "a client sends a request again that the server has refused for good",
        _retries_a_wrong_request,
        [CORE + "test_a_refusal_is_retried_where_the_same_request_may_succeed[400-error0-False]"],
    ),
    Sabotage(
        "client-fights-another",
        "two clients take one stream from each other again and again",
        _fights_another_client,
        [CORE + "test_another_client_that_resumes_the_same_stream_takes_it_over"],
    ),
    Sabotage(
        "client-holds-without-bound",
        "a client holds any number of events without an id",
        _holds_without_a_bound,
        [
            CORE + "test_events_without_ids_are_held_up_to_a_bound",
            CORE + "test_an_event_without_an_end_is_refused_with_the_option_that_bounds_it",
        ],
    ),
    Sabotage(
        "client-loses-pieces",
        "a client forgets the piece of a line that it has received",
        _loses_the_rest_of_a_piece,
        [CORE + "test_each_event_is_delivered_once_and_in_order_wherever_connections_break"],
    ),
]
