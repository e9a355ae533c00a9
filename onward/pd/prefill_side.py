"""P's side of all its hand-overs: works for decode instances and decides nothing but that it must stop.

It may write into a peer's memory only while it can prove that the peer still counts on it: each lease runs from the time
when the offer, or a heartbeat that was answered, was *sent*. What is computed and written is not known here.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from onward.pd import faults
from onward.pd.events import Dropped, Finished, Granted, HandoverKey, PrefillEvent, WorkCame
from onward.pd.memory import RecentMemory
from onward.pd.timers import Timers
from onward.pd.times import Times, heartbeat_s
from onward.proto.handoff import (
    Cancel,
    Gone,
    Grant,
    Heartbeat,
    Offer,
    Prefill,
    Ready,
    Refuse,
    Taken,
    ToDecode,
    ToPrefill,
)
from onward.proto.request import ErrorInfo
from onward.proto.step import TokenLogprobs

REMEMBERED = 4096
"""Hand-overs that are over: a late Prefill does not start them again."""

MAX_ASKED = 1024
"""Heartbeats to one decode instance that may be unanswered at a time. The answer to an older one comes too late."""

NOT_HERE = faults.prefill_failed("the prefill instance does not have this hand-over any more")
NOT_WANTED = faults.prefill_failed("the decode instance does not want it any more")


class State(Enum):
    QUEUED = "queued"
    OFFERED = "offered"
    GRANTED = "granted"
    READY = "ready"


@dataclass(slots=True)
class _Handover:
    lease_s: float
    heard_s: float
    """Of D, in any way: enough to stay in the queue, no licence to write."""
    state: State = State.QUEUED
    proven_s: float = -inf
    """When we sent the latest word that D has answered: at that time, or later, it still counted on us."""
    offered_s: float = -inf
    """When we first sent the offer. The grant may answer any copy of it, so the lease counts from the first."""
    word: Offer | Ready | None = None
    """What is repeated until it is answered."""
    repeat_at_s: float = 0.0

    @property
    def over_at_s(self) -> float:
        since_s = self.proven_s if self.state is State.GRANTED else max(self.proven_s, self.heard_s)
        return since_s + self.lease_s

    @property
    def due_at_s(self) -> float:
        """When `tick` has something to do, if nothing is heard until then."""
        return self.over_at_s if self.word is None else min(self.over_at_s, self.repeat_at_s)

    def prove(self, sent_s: float) -> None:
        self.proven_s = max(self.proven_s, sent_s)


@dataclass(frozen=True, slots=True)
class _Asked:
    sent_s: float
    handovers: list[int]


@dataclass(slots=True)
class _Decode:
    """A decode instance for which we have something to do."""

    next_heartbeat_s: float
    handovers: dict[int, _Handover] = field(default_factory=dict)
    lease_times: Counter[float] = field(default_factory=Counter)
    """How many of the hand-overs have a lease of so many seconds. There are few different ones."""
    asked: dict[int, _Asked] = field(default_factory=dict)
    """Heartbeats by number, in the order of sending."""


class PrefillSide:
    def __init__(self, incarnation: str, times: Times) -> None:
        self.incarnation = incarnation
        self._times = times
        self._decodes: dict[str, _Decode] = {}
        self._timers: Timers[HandoverKey] = Timers()
        self._over: RecentMemory[HandoverKey, ErrorInfo | None] = RecentMemory(REMEMBERED)
        """With the error that D was told. None: D has ended it."""
        self._last_heartbeat = 0
        self._events: list[PrefillEvent] = []
        self._outbox: list[tuple[str, ToDecode]] = []

    def offer(self, key: HandoverKey, num_blocks: int, now_s: float) -> None:
        """We can run it now. Like everything said about a hand-over that has just ended, without effect then."""
        found = self._get(key)
        if found is None:
            return
        assert found.state is State.QUEUED
        found.state = State.OFFERED
        found.offered_s = now_s
        self._say(key, found, Offer(key.number, self.incarnation, num_blocks), now_s)

    def refuse(self, key: HandoverKey, error: ErrorInfo, now_s: float) -> None:
        """No event follows."""
        if self._get(key) is not None:
            self._forget(key, error)
            self._send(key.decode, Refuse(key.number, error, self.incarnation))

    def ready(
        self,
        key: HandoverKey,
        token_ids: list[int],
        num_cached_tokens: int,
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: list[TokenLogprobs] | None,
        checksums: list[int],
        now_s: float,
        *,
        grammar_done: bool = False,
        draft_token_ids: Sequence[int] = (),
    ) -> None:
        """All is written and nothing will follow. Said until D has taken it."""
        found = self._get(key)
        if found is None:
            return
        assert found.state is State.GRANTED
        found.state = State.READY
        ready = Ready(
            key.number,
            self.incarnation,
            token_ids,
            num_cached_tokens,
            logprobs,
            prompt_logprobs,
            draft_token_ids=list(draft_token_ids),
            checksums=checksums,
            grammar_done=grammar_done,
        )
        self._say(key, found, ready, now_s)

    def fail(self, key: HandoverKey, error: ErrorInfo, now_s: float) -> None:
        """No event follows."""
        if self._get(key) is not None:
            self._call_off(key, error)

    def renew(self, incarnation: str, now_s: float) -> None:
        """Our KV memory is gone, and with it everything under way."""
        error = faults.prefill_failed("the prefill instance has lost its KV memory")
        self._announce_end()
        for key in self._keys():
            self._forget(key, error)
            self._events.append(Dropped(key, error))
        self.incarnation = incarnation

    def close(self) -> None:
        self._announce_end()
        self._decodes.clear()

    @property
    def idle(self) -> bool:
        return not self._decodes

    def receive(self, decode: str, message: ToPrefill, now_s: float) -> None:
        match message:
            case Prefill():
                self._receive_prefill(HandoverKey(decode, message.handover), message, now_s)
            case Grant():
                self._receive_grant(HandoverKey(decode, message.handover), message, now_s)
            case Taken():
                self._receive_taken(HandoverKey(decode, message.handover))
            case Heartbeat():
                self._receive_heartbeat(decode, message)
            case Refuse() | Cancel():
                key = HandoverKey(decode, message.handover)
                if message.incarnation in ("", self.incarnation) and self._get(key):
                    self._drop(key, message.error)
            case Gone():
                for key in self._keys_of(decode):
                    self._drop(key, faults.prefill_failed("the decode instance is gone"))

    def tick(self, now_s: float) -> None:
        for key in self._timers.due(now_s):
            handover = self._get(key)
            if handover is None:
                continue
            if now_s >= handover.over_at_s:
                self._expire(key, handover)
            elif handover.word is not None and now_s >= handover.repeat_at_s:
                self._say(key, handover, handover.word, now_s)
            if self._get(key) is not None:
                self._timers.wake_by(key, handover.due_at_s)
        for name, decode in self._decodes.items():
            if now_s >= decode.next_heartbeat_s:
                decode.next_heartbeat_s = now_s + _heartbeat_period_s(decode, self._times)
                self._ask(name, list(decode.handovers), now_s)

    def take_events(self) -> list[PrefillEvent]:
        events, self._events = self._events, []
        return events

    def drain(self) -> list[tuple[str, ToDecode]]:
        outbox, self._outbox = self._outbox, []
        return outbox

    def states(self) -> dict[str, int]:
        counts = {state.value: 0 for state in State}
        for decode in self._decodes.values():
            for handover in decode.handovers.values():
                counts[handover.state.value] += 1
        return counts

    def _receive_prefill(self, key: HandoverKey, prefill: Prefill, now_s: float) -> None:
        found = self._get(key)
        if found is not None:
            found.heard_s = now_s
            self._answer_again(key, found, now_s)
        elif key in self._over:
            self._repeat_last_word(key)
        else:
            decode = self._decodes.setdefault(key.decode, _Decode(now_s + self._times.heartbeat_s))
            handover = decode.handovers[key.number] = _Handover(self._times.lease_s, now_s)
            decode.lease_times[handover.lease_s] += 1
            self._timers.wake_by(key, handover.due_at_s)
            self._events.append(WorkCame(key, prefill))
            self._ask(key.decode, [key.number], now_s)

    def _answer_again(self, key: HandoverKey, handover: _Handover, now_s: float) -> None:
        """D has not heard of us yet. Whatever names the number tells it that we are at work."""
        if handover.word is not None:
            self._say(key, handover, handover.word, now_s)
        else:
            self._ask(key.decode, [key.number], now_s)

    def _receive_grant(self, key: HandoverKey, grant: Grant, now_s: float) -> None:
        found = self._get(key)
        if found is None:
            self._send(key.decode, Cancel(key.number, self._over.get(key) or NOT_HERE, self.incarnation))
        elif grant.incarnation == self.incarnation and found.state is State.OFFERED:
            self._take_grant(key, found, grant, now_s)

    def _take_grant(self, key: HandoverKey, handover: _Handover, grant: Grant, now_s: float) -> None:
        decode = self._decodes[key.decode]
        _forget_lease_time(decode, handover)
        handover.state = State.GRANTED
        handover.word = None
        handover.lease_s = grant.lease_s
        decode.lease_times[handover.lease_s] += 1
        handover.prove(handover.offered_s)
        if now_s >= handover.over_at_s:
            self._expire(key, handover)
            return
        self._timers.wake_by(key, handover.due_at_s)
        decode.next_heartbeat_s = min(decode.next_heartbeat_s, now_s + heartbeat_s(grant.lease_s))
        self._events.append(Granted(key, grant))

    def _receive_taken(self, key: HandoverKey) -> None:
        found = self._get(key)
        if found is None:
            return
        if found.state is not State.READY:
            # It was taken from an incarnation before this one.
            self._drop(key, NOT_WANTED)
            return
        self._forget(key, None)
        self._events.append(Finished(key))

    def _receive_heartbeat(self, name: str, answer: Heartbeat) -> None:
        decode = self._decodes.get(name)
        asked = decode.asked.pop(answer.number, None) if decode and answer.incarnation == self.incarnation else None
        if decode is None or asked is None:
            return
        wanted = set(answer.handovers)
        for number in asked.handovers:
            if number not in decode.handovers:
                continue
            if number in wanted:
                decode.handovers[number].prove(asked.sent_s)
            else:
                self._drop(HandoverKey(name, number), NOT_WANTED)

    def _ask(self, name: str, numbers: list[int], now_s: float) -> None:
        decode = self._decodes[name]
        self._last_heartbeat += 1
        decode.asked[self._last_heartbeat] = _Asked(now_s, numbers)
        _forget_late_answers(decode, now_s)
        self._send(name, Heartbeat(self._last_heartbeat, numbers, self.incarnation))

    def _say(self, key: HandoverKey, handover: _Handover, word: Offer | Ready, now_s: float) -> None:
        handover.word = word
        handover.repeat_at_s = now_s + self._times.repeat_s
        self._timers.wake_by(key, handover.due_at_s)
        self._send(key.decode, word)

    def _expire(self, key: HandoverKey, handover: _Handover) -> None:
        error = faults.lease_expired(f"the decode instance was silent for {handover.lease_s:g} s")
        self._call_off(key, error)
        self._events.append(Dropped(key, error))

    def _repeat_last_word(self, key: HandoverKey) -> None:
        """Where D has ended it, it is a late copy, and D waits for nothing."""
        error = self._over.get(key)
        if error is not None:
            self._send(key.decode, Cancel(key.number, error, self.incarnation))

    def _call_off(self, key: HandoverKey, error: ErrorInfo) -> None:
        self._forget(key, error)
        self._send(key.decode, Cancel(key.number, error, self.incarnation))

    def _drop(self, key: HandoverKey, error: ErrorInfo) -> None:
        """D knows it already."""
        self._forget(key, None)
        self._events.append(Dropped(key, error))

    def _forget(self, key: HandoverKey, error: ErrorInfo | None) -> None:
        decode = self._decodes[key.decode]
        _forget_lease_time(decode, decode.handovers.pop(key.number))
        self._timers.cancel(key)
        if not decode.handovers:
            del self._decodes[key.decode]
        self._over.remember(key, error)

    def _announce_end(self) -> None:
        for name in self._decodes:
            self._send(name, Gone(self.incarnation))

    def _get(self, key: HandoverKey) -> _Handover | None:
        decode = self._decodes.get(key.decode)
        return decode.handovers.get(key.number) if decode else None

    def _keys(self) -> list[HandoverKey]:
        return [key for name in self._decodes for key in self._keys_of(name)]

    def _keys_of(self, name: str) -> list[HandoverKey]:
        decode = self._decodes.get(name)
        return [HandoverKey(name, number) for number in decode.handovers] if decode else []

    def _send(self, decode: str, message: ToDecode) -> None:
        self._outbox.append((decode, message))


def _heartbeat_period_s(decode: _Decode, times: Times) -> float:
    """As often as the shortest lease needs it; D's may be shorter than ours."""
    return min(times.heartbeat_s, heartbeat_s(min(decode.lease_times)))


def _forget_lease_time(decode: _Decode, handover: _Handover) -> None:
    decode.lease_times[handover.lease_s] -= 1
    if not decode.lease_times[handover.lease_s]:
        del decode.lease_times[handover.lease_s]


def _forget_late_answers(decode: _Decode, now_s: float) -> None:
    longest_s = max(decode.lease_times)
    while decode.asked:
        oldest, asked = next(iter(decode.asked.items()))
        if len(decode.asked) <= MAX_ASKED and now_s < asked.sent_s + longest_s:
            return
        del decode.asked[oldest]
