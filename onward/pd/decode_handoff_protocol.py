"""D's side of all its handoffs: requests prompts, grants leases, verifies, and decides how each handoff ends.

A handoff belongs to the address that it was requested from. From the first message about it, it belongs to the
incarnation that sent this message. The memory into which KV is written is not known here: the caller owns the leases,
and revokes the lease of a failed handoff.
"""

from dataclasses import dataclass
from enum import Enum

import msgspec

from onward.bounded_dict import BoundedDict
from onward.pd import handoff_errors
from onward.pd.handoff_events import DecodeEvent, HandoffFailed, KvArrived, OfferReceived
from onward.pd.handoff_timeouts import HandoffTimeouts
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
    ToDecode,
    ToPrefill,
)
from onward.timers import Timers

MAX_REMEMBERED = 4096
"""Finished handoffs, and incarnations of peers, that are remembered to answer late messages about them correctly."""

RESEND_INTERVAL_S = 0.02
"""Interval between two attempts to send to a peer that could not be reached."""

UNKNOWN_TO_DECODE = handoff_errors.prefill_failed("the decode instance does not have this handoff any more")


class DecodeHandoffState(Enum):
    ASKED = "asked"
    OFFERED = "offered"
    GRANTED = "granted"


@dataclass(slots=True)
class _DecodeHandoff:
    peer: str
    prefill: PrefillRequest
    timeout_at_s: float
    silent_at_s: float
    """When P counts as dead, if it sends nothing until then."""
    resend_at_s: float | None
    """When `prefill` is sent again. None: P has it."""
    state: DecodeHandoffState = DecodeHandoffState.ASKED
    incarnation: str | None = None
    """Incarnation of P that sent the first message about the handoff. None: no message has come yet."""
    hold_until_s: float = 0.0
    """When an offer that was neither granted nor refused is refused."""
    grant: LeaseGrant | None = None
    received_checksums: list[int] | None = None
    """Checksums of the blocks in D's memory. None: not all blocks have arrived."""
    ready: PrefillDone | None = None

    @property
    def due_at_s(self) -> float:
        """When `tick` has to act, if no message arrives before."""
        at_s = min(self.timeout_at_s, self.silent_at_s)
        if self.state is DecodeHandoffState.OFFERED:
            at_s = min(at_s, self.hold_until_s)
        return at_s if self.resend_at_s is None else min(at_s, self.resend_at_s)


@dataclass(frozen=True, slots=True)
class _FinalAnswer:
    """The answer to later messages of P about a handoff that is over."""

    peer: str
    taken_from_incarnation: str | None
    """The incarnation of P that gets `PrefillTaken`; every other one gets `CancelHandoff`."""
    error: ErrorInfo


class DecodeHandoffProtocol:
    def __init__(self, incarnation: str, timeouts: HandoffTimeouts) -> None:
        self.incarnation = incarnation
        self._timeouts = timeouts
        self._last_handoff_id = 0
        self._live: dict[int, _DecodeHandoff] = {}
        self._timers: Timers[int] = Timers()
        self._unanswered: dict[str, dict[int, None]] = {}
        """By peer, in the order of the requests: handoffs about which the peer has not sent a message yet."""
        self._resend_due_s: dict[str, float] = {}
        """Peers to which the last message could not be sent, and when the next attempt is due."""
        self._finished: BoundedDict[int, _FinalAnswer] = BoundedDict(MAX_REMEMBERED)
        self._gone_incarnations: BoundedDict[tuple[str, str], bool] = BoundedDict(MAX_REMEMBERED)
        """Addresses and incarnations of peers that have sent a message; True for incarnations that have ended."""
        self._events: dict[int, DecodeEvent] = {}
        """Events by handoff id. A later event of a handoff replaces one that was not taken yet."""
        self._outbox: list[tuple[str, ToPrefill]] = []

    def next_handoff_id(self) -> int:
        self._last_handoff_id += 1
        return self._last_handoff_id

    def request_prefill(self, peer: str, prefill: PrefillRequest, now_s: float) -> None:
        """Sends a prefill request to a peer, and starts the timeouts of its handoff. `prefill` has an id from
        `next_handoff_id` that was not used before."""
        assert 0 < prefill.handoff_id <= self._last_handoff_id, "a handoff id comes from next_handoff_id"
        assert prefill.handoff_id not in self._live, "a live handoff id is not requested again"
        assert prefill.handoff_id not in self._finished, "a finished handoff id is not used again"
        self._live[prefill.handoff_id] = _DecodeHandoff(
            peer,
            prefill,
            timeout_at_s=now_s + self._timeouts.handoff_timeout_s,
            silent_at_s=now_s + self._timeouts.silence_timeout_s,
            resend_at_s=now_s + self._timeouts.resend_interval_s,
        )
        self._unanswered.setdefault(peer, {})[prefill.handoff_id] = None
        self._timers.set_earliest(prefill.handoff_id, self._live[prefill.handoff_id].due_at_s)
        self._send(peer, prefill)

    def grant(self, grant: LeaseGrant, now_s: float) -> bool:
        """Sends the grant to the incarnation that made the offer. Returns False if the offer has ended; the reason is
        in `HandoffFailed`."""
        handoff = self._live.get(grant.handoff_id)
        if handoff is None or handoff.state is not DecodeHandoffState.OFFERED:
            return False
        assert handoff.incarnation is not None, "an offer names the incarnation that made it"
        assert handoff.grant is None, "an offered handoff has no lease yet"
        assert grant.lease_s == self._timeouts.lease_s, "we give up a fifth later than the lease that we grant"
        handoff.state = DecodeHandoffState.GRANTED
        handoff.grant = msgspec.structs.replace(grant, incarnation=handoff.incarnation)
        self._extend_silence_deadline(handoff, now_s)
        self._send(handoff.peer, handoff.grant)
        return True

    def refuse(self, handoff_id: int, error: ErrorInfo, now_s: float) -> None:
        """Refuses an offer. No event follows."""
        handoff = self._live.get(handoff_id)
        if handoff is None or handoff.state is not DecodeHandoffState.OFFERED:
            return
        self._remove(handoff_id, error)
        self._send(handoff.peer, RefuseHandoff(handoff_id, error, handoff.incarnation or ""))

    def on_kv_received(self, handoff_id: int, checksums: list[int], now_s: float) -> None:
        """Handles that every block of the lease that was granted to this handoff has arrived in D's memory. Completes
        the handoff if P has reported that it is done, and fails it if the checksums differ."""
        handoff = self._live.get(handoff_id)
        if handoff is not None and handoff.received_checksums is None:
            handoff.received_checksums = checksums
            self._complete_if_verified(handoff_id)

    def on_sender_lost(self, handoff_id: int, message: str, now_s: float) -> None:
        """Handles the loss of the writer. Fails the handoff, unless all blocks have arrived: it needs no writer
        then."""
        handoff = self._live.get(handoff_id)
        if handoff is not None and handoff.received_checksums is None:
            self._fail_and_notify_peer(
                handoff_id, handoff_errors.transfer_failed(f"the prefill instance stopped writing: {message}")
            )

    def cancel(self, handoff_id: int, error: ErrorInfo, now_s: float) -> None:
        """Cancels the handoff by D's own decision. No event follows, not even one that was not taken yet."""
        if handoff_id in self._live:
            self._cancel_and_notify_peer(handoff_id, error)
        self._events.pop(handoff_id, None)

    def receive(self, peer: str, message: ToDecode, now_s: float) -> None:
        if isinstance(message, PeerGone):
            self._on_gone(peer, message.incarnation)
            return
        if not self._accepts_incarnation(peer, message.incarnation):
            return
        match message:
            case PrefillOffer():
                self._receive_offer(peer, message, now_s)
            case PrefillDone():
                self._receive_ready(peer, message, now_s)
            case HandoffHeartbeat():
                self._receive_heartbeat(peer, message, now_s)
            case RefuseHandoff() | CancelHandoff():
                if self._find(peer, message.handoff_id, message.incarnation, now_s):
                    self._fail_without_notifying_peer(message.handoff_id, message.error)

    def on_send_failed(self, peer: str, now_s: float) -> None:
        """Handles that the last message to this peer was not sent: its connection may still be opening. Until a message
        is sent, one message is retried soon, instead of all that the peer has not answered."""
        self._resend_due_s.setdefault(peer, now_s + RESEND_INTERVAL_S)

    def on_send_succeeded(self, peer: str, now_s: float) -> None:
        """Handles that a message to this peer was sent. After failed sends, it makes all requests due that the peer has
        not answered."""
        if self._resend_due_s.pop(peer, None) is None:
            return
        for handoff_id in self._unanswered.get(peer, ()):
            assert self._live[handoff_id].incarnation is None, "an unanswered handoff has not heard of its peer"
            self._live[handoff_id].resend_at_s = now_s
            self._timers.set_earliest(handoff_id, now_s)

    def tick(self, now_s: float) -> None:
        self._resend_to_unreached(now_s)
        for handoff_id in self._timers.take_due(now_s):
            handoff = self._live.get(handoff_id)
            if handoff is None:
                continue
            if now_s >= handoff.timeout_at_s:
                self._fail_and_notify_peer(handoff_id, self._timeout_of(handoff))
            elif handoff.state is DecodeHandoffState.OFFERED and now_s >= handoff.hold_until_s:
                self._refuse_held(handoff_id)
            elif now_s >= handoff.silent_at_s:
                silence_s, granted = self._timeouts.silence_timeout_s, handoff.grant is not None
                self._fail_and_notify_peer(handoff_id, handoff_errors.peer_silent(silence_s, granted=granted))
            elif handoff.resend_at_s is not None and now_s >= handoff.resend_at_s:
                handoff.resend_at_s = now_s + self._timeouts.resend_interval_s
                if handoff.peer not in self._resend_due_s:
                    self._send(handoff.peer, handoff.prefill)
            if handoff_id in self._live:
                self._timers.set_earliest(handoff_id, handoff.due_at_s)

    def take_events(self) -> list[DecodeEvent]:
        events, self._events = self._events, {}
        return list(events.values())

    def take_messages(self) -> list[tuple[str, ToPrefill]]:
        outbox, self._outbox = self._outbox, []
        return outbox

    def close(self) -> None:
        for peer in dict.fromkeys(handoff.peer for handoff in self._live.values()):
            self._send(peer, PeerGone(self.incarnation))
        self._live.clear()
        self._unanswered.clear()

    @property
    def idle(self) -> bool:
        return not self._live

    def count_by_state(self) -> dict[str, int]:
        counts = {state.value: 0 for state in DecodeHandoffState}
        for handoff in self._live.values():
            counts[handoff.state.value] += 1
        return counts

    def _receive_offer(self, peer: str, offer: PrefillOffer, now_s: float) -> None:
        handoff = self._find(peer, offer.handoff_id, offer.incarnation, now_s)
        if handoff is None:
            self._repeat_final_answer(peer, offer.handoff_id, offer.incarnation)
        elif handoff.grant is not None:
            self._send(peer, handoff.grant)
        elif handoff.state is DecodeHandoffState.ASKED:
            handoff.state = DecodeHandoffState.OFFERED
            handoff.hold_until_s = now_s + self._timeouts.offer_hold_s
            self._timers.set_earliest(offer.handoff_id, handoff.hold_until_s)
            self._events[offer.handoff_id] = OfferReceived(offer.handoff_id, offer.num_blocks)

    def _receive_ready(self, peer: str, ready: PrefillDone, now_s: float) -> None:
        handoff = self._find(peer, ready.handoff_id, ready.incarnation, now_s)
        if handoff is None:
            self._repeat_final_answer(peer, ready.handoff_id, ready.incarnation)
        elif handoff.grant is None:
            self._fail_and_notify_peer(
                ready.handoff_id, handoff_errors.prefill_failed("the prefill instance was ready before it had a grant")
            )
        elif handoff.ready is None:
            handoff.ready = ready
            self._complete_if_verified(ready.handoff_id)

    def _receive_heartbeat(self, peer: str, heartbeat: HandoffHeartbeat, now_s: float) -> None:
        wanted: list[int] = []
        for handoff_id in heartbeat.handoff_ids:
            if self._find(peer, handoff_id, heartbeat.incarnation, now_s):
                wanted.append(handoff_id)
            elif self._was_taken(peer, handoff_id, heartbeat.incarnation):
                self._send(peer, PrefillTaken(handoff_id))
        self._send(peer, HandoffHeartbeat(heartbeat.number, wanted, heartbeat.incarnation))

    def _find(self, peer: str, handoff_id: int, incarnation: str, now_s: float) -> _DecodeHandoff | None:
        """Returns the handoff, if this incarnation of this peer works on it. Records that the peer has sent a message
        about it."""
        handoff = self._live.get(handoff_id)
        if handoff is None or handoff.peer != peer or handoff.incarnation not in (None, incarnation):
            return None
        handoff.incarnation = incarnation
        handoff.resend_at_s = None
        self._mark_answered(peer, handoff_id)
        self._extend_silence_deadline(handoff, now_s)
        return handoff

    def _extend_silence_deadline(self, handoff: _DecodeHandoff, now_s: float) -> None:
        handoff.silent_at_s = now_s + self._timeouts.silence_timeout_s

    def _accepts_incarnation(self, peer: str, incarnation: str) -> bool:
        """Returns whether this incarnation may still exist. The first message of a new one ends the handoffs of the
        others.

        Of two incarnations that both have sent messages, it is not known which is newer, because messages may be late.
        So only a first message counts. If an incarnation dies without a message, its handoffs end by its silence.
        """
        if (peer, incarnation) not in self._gone_incarnations:
            self._gone_incarnations.put((peer, incarnation), False)
            for handoff_id in self._handoffs_with_incarnation(peer):
                if self._live[handoff_id].incarnation != incarnation:
                    self._fail_and_notify_peer(
                        handoff_id, handoff_errors.prefill_failed("the prefill instance was restarted")
                    )
        return not self._gone_incarnations.get((peer, incarnation))

    def _on_gone(self, peer: str, incarnation: str) -> None:
        self._gone_incarnations.put((peer, incarnation), True)
        for handoff_id in self._handoffs_with_incarnation(peer):
            if self._live[handoff_id].incarnation == incarnation:
                self._fail_and_notify_peer(handoff_id, handoff_errors.prefill_failed("the prefill instance is gone"))

    def _handoffs_with_incarnation(self, peer: str) -> list[int]:
        return [
            handoff_id
            for handoff_id, handoff in self._live.items()
            if handoff.peer == peer and handoff.incarnation is not None
        ]

    def _complete_if_verified(self, handoff_id: int) -> None:
        """Completes the handoff once P has reported that it is done and all blocks have arrived and are verified."""
        handoff = self._live[handoff_id]
        assert handoff.state is DecodeHandoffState.GRANTED, "only a granted handoff completes"
        ready, received_checksums, grant = handoff.ready, handoff.received_checksums, handoff.grant
        if ready is None or received_checksums is None or grant is None:
            return
        if grant.checksums and ready.checksums != received_checksums:
            self._fail_and_notify_peer(
                handoff_id, handoff_errors.transfer_failed(_checksum_message(ready.checksums, received_checksums))
            )
            return
        assert handoff.incarnation == grant.incarnation, "the KV comes from the incarnation that has the grant"
        self._remove(handoff_id, UNKNOWN_TO_DECODE, taken_from=handoff.incarnation)
        self._send(handoff.peer, PrefillTaken(handoff_id))
        self._events[handoff_id] = KvArrived(handoff_id, ready)

    def _refuse_held(self, handoff_id: int) -> None:
        handoff = self._live[handoff_id]
        assert handoff.state is DecodeHandoffState.OFFERED, "only an offer is refused for lack of blocks"
        error = handoff_errors.no_decode_blocks("the decode instance has no free blocks")
        self._send(handoff.peer, RefuseHandoff(handoff_id, error, handoff.incarnation or ""))
        self._fail_without_notifying_peer(handoff_id, error)

    def _fail_and_notify_peer(self, handoff_id: int, error: ErrorInfo) -> None:
        self._cancel_and_notify_peer(handoff_id, error)
        self._events[handoff_id] = HandoffFailed(handoff_id, error)

    def _fail_without_notifying_peer(self, handoff_id: int, error: ErrorInfo) -> None:
        """Fails a handoff of which P knows already that it has ended."""
        self._remove(handoff_id, error)
        self._events[handoff_id] = HandoffFailed(handoff_id, error)

    def _cancel_and_notify_peer(self, handoff_id: int, error: ErrorInfo) -> None:
        handoff = self._remove(handoff_id, error)
        self._send(handoff.peer, CancelHandoff(handoff_id, error, handoff.incarnation or ""))

    def _remove(self, handoff_id: int, error: ErrorInfo, *, taken_from: str | None = None) -> _DecodeHandoff:
        handoff = self._live.pop(handoff_id)
        self._timers.cancel(handoff_id)
        self._mark_answered(handoff.peer, handoff_id)
        self._finished.put(handoff_id, _FinalAnswer(handoff.peer, taken_from, error))
        self._events.pop(handoff_id, None)
        return handoff

    def _mark_answered(self, peer: str, handoff_id: int) -> None:
        """Removes the handoff from the peer's unanswered ones, because the peer has answered or the handoff has ended.
        It is not requested again."""
        unanswered = self._unanswered.get(peer)
        if unanswered is not None:
            unanswered.pop(handoff_id, None)
            if not unanswered:
                del self._unanswered[peer]

    def _resend_to_unreached(self, now_s: float) -> None:
        for peer in [peer for peer, at_s in self._resend_due_s.items() if now_s >= at_s]:
            unanswered = self._unanswered.get(peer)
            if unanswered is None:
                del self._resend_due_s[peer]
                continue
            assert unanswered, "a peer without unanswered handoffs has no entry"
            self._resend_due_s[peer] = now_s + RESEND_INTERVAL_S
            self._send(peer, self._live[next(iter(unanswered))].prefill)

    def _repeat_final_answer(self, peer: str, handoff_id: int, incarnation: str) -> None:
        if self._was_taken(peer, handoff_id, incarnation):
            self._send(peer, PrefillTaken(handoff_id))
            return
        final_answer = self._finished.get(handoff_id)
        error = final_answer.error if final_answer is not None and final_answer.peer == peer else UNKNOWN_TO_DECODE
        self._send(peer, CancelHandoff(handoff_id, error, incarnation))

    def _was_taken(self, peer: str, handoff_id: int, incarnation: str) -> bool:
        final_answer = self._finished.get(handoff_id)
        return (
            final_answer is not None
            and final_answer.peer == peer
            and final_answer.taken_from_incarnation == incarnation
        )

    def _timeout_of(self, handoff: _DecodeHandoff) -> ErrorInfo:
        limit = f"within {self._timeouts.handoff_timeout_s:g} s"
        if handoff.ready is not None:
            return handoff_errors.transfer_failed(f"the KV did not arrive {limit}")
        return handoff_errors.prefill_failed(f"the prefill instance did not finish {limit}")

    def _send(self, peer: str, message: ToPrefill) -> None:
        self._outbox.append((peer, message))


def _checksum_message(sent: list[int], received: list[int]) -> str:
    if len(sent) != len(received):
        return f"{len(sent)} blocks were sent and {len(received)} have arrived"
    differing = [index for index, (ours, theirs) in enumerate(zip(received, sent, strict=True)) if ours != theirs]
    assert differing, "two lists of checksums that are not equal differ in some block"
    return f"the checksums of {len(differing)} of {len(sent)} blocks differ, first that of block {differing[0]}"
