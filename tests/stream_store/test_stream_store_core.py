"""Which api process has a stream, and which attempt continues it: the stream store's decisions, without a socket."""

import pytest

from onward.proto.stream_store import (
    ClaimAttempt,
    ClaimReply,
    Delete,
    DropByName,
    DropReply,
    DropSuperseded,
    FindEntry,
    FindReply,
    LiveStreamReply,
    PutEntry,
    QueryLiveStream,
    ReleaseAttempt,
    ReleaseReply,
    StoreHeartbeat,
    StoreHeartbeatReply,
    ToStreamStore,
)
from onward.stream_store.core import FINALIZE_TIMEOUT_S, PEER_REPLY_TIMEOUT_S, StreamStoreCore
from tests.stream_store.store_entries import record_of

CANCELLED = record_of("r", kind="response", attempt_epoch=2, status="cancelled")
ENDS = [pytest.param(PutEntry(CANCELLED), id="cancelled"), pytest.param(Delete(9, "r", ""), id="deleted")]


def shelf_of(*apis: str) -> StreamStoreCore:
    core = StreamStoreCore()
    for api in apis:
        assert core.receive(api, StoreHeartbeat(7), 0.0) == [(api, StoreHeartbeatReply(7))]
    return core


def test_what_one_process_has_put_another_finds_at_once() -> None:
    core = shelf_of("a", "b")
    record = record_of("r", attempt_epoch=2)
    assert core.receive("a", PutEntry(record), 0.0) == []
    assert core.receive("b", FindEntry(1, "r", attempt_epoch=2), 0.0) == [("b", FindReply(1, record))]
    assert core.receive("b", FindEntry(2, "r", attempt_epoch=1), 0.0) == [("b", FindReply(2, record))]


def test_the_only_process_is_answered_at_once() -> None:
    core = shelf_of("a")
    assert core.receive("a", FindEntry(1, "r"), 0.0) == [("a", FindReply(1, None))]
    assert core.receive("a", ClaimAttempt(2, "r", 2, ""), 0.0) == [("a", ClaimReply(2))]


def test_a_stream_that_runs_in_another_process_is_shown_and_goes_on() -> None:
    core = shelf_of("a", "b", "c")
    assert core.receive("b", FindEntry(5, "r", attempt_epoch=1), 0.0) == [
        ("a", QueryLiveStream(1, "r")),
        ("c", QueryLiveStream(1, "r")),
    ]
    assert core.receive("c", LiveStreamReply(1, None), 0.0) == []
    live = record_of("r")
    assert core.receive("a", LiveStreamReply(1, live), 0.0) == [("b", FindReply(5, live))]
    assert core.num_pending_queries == 0 and core.entries.count()["detached"] == 0


def test_a_record_of_an_earlier_attempt_is_not_enough_for_who_has_seen_a_later_one() -> None:
    core = shelf_of("a", "b")
    core.receive("a", PutEntry(record_of("r", attempt_epoch=1)), 0.0)
    [(_, show)] = core.receive("b", FindEntry(1, "r", attempt_epoch=2), 0.0)
    assert isinstance(show, QueryLiveStream)
    later = record_of("r", attempt_epoch=2)
    assert core.receive("a", LiveStreamReply(show.query_id, later), 0.0) == [("b", FindReply(1, later))]


def test_who_knows_no_epoch_gets_the_latest_there_is() -> None:
    core = shelf_of("a", "b")
    kept = record_of("r", attempt_epoch=3)
    core.receive("a", PutEntry(kept), 0.0)
    core.receive("b", FindEntry(1, "r"), 0.0)
    assert core.receive("a", LiveStreamReply(1, record_of("r", attempt_epoch=2)), 0.0) == [("b", FindReply(1, kept))]


def test_a_stream_that_is_left_while_it_is_looked_for_is_found() -> None:
    core = shelf_of("a", "b")
    core.receive("b", FindEntry(1, "r", attempt_epoch=1), 0.0)
    record = record_of("r")
    core.receive("a", PutEntry(record), 0.0)  # on its way when the question came
    assert core.receive("a", LiveStreamReply(1, None), 0.0) == [("b", FindReply(1, record))]


def test_a_silent_process_is_waited_for_until_the_deadline() -> None:
    core = shelf_of("a", "b")
    core.receive("b", FindEntry(1, "r", attempt_epoch=1), 0.0)
    core.receive("b", ClaimAttempt(2, "s", 2, ""), 0.0)
    assert core.tick(PEER_REPLY_TIMEOUT_S - 0.01) == []
    assert core.tick(PEER_REPLY_TIMEOUT_S) == [("b", FindReply(1, None)), ("b", ClaimReply(2))]
    assert core.receive("a", LiveStreamReply(1, record_of("r")), 1.0) == []


def test_a_process_that_dies_or_cannot_be_reached_is_not_waited_for() -> None:
    core = shelf_of("a", "b", "c")
    letters = core.receive("b", FindEntry(1, "r", attempt_epoch=1), 0.0)
    assert core.undelivered(*letters[0], 0.0) == []
    assert core.api_gone("c", 0.0) == [("b", FindReply(1, None))]
    assert core.receive("b", FindEntry(2, "r", attempt_epoch=1), 0.0) == [("a", QueryLiveStream(2, "r"))]
    assert core.api_gone("b", 0.0) == [] and core.num_pending_queries == 0


def test_what_a_process_has_put_outlives_it() -> None:
    core = shelf_of("a", "b")
    record = record_of("r")
    core.receive("a", PutEntry(record), 0.0)
    core.api_gone("a", 0.0)
    assert core.receive("b", FindEntry(1, "r", attempt_epoch=1), 0.0) == [("b", FindReply(1, record))]


def test_a_later_attempt_ends_the_earlier_one_elsewhere_and_nothing_of_it_is_lost() -> None:
    core = shelf_of("a", "b")
    assert core.receive("b", ClaimAttempt(1, "r", 2, "anna"), 0.0) == [("a", ReleaseAttempt(1, "r", 2, "anna"))]
    record = record_of("r")
    assert core.receive("a", ReleaseReply(1, record), 0.0) == [("b", ClaimReply(1))]
    assert core.entries.get("r", 0.0) == record, "until the later one runs"
    core.receive("b", DropSuperseded("r", 2, ""), 0.0)
    assert core.entries.get("r", 0.0) is None


def test_an_attempt_that_was_overtaken_elsewhere_is_refused() -> None:
    core = shelf_of("a", "b", "c")
    core.receive("b", ClaimAttempt(1, "r", 2, ""), 0.0)
    assert core.receive("a", ReleaseReply(1, blocking_epoch=3), 0.0) == [("b", ClaimReply(1, 3))]
    assert core.receive("c", ReleaseReply(1), 0.0) == []


def test_of_two_that_claim_at_once_the_first_wins_unless_the_second_is_later() -> None:
    core = shelf_of("a", "b")
    core.receive("a", ClaimAttempt(1, "r", 2, ""), 0.0)
    assert core.receive("b", ClaimAttempt(1, "r", 2, ""), 0.0) == [("b", ClaimReply(1, 2))]
    assert core.receive("b", ClaimAttempt(2, "r", 3, ""), 0.0) == [
        ("a", ClaimReply(1, 3)),
        ("a", ReleaseAttempt(2, "r", 3, "")),
    ]
    assert core.receive("a", ReleaseReply(2), 0.0) == [("b", ClaimReply(2))]
    assert core.num_pending_queries == 0


def test_what_somebody_is_about_to_end_is_not_taken_up_meanwhile() -> None:
    core = shelf_of("a")
    core.receive("a", PutEntry(record_of("r", kind="response", attempt_epoch=1)), 0.0)
    assert core.receive("a", ClaimAttempt(1, "r", 2, "", to_finalize=True), 0.0) == [("a", ClaimReply(1))]
    assert core.receive("a", ClaimAttempt(2, "r", 2, ""), 0.0) == [("a", ClaimReply(2, 2))]
    core.receive("a", PutEntry(record_of("r", kind="response", attempt_epoch=2)), 0.0)
    core.tick(FINALIZE_TIMEOUT_S + 1.0)
    assert core.receive("a", ClaimAttempt(3, "r", 2, ""), FINALIZE_TIMEOUT_S + 1.0) == [("a", ClaimReply(3, 2))]
    assert core.receive("a", ClaimAttempt(4, "r", 3, ""), FINALIZE_TIMEOUT_S + 1.0) == [("a", ClaimReply(4))]


def test_no_attempt_starts_once_a_response_is_cancelled_and_it_is_found_without_asking_others() -> None:
    core = shelf_of("a", "b")
    cancelled = record_of("r", kind="response", attempt_epoch=2, status="cancelled")
    core.receive("a", PutEntry(cancelled), 0.0)
    assert core.receive("b", ClaimAttempt(1, "r", 9, ""), 0.0) == [("b", ClaimReply(1, 9))]
    assert core.receive("b", FindEntry(2, "r"), 0.0) == [("b", FindReply(2, cancelled))]


def test_no_attempt_starts_while_its_response_is_finalized_however_late_its_epoch_is() -> None:
    core = shelf_of("a", "b")
    core.receive("a", ClaimAttempt(1, "r", 2, "", to_finalize=True), 0.0)
    assert core.receive("b", ReleaseReply(1), 0.0) == [("a", ClaimReply(1))]
    assert core.receive("b", ClaimAttempt(1, "r", 5, ""), 0.0) == [("b", ClaimReply(1, 5))]
    [(_, release)] = core.receive("b", ClaimAttempt(2, "r", 3, "", to_finalize=True), 0.0)
    assert isinstance(release, ReleaseAttempt), "another process may finalize it too: the first end counts"


@pytest.mark.parametrize("end", ENDS)
def test_a_claim_is_refused_if_its_response_ends_while_other_processes_are_asked(end: ToStreamStore) -> None:
    core = shelf_of("a", "b")
    [(_, release)] = core.receive("b", ClaimAttempt(1, "r", 3, ""), 0.0)
    assert isinstance(release, ReleaseAttempt)
    core.receive("a", end, 0.0)
    assert core.receive("a", ReleaseReply(release.query_id), 0.0) == [("b", ClaimReply(1, 3))]


@pytest.mark.parametrize("end", ENDS)
def test_an_attempt_that_started_when_its_response_had_ended_is_released(end: ToStreamStore) -> None:
    core = shelf_of("a", "b")
    core.receive("a", end, 0.0)
    [(api, release)] = core.receive("b", DropSuperseded("r", 7, ""), 0.0)
    assert api == "b" and isinstance(release, ReleaseAttempt) and release.attempt_epoch > 7
    assert core.receive("b", ReleaseReply(release.query_id, record_of("r", attempt_epoch=7)), 0.0) == []
    kept = core.entries.get("r", 0.0)
    assert kept is not None and kept.status in ("cancelled", "deleted")


def test_a_cancel_ends_an_attempt_in_a_process_that_did_not_answer_the_claim() -> None:
    core = shelf_of("a", "b")
    core.receive("a", ClaimAttempt(1, "r", 2, "", to_finalize=True), 0.0)
    assert core.tick(PEER_REPLY_TIMEOUT_S) == [("a", ClaimReply(1))]
    [(api, release)] = core.receive("a", PutEntry(CANCELLED), PEER_REPLY_TIMEOUT_S)
    assert api == "b" and isinstance(release, ReleaseAttempt) and release.attempt_epoch > 7
    completed = record_of("s", kind="response", attempt_epoch=2, status="complete")
    assert core.receive("a", PutEntry(completed), PEER_REPLY_TIMEOUT_S) == []


def test_who_does_not_end_what_it_was_about_to_end_holds_it_up_for_a_while_only() -> None:
    core = shelf_of("a")
    core.receive("a", ClaimAttempt(1, "r", 2, "", to_finalize=True), 0.0)
    assert core.receive("a", ClaimAttempt(2, "r", 2, ""), FINALIZE_TIMEOUT_S) == [("a", ClaimReply(2))]


def test_what_is_released_too_late_does_not_take_the_place_of_the_stream_that_went_on() -> None:
    core = shelf_of("a", "b")
    core.receive("b", ClaimAttempt(1, "r", 2, ""), 0.0)
    core.tick(1.0)
    core.receive("b", DropSuperseded("r", 2, ""), 1.0)
    assert core.receive("a", ReleaseReply(1, record_of("r")), 5.0) == []
    assert core.entries.get("r", 5.0) is None


def test_nobody_finds_what_is_anothers() -> None:
    core = shelf_of("a", "b")
    record = record_of("r", caller="anna")
    core.receive("a", PutEntry(record), 0.0)
    core.receive("b", FindEntry(1, "r", 1, "ben"), 0.0)
    assert core.receive("a", LiveStreamReply(1, record), 0.0) == [("b", FindReply(1, None))]
    assert core.receive("b", FindEntry(2, "r", 1, "anna"), 0.0) == [("b", FindReply(2, record))]
    assert core.receive("b", FindEntry(3, "r", 1), 0.0) == [("b", FindReply(3, record))]


def test_an_abort_drops_a_record_once() -> None:
    core = shelf_of("a", "b")
    core.receive("a", PutEntry(record_of("r", aliases=("label",))), 0.0)
    assert core.receive("b", DropByName(1, ["label", "x"]), 0.0) == [("b", DropReply(1, ["label"]))]
    assert core.receive("a", DropByName(1, ["label"]), 0.0) == [("a", DropReply(1, []))]


def test_a_deleted_response_is_unknown_and_no_attempt_at_it_starts() -> None:
    core = shelf_of("a", "b")
    record = record_of("r", kind="response", is_stored=True)
    core.receive("a", PutEntry(record), 0.0)
    [(_, asked)] = core.receive("a", FindEntry(1, "r"), 0.0)
    assert isinstance(asked, QueryLiveStream)
    assert core.receive("b", Delete(2, "r", ""), 0.0) == [("b", DropReply(2, ["r"]))]
    assert core.receive("b", LiveStreamReply(asked.query_id, record), 0.0) == [("a", FindReply(1, None))], (
        "also while it runs"
    )
    core.receive("a", PutEntry(record), 0.0)
    assert core.receive("a", FindEntry(3, "r"), 0.0) == [("a", FindReply(3, None))]
    assert core.receive("a", ClaimAttempt(4, "r", 7, ""), 0.0) == [("a", ClaimReply(4, 7))]


def test_it_tells_how_much_it_keeps() -> None:
    core = shelf_of("a")
    core.receive("a", PutEntry(record_of("r", data=b"x" * 100)), 0.0)
    shown = {(one.name, *s.labels.values()): s.value for one in core.registry.snapshot() for s in one.series}
    assert (
        shown["onward_stream_store_records", "detached"] == 1 and shown["onward_stream_store_bytes", "detached"] > 100
    )
    assert shown["onward_stream_store_evicted_total",] == 0
