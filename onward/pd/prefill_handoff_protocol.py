"""P's side of all its handoffs: works for decode instances, and decides nothing itself but when it must stop.

P may write into a peer's memory only while it can prove that the peer still wants the handoff. So each lease runs from
the time when the offer, or a heartbeat that was answered, was *sent*. This module does not know what is computed and
written.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from onward.bounded_dict import BoundedDict
from onward.pd import handoff_errors
from onward.pd.handoff_events import (
    GrantReceived,
    HandoffCancelled,
    HandoffCompleted,
    HandoffKey,
    PrefillEvent,
    PrefillRequested,
)
from onward.pd.handoff_timeouts import HandoffTimeouts, heartbeat_interval_s
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
"""Finished handoffs that are remembered, so that a late `PrefillRequest` does not start them again."""

MAX_UNANSWERED_HEARTBEATS = 1024
"""Unanswered heartbeats to one decode instance that are remembered. The answer to an older one comes too late."""

UNKNOWN_TO_PREFILL = handoff_errors.prefill_failed("the prefill instance does not have this handoff any more")
NO_LONGER_WANTED = handoff_errors.prefill_failed("the decode instance does not want it any more")


class PrefillHandoffState(Enum):
    QUEUED = "queued"
    OFFERED = "offered"
    GRANTED = "granted"
    READY = "ready"


@dataclass(slots=True)
class _PrefillHandoff:
    lease_s: float
    last_received_s: float
    """When D last sent the request. This keeps the handoff in the queue, but does not permit to write."""
    state: PrefillHandoffState = PrefillHandoffState.QUEUED
    confirmed_s: float = -inf
    """When P sent the latest message that D has answered. At that time, or later, D still wanted the handoff."""
    offered_s: float = -inf
    """When P first sent the offer. The grant may answer any copy of it, so the lease counts from the first."""
    unanswered_message: PrefillOffer | PrefillDone | None = None
    """The message that is repeated until it is answered."""
    resend_at_s: float = 0.0

    @property
    def expires_at_s(self) -> float:
        since_s = (
            self.confirmed_s
            if self.state is PrefillHandoffState.GRANTED
            else max(self.confirmed_s, self.last_received_s)
        )
        return since_s + self.lease_s

    @property
    def due_at_s(self) -> float:
        """When `tick` has to act, if no message arrives before."""
        return self.expires_at_s if self.unanswered_message is None else min(self.expires_at_s, self.resend_at_s)

    def confirm(self, sent_s: float) -> None:
        self.confirmed_s = max(self.confirmed_s, sent_s)


@dataclass(frozen=True, slots=True)
class _SentHeartbeat:
    sent_s: float
    handoff_ids: list[int]


@dataclass(slots=True)
class _DecodePeer:
    """A decode instance with unfinished handoffs."""

    next_heartbeat_s: float
    handoffs: dict[int, _PrefillHandoff] = field(default_factory=dict)
    lease_durations: Counter[float] = field(default_factory=Counter)
    """Number of handoffs by the duration of their lease in seconds. There are few different durations."""
    sent_heartbeats: dict[int, _SentHeartbeat] = field(default_factory=dict)
    """Heartbeats by number, in the order of sending."""


class PrefillHandoffProtocol:
    def __init__(self, incarnation: str, timeouts: HandoffTimeouts) -> None:
        self.incarnation = incarnation
        self._timeouts = timeouts
        self._decode_peers: dict[str, _DecodePeer] = {}
        self._timers: Timers[HandoffKey] = Timers()
        self._finished: BoundedDict[HandoffKey, ErrorInfo | None] = BoundedDict(MAX_REMEMBERED)
        """Finished handoffs, with the error that was sent to D. None: D has ended the handoff."""
        self._last_heartbeat = 0
        self._events: list[PrefillEvent] = []
        self._outbox: list[tuple[str, ToDecode]] = []

    def offer(self, key: HandoffKey, num_blocks: int, now_s: float) -> None:
        """Offers to run the prompt now. Has no effect on a handoff that has just ended, like `refuse`, `ready` and
        `fail`."""
        handoff = self._get(key)
        if handoff is None:
            return
        assert handoff.state is PrefillHandoffState.QUEUED, "only a queued handoff is offered"
        assert handoff.unanswered_message is None, "a queued handoff has no message to repeat"
        handoff.state = PrefillHandoffState.OFFERED
        handoff.offered_s = now_s
        self._send_until_answered(key, handoff, PrefillOffer(key.handoff_id, self.incarnation, num_blocks), now_s)

    def refuse(self, key: HandoffKey, error: ErrorInfo, now_s: float) -> None:
        """Refuses the handoff. No event follows."""
        if self._get(key) is not None:
            self._remove(key, error)
            self._send(key.decode_incarnation, RefuseHandoff(key.handoff_id, error, self.incarnation))

    def ready(self, key: HandoffKey, done: PrefillDone, now_s: float) -> None:
        """Announces that all blocks are written and no write will follow. `done` is sent again until D has taken the
        KV."""
        handoff = self._get(key)
        if handoff is None:
            return
        assert handoff.state is PrefillHandoffState.GRANTED, "only a granted handoff becomes ready"
        assert handoff.unanswered_message is None, "a granted handoff has no message to repeat"
        handoff.state = PrefillHandoffState.READY
        self._send_until_answered(key, handoff, done, now_s)

    def fail(self, key: HandoffKey, error: ErrorInfo, now_s: float) -> None:
        """Ends the handoff with an error. No event follows."""
        if self._get(key) is not None:
            self._cancel_and_notify_peer(key, error)

    def reset(self, incarnation: str, now_s: float) -> None:
        """Ends all handoffs, because the KV memory is lost."""
        assert incarnation != self.incarnation, "new KV memory has a new incarnation"
        error = handoff_errors.prefill_failed("the prefill instance has lost its KV memory")
        self._send_gone()
        for key in self._keys():
            self._remove(key, error)
            self._events.append(HandoffCancelled(key, error))
        assert not self._decode_peers, "a reset leaves no handoff behind"
        self.incarnation = incarnation

    def close(self) -> None:
        self._send_gone()
        self._decode_peers.clear()

    @property
    def idle(self) -> bool:
        return not self._decode_peers

    def receive(self, decode_incarnation: str, message: ToPrefill, now_s: float) -> None:
        match message:
            case PrefillRequest():
                self._receive_prefill(HandoffKey(decode_incarnation, message.handoff_id), message, now_s)
            case LeaseGrant():
                self._receive_grant(HandoffKey(decode_incarnation, message.handoff_id), message, now_s)
            case PrefillTaken():
                self._receive_taken(HandoffKey(decode_incarnation, message.handoff_id))
            case HandoffHeartbeat():
                self._receive_heartbeat(decode_incarnation, message)
            case RefuseHandoff() | CancelHandoff():
                key = HandoffKey(decode_incarnation, message.handoff_id)
                if message.incarnation in ("", self.incarnation) and self._get(key):
                    self._cancel_without_notifying_peer(key, message.error)
            case PeerGone():
                for key in self._keys_for_decode(decode_incarnation):
                    self._cancel_without_notifying_peer(
                        key, handoff_errors.prefill_failed("the decode instance is gone")
                    )

    def tick(self, now_s: float) -> None:
        for key in self._timers.take_due(now_s):
            handoff = self._get(key)
            if handoff is None:
                continue
            if now_s >= handoff.expires_at_s:
                self._expire(key, handoff)
            elif handoff.unanswered_message is not None and now_s >= handoff.resend_at_s:
                self._send_until_answered(key, handoff, handoff.unanswered_message, now_s)
            if self._get(key) is not None:
                self._timers.set_earliest(key, handoff.due_at_s)
        for decode_incarnation, decode_peer in self._decode_peers.items():
            if now_s >= decode_peer.next_heartbeat_s:
                decode_peer.next_heartbeat_s = now_s + _heartbeat_period_s(decode_peer, self._timeouts)
                self._send_heartbeat(decode_incarnation, list(decode_peer.handoffs), now_s)

    def take_events(self) -> list[PrefillEvent]:
        events, self._events = self._events, []
        return events

    def take_messages(self) -> list[tuple[str, ToDecode]]:
        outbox, self._outbox = self._outbox, []
        return outbox

    def count_by_state(self) -> dict[str, int]:
        counts = {state.value: 0 for state in PrefillHandoffState}
        for decode_peer in self._decode_peers.values():
            for handoff in decode_peer.handoffs.values():
                counts[handoff.state.value] += 1
        return counts

    def _receive_prefill(self, key: HandoffKey, prefill: PrefillRequest, now_s: float) -> None:
        existing = self._get(key)
        if existing is not None:
            existing.last_received_s = now_s
            self._repeat_answer(key, existing, now_s)
        elif key in self._finished:
            self._repeat_final_answer(key)
        else:
            decode_peer = self._decode_peers.setdefault(
                key.decode_incarnation, _DecodePeer(now_s + self._timeouts.heartbeat_interval_s)
            )
            handoff = decode_peer.handoffs[key.handoff_id] = _PrefillHandoff(self._timeouts.lease_s, now_s)
            decode_peer.lease_durations[handoff.lease_s] += 1
            self._timers.set_earliest(key, handoff.due_at_s)
            self._events.append(PrefillRequested(key, prefill))
            self._send_heartbeat(key.decode_incarnation, [key.handoff_id], now_s)

    def _repeat_answer(self, key: HandoffKey, handoff: _PrefillHandoff, now_s: float) -> None:
        """Answers a repeated request, because D has not received a message about it yet. Any message with the handoff's
        id shows D that P works on it."""
        if handoff.unanswered_message is not None:
            self._send_until_answered(key, handoff, handoff.unanswered_message, now_s)
        else:
            self._send_heartbeat(key.decode_incarnation, [key.handoff_id], now_s)

    def _receive_grant(self, key: HandoffKey, grant: LeaseGrant, now_s: float) -> None:
        handoff = self._get(key)
        if handoff is None:
            self._send(
                key.decode_incarnation,
                CancelHandoff(key.handoff_id, self._finished.get(key) or UNKNOWN_TO_PREFILL, self.incarnation),
            )
        elif grant.incarnation == self.incarnation and handoff.state is PrefillHandoffState.OFFERED:
            self._start_lease(key, handoff, grant, now_s)

    def _start_lease(self, key: HandoffKey, handoff: _PrefillHandoff, grant: LeaseGrant, now_s: float) -> None:
        assert handoff.state is PrefillHandoffState.OFFERED, "only an offer is granted"
        assert handoff.offered_s > -inf, "the lease counts from the time of the offer"
        decode_peer = self._decode_peers[key.decode_incarnation]
        _remove_lease_duration(decode_peer, handoff)
        handoff.state = PrefillHandoffState.GRANTED
        handoff.unanswered_message = None
        handoff.lease_s = grant.lease_s
        decode_peer.lease_durations[handoff.lease_s] += 1
        handoff.confirm(handoff.offered_s)
        if now_s >= handoff.expires_at_s:
            self._expire(key, handoff)
            return
        self._timers.set_earliest(key, handoff.due_at_s)
        decode_peer.next_heartbeat_s = min(decode_peer.next_heartbeat_s, now_s + heartbeat_interval_s(grant.lease_s))
        self._events.append(GrantReceived(key, grant))

    def _receive_taken(self, key: HandoffKey) -> None:
        handoff = self._get(key)
        if handoff is None:
            return
        if handoff.state is not PrefillHandoffState.READY:
            # It was taken from an incarnation before this one.
            self._cancel_without_notifying_peer(key, NO_LONGER_WANTED)
            return
        assert handoff.unanswered_message is not None, "a ready handoff is announced until it is taken"
        self._remove(key, None)
        self._events.append(HandoffCompleted(key))

    def _receive_heartbeat(self, decode_incarnation: str, reply: HandoffHeartbeat) -> None:
        decode_peer = self._decode_peers.get(decode_incarnation)
        heartbeat = (
            decode_peer.sent_heartbeats.pop(reply.number, None)
            if decode_peer and reply.incarnation == self.incarnation
            else None
        )
        if decode_peer is None or heartbeat is None:
            return
        wanted = set(reply.handoff_ids)
        for handoff_id in heartbeat.handoff_ids:
            if handoff_id not in decode_peer.handoffs:
                continue
            if handoff_id in wanted:
                decode_peer.handoffs[handoff_id].confirm(heartbeat.sent_s)
            else:
                self._cancel_without_notifying_peer(HandoffKey(decode_incarnation, handoff_id), NO_LONGER_WANTED)

    def _send_heartbeat(self, decode_incarnation: str, handoff_ids: list[int], now_s: float) -> None:
        decode_peer = self._decode_peers[decode_incarnation]
        self._last_heartbeat += 1
        decode_peer.sent_heartbeats[self._last_heartbeat] = _SentHeartbeat(now_s, handoff_ids)
        _drop_expired_heartbeats(decode_peer, now_s)
        self._send(decode_incarnation, HandoffHeartbeat(self._last_heartbeat, handoff_ids, self.incarnation))

    def _send_until_answered(
        self, key: HandoffKey, handoff: _PrefillHandoff, message: PrefillOffer | PrefillDone, now_s: float
    ) -> None:
        handoff.unanswered_message = message
        handoff.resend_at_s = now_s + self._timeouts.resend_interval_s
        self._timers.set_earliest(key, handoff.due_at_s)
        self._send(key.decode_incarnation, message)

    def _expire(self, key: HandoffKey, handoff: _PrefillHandoff) -> None:
        error = handoff_errors.lease_expired(f"the decode instance was silent for {handoff.lease_s:g} s")
        self._cancel_and_notify_peer(key, error)
        self._events.append(HandoffCancelled(key, error))

    def _repeat_final_answer(self, key: HandoffKey) -> None:
        """Sends the final error again. If D has ended the handoff, the request is a late copy, and D waits for no
        answer."""
        error = self._finished.get(key)
        if error is not None:
            self._send(key.decode_incarnation, CancelHandoff(key.handoff_id, error, self.incarnation))

    def _cancel_and_notify_peer(self, key: HandoffKey, error: ErrorInfo) -> None:
        self._remove(key, error)
        self._send(key.decode_incarnation, CancelHandoff(key.handoff_id, error, self.incarnation))

    def _cancel_without_notifying_peer(self, key: HandoffKey, error: ErrorInfo) -> None:
        """Cancels a handoff of which D knows already that it has ended."""
        self._remove(key, None)
        self._events.append(HandoffCancelled(key, error))

    def _remove(self, key: HandoffKey, error: ErrorInfo | None) -> None:
        decode_peer = self._decode_peers[key.decode_incarnation]
        _remove_lease_duration(decode_peer, decode_peer.handoffs.pop(key.handoff_id))
        self._timers.cancel(key)
        if not decode_peer.handoffs:
            assert not decode_peer.lease_durations, "each counted lease duration belongs to a handoff"
            del self._decode_peers[key.decode_incarnation]
        self._finished.put(key, error)

    def _send_gone(self) -> None:
        for decode_incarnation in self._decode_peers:
            self._send(decode_incarnation, PeerGone(self.incarnation))

    def _get(self, key: HandoffKey) -> _PrefillHandoff | None:
        decode_peer = self._decode_peers.get(key.decode_incarnation)
        return decode_peer.handoffs.get(key.handoff_id) if decode_peer else None

    def _keys(self) -> list[HandoffKey]:
        return [key for decode_incarnation in self._decode_peers for key in self._keys_for_decode(decode_incarnation)]

    def _keys_for_decode(self, decode_incarnation: str) -> list[HandoffKey]:
        decode_peer = self._decode_peers.get(decode_incarnation)
        return (
            [HandoffKey(decode_incarnation, handoff_id) for handoff_id in decode_peer.handoffs] if decode_peer else []
        )

    def _send(self, decode_incarnation: str, message: ToDecode) -> None:
        self._outbox.append((decode_incarnation, message))


def _heartbeat_period_s(decode_peer: _DecodePeer, timeouts: HandoffTimeouts) -> float:
    """Returns the interval that the shortest lease needs. Leases that D grants may be shorter than P's own."""
    assert decode_peer.lease_durations, "a decode peer has at least one handoff"
    return min(timeouts.heartbeat_interval_s, heartbeat_interval_s(min(decode_peer.lease_durations)))


def _remove_lease_duration(decode_peer: _DecodePeer, handoff: _PrefillHandoff) -> None:
    assert decode_peer.lease_durations[handoff.lease_s] > 0, "the lease duration of each handoff is counted"
    decode_peer.lease_durations[handoff.lease_s] -= 1
    if not decode_peer.lease_durations[handoff.lease_s]:
        del decode_peer.lease_durations[handoff.lease_s]


def _drop_expired_heartbeats(decode_peer: _DecodePeer, now_s: float) -> None:
    longest_s = max(decode_peer.lease_durations)
    while decode_peer.sent_heartbeats:
        oldest, heartbeat = next(iter(decode_peer.sent_heartbeats.items()))
        if len(decode_peer.sent_heartbeats) <= MAX_UNANSWERED_HEARTBEATS and now_s < heartbeat.sent_s + longest_s:
            return
        del decode_peer.sent_heartbeats[oldest]
