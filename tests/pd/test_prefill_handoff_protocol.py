"""The prefill side of a handoff, one rule at a time."""

import pytest

from onward.pd import handoff_errors, prefill_handoff_protocol
from onward.pd.handoff_events import GrantReceived, HandoffCancelled, HandoffCompleted, HandoffKey, PrefillRequested
from onward.pd.prefill_handoff_protocol import PrefillHandoffProtocol
from onward.proto.handoff import (
    CancelHandoff,
    HandoffHeartbeat,
    LeaseGrant,
    PeerGone,
    PrefillDone,
    PrefillOffer,
    PrefillTaken,
    RefuseHandoff,
)
from tests.pd.messages import ENDPOINT, TIMES, prefill

WHY = handoff_errors.prefill_failed("for a test")
KEY = HandoffKey("D1", 1)


def grant(incarnation: str = "P1", *, number: int = 1, lease_s: float = 5.0) -> LeaseGrant:
    return LeaseGrant(number, incarnation, "lease-1", ENDPOINT, 0, [7, 8], lease_s, True)


class PrefillInstance(PrefillHandoffProtocol):
    """A side that was given handoff 1 of `D1` at time 0, and has acknowledged it."""

    def __init__(self) -> None:
        super().__init__("P1", TIMES)
        self.receive("D1", prefill(1), 0.0)
        self.take_events()
        self.take_messages()

    def offered(self, now_s: float = 1.0) -> "PrefillInstance":
        self.offer(KEY, 2, now_s)
        self.take_messages()
        return self

    def granted(self, now_s: float = 1.0) -> "PrefillInstance":
        self.offered(now_s).receive("D1", grant(), now_s)
        self.take_events()
        return self

    def made_ready(self, now_s: float = 1.0) -> "PrefillInstance":
        self.granted(now_s).ready(KEY, PrefillDone(1, "P1", [42], 0, checksums=[5, 6]), now_s)
        self.take_messages()
        return self

    def said(self, kind: type) -> list:
        return [message for _, message in self.take_messages() if isinstance(message, kind)]

    def dropped(self) -> str:
        [event] = self.take_events()
        assert isinstance(event, HandoffCancelled)
        return event.error.code

    @property
    def num_live(self) -> int:
        return sum(self.count_by_state().values())

    def answer_heartbeats(self, wanted: list[int], now_s: float) -> None:
        for beat in self.said(HandoffHeartbeat):
            self.receive("D1", HandoffHeartbeat(beat.number, wanted, beat.incarnation), now_s)


def test_work_is_reported_once_and_acknowledged_each_time() -> None:
    side = PrefillHandoffProtocol("P1", TIMES)
    for second in range(3):
        side.receive("D1", prefill(1), float(second))
    assert side.take_events() == [PrefillRequested(KEY, prefill(1))]
    assert side.take_messages() == [("D1", HandoffHeartbeat(number, [1], "P1")) for number in (1, 2, 3)]


def test_an_offer_is_repeated_until_it_is_answered() -> None:
    side = PrefillInstance()
    side.offer(KEY, 2, 1.0)
    side.tick(1.4)
    side.tick(1.5)
    assert side.said(PrefillOffer) == [PrefillOffer(1, "P1", 2)] * 2
    side.receive("D1", grant(), 1.6)
    assert side.take_events() == [GrantReceived(KEY, grant())]
    side.tick(3.0)
    assert side.said(PrefillOffer) == []


@pytest.mark.parametrize("kind", [PrefillOffer, PrefillDone])
def test_a_repeated_prefill_gets_the_latest_word_again(kind: type) -> None:
    side = PrefillInstance().offered() if kind is PrefillOffer else PrefillInstance().made_ready()
    side.receive("D1", prefill(1), 1.1)
    assert [type(message) for _, message in side.take_messages()] == [kind]


def test_a_grant_that_comes_twice_is_reported_once() -> None:
    side = PrefillInstance().offered()
    side.receive("D1", grant(), 1.1)
    side.receive("D1", grant(), 1.2)
    assert side.take_events() == [GrantReceived(KEY, grant())]


def test_ready_is_repeated_until_it_is_taken() -> None:
    side = PrefillInstance().granted()
    side.ready(KEY, PrefillDone(1, "P1", [42], 3, checksums=[5, 6]), 2.0)
    side.tick(2.5)
    assert side.said(PrefillDone) == [PrefillDone(1, "P1", [42], 3, checksums=[5, 6])] * 2
    side.receive("D1", PrefillTaken(1), 2.6)
    assert side.take_events() == [HandoffCompleted(KEY)]
    side.tick(3.5)
    assert (side.take_messages(), side.num_live) == ([], 0)


def test_that_a_grammar_is_done_is_told_with_the_tokens() -> None:
    side = PrefillInstance().granted()
    side.ready(KEY, PrefillDone(1, "P1", [42], 3, grammar_done=True), 2.0)
    assert [ready.grammar_done for ready in side.said(PrefillDone)] == [True]


@pytest.mark.parametrize(
    "message", [CancelHandoff(1, WHY), CancelHandoff(1, WHY, "P1"), RefuseHandoff(1, WHY, "P1"), PeerGone("D1")]
)
def test_the_decode_side_can_end_it_at_any_time(message: CancelHandoff | RefuseHandoff | PeerGone) -> None:
    for side in (PrefillInstance(), PrefillInstance().offered(), PrefillInstance().granted()):
        side.receive("D1", message, 2.0)
        assert side.dropped() == "pd_prefill_failed"
        assert side.num_live == 0


def test_a_cancel_for_an_earlier_incarnation_of_ours_is_not_for_us() -> None:
    side = PrefillInstance().granted()
    side.receive("D1", CancelHandoff(1, WHY, "P0"), 2.0)
    side.receive("D1", RefuseHandoff(1, WHY, "P0"), 2.0)
    assert (side.take_events(), side.num_live) == ([], 1)


def test_a_grant_for_an_earlier_incarnation_of_ours_is_not_for_us() -> None:
    side = PrefillInstance().offered()
    side.receive("D1", grant("P0"), 1.1)
    assert (side.take_events(), side.count_by_state()["offered"]) == ([], 1)


def test_gone_ends_only_what_was_for_that_decode_instance() -> None:
    side = PrefillInstance()
    side.receive("D2", prefill(1), 0.0)
    side.take_events()
    side.receive("D1", PeerGone("D1"), 1.0)
    assert [event.key for event in side.take_events()] == [KEY]
    assert side.num_live == 1


def test_a_grant_for_what_we_do_not_have_is_cancelled() -> None:
    side = PrefillInstance()
    side.receive("D1", grant(number=9), 1.0)
    [cancel] = side.said(CancelHandoff)
    assert (cancel.handoff_id, cancel.incarnation) == (9, "P1")
    assert side.take_events() == []


def test_our_refusal_and_our_failure_are_told_and_cause_no_event() -> None:
    side = PrefillInstance()
    side.refuse(KEY, WHY, 1.0)
    assert side.take_messages() == [("D1", RefuseHandoff(1, WHY, "P1"))]
    assert (side.take_events(), side.num_live) == ([], 0)
    side = PrefillInstance().granted()
    side.fail(KEY, WHY, 1.0)
    assert side.take_messages() == [("D1", CancelHandoff(1, WHY, "P1"))]
    assert (side.take_events(), side.num_live) == ([], 0)


def test_a_refusal_that_was_lost_is_told_again_when_the_prefill_comes_again() -> None:
    side = PrefillInstance()
    side.refuse(KEY, WHY, 1.0)
    side.take_messages()
    side.receive("D1", prefill(1), 1.5)
    assert side.take_messages() == [("D1", CancelHandoff(1, WHY, "P1"))]
    assert side.take_events() == []


def test_a_late_copy_of_a_prefill_does_not_start_finished_work_again() -> None:
    side = PrefillInstance().made_ready()
    side.receive("D1", PrefillTaken(1), 2.0)
    side.take_events()
    side.receive("D1", prefill(1), 2.1)
    assert (side.take_events(), side.num_live) == ([], 0)


def test_what_is_over_is_remembered_for_a_bounded_number_of_handoffs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_handoff_protocol, "MAX_REMEMBERED", 3)
    side = PrefillHandoffProtocol("P1", TIMES)
    for number in range(1, 6):
        side.receive("D1", prefill(number), 0.0)
        side.receive("D1", CancelHandoff(number, WHY), 0.0)
    side.take_events()
    for number in (3, 4, 5, 1):
        side.receive("D1", prefill(number), 1.0)
    assert side.take_events() == [PrefillRequested(KEY, prefill(1))]


def test_what_is_said_about_a_handoff_that_has_just_ended_has_no_effect() -> None:
    side = PrefillInstance()
    side.receive("D1", CancelHandoff(1, WHY), 1.0)
    side.offer(KEY, 2, 1.0)
    side.ready(KEY, PrefillDone(1, "P1", [42], 0), 1.0)
    side.fail(KEY, WHY, 1.0)
    side.refuse(KEY, WHY, 1.0)
    assert side.take_messages() == []
    assert side.dropped() == "pd_prefill_failed"


def test_a_heartbeat_goes_to_each_decode_instance_each_second_while_there_is_work_for_it() -> None:
    side = PrefillInstance()
    side.receive("D2", prefill(1), 0.0)
    side.receive("D2", prefill(2), 0.0)
    side.take_messages()
    side.tick(0.9)
    assert side.take_messages() == []
    side.tick(1.0)
    beats = [
        (decode, message.handoff_ids)
        for decode, message in side.take_messages()
        if isinstance(message, HandoffHeartbeat)
    ]
    assert beats == [("D1", [1]), ("D2", [1, 2])]
    side.receive("D1", CancelHandoff(1, WHY), 1.1)
    side.tick(2.0)
    assert [decode for decode, _ in side.take_messages()] == ["D2"]


def test_answered_heartbeats_extend_the_lease_from_when_they_were_sent() -> None:
    side = PrefillInstance().granted(1.0)
    side.tick(3.0)
    side.answer_heartbeats([1], 5.9)
    side.tick(7.9)
    assert side.take_events() == []
    side.take_messages()
    side.tick(8.0)
    assert side.dropped() == "pd_lease_expired"
    assert [message.error.code for message in side.said(CancelHandoff)] == ["pd_lease_expired"]


def test_a_lease_counts_from_the_first_copy_of_the_offer() -> None:
    side = PrefillInstance().offered(1.0)
    for tenths in range(15, 55, 5):
        side.receive("D1", prefill(1), tenths / 10)
        side.tick(tenths / 10)
    side.receive("D1", grant(), 5.5)
    side.take_events()
    side.tick(5.9)
    assert side.take_events() == []
    side.tick(6.0)
    assert side.dropped() == "pd_lease_expired"


def test_a_grant_that_comes_after_its_lease_is_not_used() -> None:
    side = PrefillInstance().offered(1.0)
    for second in range(2, 7):
        side.receive("D1", prefill(1), float(second))
        side.tick(float(second))
    side.take_messages()
    side.receive("D1", grant(), 6.0)
    assert side.dropped() == "pd_lease_expired"
    assert len(side.said(CancelHandoff)) == 1


def test_the_lease_is_as_long_as_the_grant_says_and_heartbeats_keep_up_with_it() -> None:
    side = PrefillInstance()
    side.tick(1.0)
    side.offered(1.0).receive("D1", grant(lease_s=0.5), 1.0)
    side.take_events()
    for step in range(1, 20):
        side.tick(1.0 + step * 0.1)
        side.answer_heartbeats([1], 1.0 + step * 0.1)
    assert side.take_events() == []
    side.tick(3.5)
    assert side.dropped() == "pd_lease_expired"


@pytest.mark.parametrize("state", ["queued", "offered", "ready"])
def test_a_decode_instance_that_falls_silent_loses_its_place(state: str) -> None:
    side = PrefillInstance()
    since_s = {"queued": 0.0, "offered": 0.0, "ready": 1.0}[state]
    if state == "offered":
        side.offered()
    if state == "ready":
        side.made_ready()
    side.tick(since_s + 4.9)
    assert side.take_events() == []
    side.take_messages()
    side.tick(since_s + 5.0)
    assert side.dropped() == "pd_lease_expired"
    assert len(side.said(CancelHandoff)) == 1


def test_an_answer_in_the_turn_of_the_deadline_is_in_time() -> None:
    side = PrefillInstance()
    side.tick(4.0)
    side.answer_heartbeats([1], 5.0)
    side.tick(5.0)
    assert side.take_events() == []


def test_what_is_missing_from_an_answer_is_over() -> None:
    side = PrefillInstance().granted(1.0)
    side.tick(1.0)
    side.answer_heartbeats([], 1.1)
    assert side.dropped() == "pd_prefill_failed"


def test_an_answer_speaks_only_of_what_was_asked_with_its_number() -> None:
    side = PrefillInstance()
    side.tick(1.0)
    [beat] = side.said(HandoffHeartbeat)
    side.receive("D1", prefill(2), 1.1)
    side.take_events()
    side.receive("D1", HandoffHeartbeat(beat.number, [1], "P1"), 1.2)
    side.receive("D1", HandoffHeartbeat(999, [], "P1"), 1.2)
    side.receive("D1", HandoffHeartbeat(beat.number, [], "P1"), 1.3)
    assert (side.take_events(), side.num_live) == ([], 2)


def test_an_answer_to_an_earlier_incarnation_is_not_for_us() -> None:
    side = PrefillInstance()
    side.tick(1.0)
    [beat] = side.said(HandoffHeartbeat)
    side.receive("D1", HandoffHeartbeat(beat.number, [], "P0"), 1.2)
    assert (side.take_events(), side.num_live) == ([], 1)


def test_unanswered_heartbeats_are_remembered_up_to_a_bound() -> None:
    side = PrefillInstance()
    for _ in range(prefill_handoff_protocol.MAX_UNANSWERED_HEARTBEATS + 50):
        side.receive("D1", prefill(1), 0.1)
    assert len(side._decode_peers["D1"].sent_heartbeats) == prefill_handoff_protocol.MAX_UNANSWERED_HEARTBEATS
    side.receive("D1", prefill(1), 5.2)
    assert len(side._decode_peers["D1"].sent_heartbeats) == 1


def test_taken_from_an_earlier_incarnation_ends_the_work_that_was_started_again() -> None:
    side = PrefillInstance().granted()
    side.receive("D1", PrefillTaken(1), 2.0)
    assert side.dropped() == "pd_prefill_failed"


def test_lost_kv_memory_ends_everything_and_is_told_to_everyone() -> None:
    side = PrefillInstance().granted()
    side.receive("D2", prefill(1), 0.0)
    side.take_events()
    side.take_messages()
    side.reset("P2", 2.0)
    assert side.take_messages() == [("D1", PeerGone("P1")), ("D2", PeerGone("P1"))]
    assert [type(event) for event in side.take_events()] == [HandoffCancelled, HandoffCancelled]
    side.receive("D1", prefill(2), 3.0)
    assert [message.incarnation for message in side.said(HandoffHeartbeat)] == ["P2"]


def test_a_prefill_that_comes_again_after_lost_kv_memory_is_told_of_it() -> None:
    side = PrefillInstance()
    side.reset("P2", 1.0)
    side.take_messages()
    side.receive("D1", prefill(1), 1.5)
    assert [message.incarnation for message in side.said(CancelHandoff)] == ["P2"]


def test_closing_tells_every_decode_instance() -> None:
    side = PrefillInstance()
    side.close()
    assert side.take_messages() == [("D1", PeerGone("P1"))]
    assert side.num_live == 0
