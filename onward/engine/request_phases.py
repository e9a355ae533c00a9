"""Phases of traced requests: when each one waits, is prefilled, decodes or is handed off. The phases of a prompt that is
computed for a peer are collected until that ends, and sent to the peer.

An untraced request has no `PhaseLog`, so it costs one comparison when its status changes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from onward.proto.trace import EnginePhase, PhaseCause, PhaseChange, RequestPhases

MAX_CHANGES = 256
"""Phase changes of one request. Further changes, for example by many preemptions, are not reported."""


@dataclass(frozen=True, slots=True)
class TimedChange:
    phase: EnginePhase
    cause: PhaseCause
    num_tokens: int
    num_cached_tokens: int
    at_s: float

    def to_message(self, now_s: float) -> PhaseChange:
        ago_s = max(0.0, now_s - self.at_s)
        return PhaseChange(self.phase, ago_s, self.cause, self.num_tokens, self.num_cached_tokens)


class PhaseLog:
    """The phases of one request. `recorder` has the time; `put` takes each change."""

    __slots__ = ("_num_changes", "_put", "_recorder", "phase")

    def __init__(self, recorder: "PhaseRecorder", put: Callable[[TimedChange], None]) -> None:
        self._recorder, self._put = recorder, put
        self._num_changes = 0
        self.phase: EnginePhase | None = None

    def enter(self, phase: EnginePhase, num_tokens: int, *, cause: PhaseCause = "", num_cached: int = 0) -> None:
        """Records that the request enters `phase` now. A change to the current phase is recorded only if it has a
        cause: a request whose peer is asked again, for example, begins another wait. Changes beyond MAX_CHANGES are
        ignored."""
        if (phase == self.phase and not cause) or self._num_changes >= MAX_CHANGES:
            return
        self.phase = phase
        self._num_changes += 1
        self._put(TimedChange(phase, cause, num_tokens, num_cached, self._recorder.now_s))


class PhaseRecorder:
    """Collects the changes of all traced requests until they are sent. The engine core sets `now_s` when it is called."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._pending: dict[tuple[str, str, int], list[TimedChange]] = {}
        """By api process, request and epoch."""
        self._of_peers: list[tuple[str, RequestPhases]] = []

    def new_log(self, request_id: str, epoch: int, api_id: str) -> PhaseLog:
        key = (api_id, request_id, epoch)
        return PhaseLog(self, lambda change: self._pending.setdefault(key, []).append(change))

    def new_log_for_peer(self, changes: list[TimedChange]) -> PhaseLog:
        """Returns a log that appends to `changes`."""
        return PhaseLog(self, changes.append)

    def add_of_peer(self, api_id: str, request_id: str, epoch: int, peer: str, changes: list[PhaseChange]) -> None:
        """Passes on what a prefill instance has reported of its share of a request."""
        self._of_peers.append((api_id, RequestPhases(request_id, epoch, changes[:MAX_CHANGES], peer)))

    def drop(self, api_id: str) -> None:
        """Discards all unsent changes for an api process that has died."""
        self._pending = {key: changes for key, changes in self._pending.items() if key[0] != api_id}
        self._of_peers = [(to, message) for to, message in self._of_peers if to != api_id]

    def take_messages(self) -> list[tuple[str, RequestPhases]]:
        """Returns the unsent phase changes, each message with its api process, and clears them. They must be sent
        before the tokens that they explain. Phases at a prefill instance come first, because they are part of the
        handoff that the request's own phases may end."""
        if not self._pending and not self._of_peers:
            return []
        pending, self._pending = self._pending, {}
        of_peers, self._of_peers = self._of_peers, []
        return of_peers + [
            (api_id, RequestPhases(request_id, epoch, [change.to_message(self.now_s) for change in changes]))
            for (api_id, request_id, epoch), changes in pending.items()
        ]
