"""The decode side of a handoff, one rule at a time."""

import pytest

from onward.pd import decode_handoff_protocol, handoff_errors
from onward.pd.decode_handoff_protocol import DecodeHandoffProtocol
from onward.pd.handoff_events import HandoffFailed, KvArrived, OfferReceived
from onward.proto.engine import ErrorInfo
from onward.proto.handoff import (
    CancelHandoff,
    HandoffHeartbeat,
    LeaseGrant,
    PeerGone,
    PrefillDone,
    PrefillOffer,
    PrefillRequest,
    PrefillTaken,
    RefuseHandoff,
)
from tests.pd.messages import ENDPOINT, TIMES, grant, prefill

WHY = handoff_errors.prefill_failed("for a test")


class Decode(DecodeHandoffProtocol):
    """A side whose handoff 1 was asked of `p` at time 0."""

    def __init__(self) -> None:
        super().__init__("decode-1", TIMES)
        self.request_prefill("p", prefill(self.next_handoff_id()), 0.0)
        self.take_messages()

    def offered(self, now_s: float = 1.0) -> "Decode":
        self.receive("p", PrefillOffer(1, "P1", 2), now_s)
        self.take_events()
        return self

    def granted(self, now_s: float = 1.0, *, checksums: bool = True) -> "Decode":
        self.offered(now_s).grant(grant(1, checksums=checksums), now_s)
        self.take_messages()
        return self

    def said(self) -> list:
        return [message for _, message in self.take_messages()]

    def ended(self) -> HandoffFailed:
        [event] = self.take_events()
        assert isinstance(event, HandoffFailed)
        return event

    @property
    def num_live(self) -> int:
        return sum(self.count_by_state().values())


def ready(checksums: list[int], incarnation: str = "P1", number: int = 1) -> PrefillDone:
    return PrefillDone(number, incarnation, [42], 0, checksums=checksums)


def codes(messages: list) -> list[tuple[type, str]]:
    return [(type(message), message.error.code) for message in messages]


def test_a_prefill_is_repeated_until_the_peer_is_heard_of() -> None:
    side = Decode()
    side.tick(0.4)
    assert side.said() == []
    side.tick(0.5)
    side.tick(1.0)
    assert side.take_messages() == [("p", prefill(1)), ("p", prefill(1))]
    side.receive("p", HandoffHeartbeat(1, [1], "P1"), 1.1)
    side.take_messages()
    side.tick(3.0)
    assert side.said() == []


def test_an_offer_is_reported_once_however_often_it_comes() -> None:
    side = Decode()
    for _ in range(3):
        side.receive("p", PrefillOffer(1, "P1", 2), 1.0)
    assert side.take_events() == [OfferReceived(1, 2)]
    assert side.count_by_state() == {"asked": 0, "offered": 1, "granted": 0}


def test_an_offer_that_comes_again_gets_the_same_grant_again() -> None:
    side = Decode().offered()
    assert side.grant(grant(1), 1.0)
    side.receive("p", PrefillOffer(1, "P1", 2), 1.5)
    first, second = side.said()
    assert first == second == LeaseGrant(1, "P1", "lease-1", ENDPOINT, 0, [7, 8], 5.0, True)
    assert side.take_events() == []


def test_an_offer_that_is_held_for_too_long_is_refused() -> None:
    side = Decode().offered(1.0)
    side.tick(1.4)
    assert side.said() == []
    side.tick(1.5)
    assert codes(side.said()) == [(RefuseHandoff, "pd_no_decode_blocks")]
    ended = side.ended()
    assert (ended.error.code, ended.error.stage) == ("pd_no_decode_blocks", "offer")


def test_a_grant_for_an_offer_that_has_ended_meanwhile_is_given_to_nobody() -> None:
    side = Decode().offered(1.0)
    side.tick(1.5)
    side.take_messages()
    assert not side.grant(grant(1), 1.5)
    assert side.said() == []
    side.ended()


def test_a_refusal_of_ours_ends_the_handoff_without_an_event() -> None:
    side = Decode().offered()
    side.refuse(1, WHY, 1.0)
    assert side.take_messages() == [("p", RefuseHandoff(1, WHY, "P1"))]
    assert (side.take_events(), side.num_live) == ([], 0)


@pytest.mark.parametrize("message", [RefuseHandoff(1, WHY, "P1"), CancelHandoff(1, WHY, "P1")])
def test_a_refusal_of_the_peer_ends_the_handoff_with_its_error(message: RefuseHandoff | CancelHandoff) -> None:
    side = Decode().granted()
    side.receive("p", message, 2.0)
    assert side.ended() == HandoffFailed(1, WHY)
    assert side.said() == []


def test_it_arrives_when_the_peer_is_ready_and_all_was_counted() -> None:
    side = Decode().granted()
    side.receive("p", ready([5, 6]), 2.0)
    assert (side.take_events(), side.said()) == ([], [])
    side.on_kv_received(1, [5, 6], 2.1)
    assert side.take_events() == [KvArrived(1, ready([5, 6]))]
    assert side.said() == [PrefillTaken(1)]
    assert side.num_live == 0


def test_what_was_counted_waits_for_the_word_of_the_peer() -> None:
    side = Decode().granted()
    side.on_kv_received(1, [5, 6], 2.0)
    assert (side.take_events(), side.said()) == ([], [])
    side.receive("p", ready([5, 6]), 2.1)
    assert side.take_events() == [KvArrived(1, ready([5, 6]))]


@pytest.mark.parametrize("counted", [[5, 7], [5], []])
def test_checksums_that_differ_end_the_handoff(counted: list[int]) -> None:
    side = Decode().granted()
    side.receive("p", ready([5, 6]), 2.0)
    side.on_kv_received(1, counted, 2.1)
    assert codes(side.said()) == [(CancelHandoff, "pd_transfer_failed")]
    ended = side.ended()
    assert (ended.error.code, ended.error.stage) == ("pd_transfer_failed", "transfer")


def test_checksums_that_were_not_asked_for_are_not_compared() -> None:
    side = Decode().granted(checksums=False)
    side.receive("p", ready([5, 6]), 2.0)
    side.on_kv_received(1, [], 2.1)
    assert isinstance(side.take_events()[0], KvArrived)


def test_a_peer_that_is_ready_without_a_grant_is_not_believed() -> None:
    side = Decode().offered()
    side.receive("p", ready([5, 6]), 2.0)
    assert codes(side.said()) == [(CancelHandoff, "pd_prefill_failed")]
    side.ended()


def test_ready_that_comes_again_is_answered_with_taken_again() -> None:
    side = Decode().granted()
    side.on_kv_received(1, [5, 6], 2.0)
    for _ in range(3):
        side.receive("p", ready([5, 6]), 2.0)
    assert side.said() == [PrefillTaken(1)] * 3
    assert len(side.take_events()) == 1


def test_a_peer_that_missed_taken_is_told_when_it_next_asks() -> None:
    side = Decode().granted()
    side.on_kv_received(1, [5, 6], 2.0)
    side.receive("p", ready([5, 6]), 2.0)
    side.take_messages()
    side.receive("p", HandoffHeartbeat(9, [1], "P1"), 2.5)
    assert side.said() == [PrefillTaken(1), HandoffHeartbeat(9, [], "P1")]


def test_what_was_taken_is_remembered_for_a_bounded_number_of_handoffs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_handoff_protocol, "MAX_REMEMBERED", 3)
    side = DecodeHandoffProtocol("decode-1", TIMES)
    for number in range(1, 6):
        side.request_prefill("p", prefill(side.next_handoff_id()), 0.0)
        side.receive("p", PrefillOffer(number, "P1", 2), 0.0)
        side.grant(grant(number, f"lease-{number}"), 0.0)
        side.on_kv_received(number, [5], 0.0)
        side.receive("p", ready([5], number=number), 0.0)
    side.take_messages()
    for number in range(1, 6):
        side.receive("p", ready([5], number=number), 1.0)
    assert [type(message) for _, message in side.take_messages()] == [
        CancelHandoff,
        CancelHandoff,
        PrefillTaken,
        PrefillTaken,
        PrefillTaken,
    ]


def test_a_late_offer_of_an_abandoned_peer_is_cancelled_with_the_reason() -> None:
    side = Decode()
    side.cancel(1, WHY, 1.0)
    side.take_messages()
    side.receive("p", PrefillOffer(1, "P1", 2), 2.0)
    assert side.take_messages() == [("p", CancelHandoff(1, WHY, "P1"))]
    assert side.take_events() == []


@pytest.mark.parametrize("message", [PrefillOffer(77, "P1", 2), ready([5], number=77)])
def test_a_word_about_a_handoff_that_we_never_had_is_cancelled(message: PrefillOffer | PrefillDone) -> None:
    side = Decode()
    side.receive("p", message, 1.0)
    assert codes(side.said()) == [(CancelHandoff, "pd_prefill_failed")]
    assert side.take_events() == []


def test_another_peer_cannot_speak_for_the_one_that_was_asked() -> None:
    side = Decode()
    side.receive("q", PrefillOffer(1, "Q1", 2), 1.0)
    assert [(peer, type(message)) for peer, message in side.take_messages()] == [("q", CancelHandoff)]
    side.receive("q", CancelHandoff(1, WHY, "Q1"), 1.0)
    assert side.count_by_state()["asked"] == 1


def test_a_heartbeat_is_answered_with_what_is_still_wanted() -> None:
    side = Decode()
    side.request_prefill("p", prefill(side.next_handoff_id()), 0.0)
    side.cancel(1, WHY, 0.5)
    side.take_messages()
    side.receive("p", HandoffHeartbeat(4, [1, 2, 99], "P1"), 1.0)
    assert side.take_messages() == [("p", HandoffHeartbeat(4, [2], "P1"))]


def test_heartbeats_extend_the_lease_and_silence_ends_it() -> None:
    side = Decode().granted(1.0)
    for second in range(2, 12):
        side.receive("p", HandoffHeartbeat(second, [1], "P1"), float(second))
        side.tick(float(second))
    side.tick(16.9)
    assert side.take_events() == []
    side.take_messages()
    side.tick(17.0)
    assert codes(side.said()) == [(CancelHandoff, "pd_lease_expired")]
    ended = side.ended()
    assert ended.error.code == "pd_lease_expired"


def test_a_heartbeat_about_others_does_not_extend_a_lease() -> None:
    side = Decode().granted(1.0)
    side.receive("p", HandoffHeartbeat(1, [], "P1"), 5.0)
    side.tick(7.0)
    assert side.ended().error.code == "pd_lease_expired"


def test_a_peer_that_never_answers_has_failed() -> None:
    side = Decode()
    side.tick(5.9)
    assert side.take_events() == []
    side.tick(6.0)
    ended = side.ended()
    assert (ended.error.code, ended.error.status, ended.error.retryable) == ("pd_prefill_failed", 503, True)
    assert ended.error.message.startswith("PD Error: ")


def test_a_message_that_comes_in_the_turn_of_its_deadline_is_in_time() -> None:
    side = Decode().granted(1.0)
    side.receive("p", ready([5, 6]), 7.0)
    side.on_kv_received(1, [5, 6], 7.0)
    side.tick(7.0)
    assert isinstance(side.take_events()[0], KvArrived)


@pytest.mark.parametrize(("is_ready", "code"), [(False, "pd_prefill_failed"), (True, "pd_transfer_failed")])
def test_a_handoff_has_a_limit_although_the_peer_is_alive(is_ready: bool, code: str) -> None:
    side = Decode().granted()
    for second in range(2, 60):
        side.receive("p", ready([5]) if is_ready else HandoffHeartbeat(second, [1], "P1"), float(second))
        side.tick(float(second))
    assert side.take_events() == []
    side.take_messages()
    side.tick(60.0)
    assert codes(side.said()) == [(CancelHandoff, code)]
    assert side.ended().error.code == code


def test_a_lost_writer_ends_the_handoff() -> None:
    side = Decode().granted()
    side.on_sender_lost(1, "connection reset", 2.0)
    assert codes(side.said()) == [(CancelHandoff, "pd_transfer_failed")]
    ended = side.ended()
    assert "connection reset" in ended.error.message


def test_a_writer_that_leaves_when_all_was_counted_is_not_missed() -> None:
    side = Decode().granted()
    side.on_kv_received(1, [5], 2.0)
    side.on_sender_lost(1, "connection reset", 2.0)
    side.receive("p", ready([5]), 2.1)
    assert isinstance(side.take_events()[0], KvArrived)


def test_reports_about_a_lease_that_is_over_change_nothing() -> None:
    side = Decode().granted()
    side.cancel(1, WHY, 2.0)
    side.take_messages()
    side.on_kv_received(1, [5], 2.1)
    side.on_sender_lost(1, "connection reset", 2.1)
    assert (side.take_events(), side.said()) == ([], [])


def test_our_cancel_tells_the_peer() -> None:
    side = Decode().granted()
    side.cancel(1, WHY, 2.0)
    assert side.take_messages() == [("p", CancelHandoff(1, WHY, "P1"))]
    assert side.take_events() == []
    assert side.cancel(1, WHY, 2.1) is None


@pytest.mark.parametrize("is_counted", [True, False])
def test_our_cancel_wins_over_an_event_that_nobody_has_seen_yet(is_counted: bool) -> None:
    side = Decode().granted()
    side.receive("p", ready([5]), 2.0)
    side.on_kv_received(1, [5] if is_counted else [6], 2.0)
    side.cancel(1, WHY, 2.0)
    assert side.take_events() == []


@pytest.mark.parametrize(
    "message", [HandoffHeartbeat(1, [], "P2"), PrefillOffer(1, "P2", 2), ready([5], "P2"), PeerGone("P1")]
)
def test_a_new_incarnation_ends_what_was_with_the_old_one(
    message: HandoffHeartbeat | PrefillOffer | PrefillDone | PeerGone,
) -> None:
    side = Decode().granted()
    side.receive("p", message, 2.0)
    ended = side.ended()
    assert ended.error.code == "pd_prefill_failed"


def test_a_new_incarnation_is_told_that_a_granted_handoff_is_not_for_it() -> None:
    side = Decode().granted()
    side.receive("p", PrefillOffer(1, "P2", 2), 2.0)
    cancels = side.said()
    assert all(isinstance(message, CancelHandoff) for message in cancels)
    assert [message.incarnation for message in cancels] == ["P1", "P2"]


def test_a_new_incarnation_takes_up_what_nobody_has_spoken_of() -> None:
    side = Decode().granted()
    side.request_prefill("p", prefill(side.next_handoff_id()), 2.0)
    side.receive("p", PrefillOffer(2, "P2", 2), 2.1)
    assert [type(event) for event in side.take_events()] == [HandoffFailed, OfferReceived]


def test_another_address_with_another_incarnation_ends_nothing() -> None:
    side = Decode().granted()
    side.receive("q", HandoffHeartbeat(1, [], "Q1"), 2.0)
    assert side.count_by_state()["granted"] == 1


def test_a_late_word_of_an_old_incarnation_does_not_end_what_is_with_the_new_one() -> None:
    side = Decode().offered()
    side.receive("p", HandoffHeartbeat(1, [], "P2"), 2.0)
    side.request_prefill("p", prefill(side.next_handoff_id()), 2.0)
    side.receive("p", PrefillOffer(2, "P2", 2), 2.1)
    side.take_events()
    side.receive("p", HandoffHeartbeat(3, [1], "P1"), 2.2)
    assert (side.take_events(), side.count_by_state()["offered"]) == ([], 1)


def test_a_handoff_stays_with_the_incarnation_that_spoke_of_it_first() -> None:
    side = Decode()
    for incarnation in ("P1", "P2"):
        side.receive("p", HandoffHeartbeat(1, [], incarnation), 1.0)
    side.receive("p", HandoffHeartbeat(2, [1], "P1"), 1.1)
    side.take_messages()
    side.receive("p", PrefillOffer(1, "P2", 2), 1.2)
    side.receive("p", HandoffHeartbeat(2, [1], "P2"), 1.2)
    cancel, answer = side.said()
    assert (type(cancel), cancel.incarnation) == (CancelHandoff, "P2")
    assert answer == HandoffHeartbeat(2, [], "P2")
    assert (side.take_events(), side.count_by_state()["asked"]) == ([], 1)


def test_a_late_word_of_an_incarnation_that_is_gone_binds_nothing() -> None:
    side = Decode()
    side.receive("p", PeerGone("P1"), 1.0)
    side.receive("p", HandoffHeartbeat(3, [1], "P1"), 1.1)
    side.take_messages()
    side.receive("p", PrefillOffer(1, "P2", 2), 1.2)
    assert side.take_events() == [OfferReceived(1, 2)]


def test_an_end_withdraws_an_offer_that_nobody_has_seen_yet() -> None:
    side = Decode()
    side.receive("p", PrefillOffer(1, "P1", 2), 1.0)
    side.receive("p", CancelHandoff(1, WHY, "P1"), 1.0)
    assert side.take_events() == [HandoffFailed(1, WHY)]


def test_closing_tells_every_peer_that_works_for_us_once() -> None:
    side = Decode()
    side.request_prefill("p", prefill(side.next_handoff_id()), 0.0)
    side.request_prefill("q", prefill(side.next_handoff_id()), 0.0)
    side.request_prefill("r", prefill(side.next_handoff_id()), 0.0)
    side.cancel(4, WHY, 0.0)
    side.take_messages()
    side.close()
    assert side.take_messages() == [("p", PeerGone("decode-1")), ("q", PeerGone("decode-1"))]
    assert side.num_live == 0


def test_each_error_says_where_it_happened() -> None:
    errors: list[ErrorInfo] = [
        handoff_errors.no_decode_blocks("x"),
        handoff_errors.prefill_failed("x"),
        handoff_errors.transfer_failed("x"),
        handoff_errors.lease_expired("x"),
    ]
    assert [error.stage for error in errors] == ["offer", "prefill", "transfer", "transfer"]
    assert {(error.message, error.status, error.retryable) for error in errors} == {("PD Error: x", 503, True)}


def test_numbers_are_never_used_twice() -> None:
    side = DecodeHandoffProtocol("decode-1", TIMES)
    numbers = [side.next_handoff_id() for _ in range(100)]
    assert len(set(numbers)) == 100
    assert isinstance(prefill(numbers[0]), PrefillRequest)


def test_what_could_not_be_sent_is_said_again_soon() -> None:
    side = DecodeHandoffProtocol("d", TIMES)
    number = side.next_handoff_id()
    side.request_prefill("p", prefill(number), 0.0)
    assert len(side.take_messages()) == 1
    side.on_send_failed("p", 0.0)
    side.on_send_failed("another", 0.0)
    side.tick(0.001)
    assert side.take_messages() == []
    side.tick(0.03)
    assert [message.handoff_id for _, message in side.take_messages()] == [number]
