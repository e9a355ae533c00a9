"""What the engine reports of traced requests: when each one waits, is prefilled, decodes or is handed off.

A request that is not traced has no `PhaseLog`, so that it costs a comparison when its status changes and nothing else.
"""

from dataclasses import dataclass

from onward.proto.trace import EnginePhase, PhaseCause, PhaseChange, RequestPhases

MAX_CHANGES = 256
"""Of one request. One that is preempted more often than that is reported no further."""


@dataclass(frozen=True, slots=True)
class _TimedChange:
    phase: EnginePhase
    cause: PhaseCause
    num_tokens: int
    num_cached_tokens: int
    at_s: float

    def to_message(self, now_s: float) -> PhaseChange:
        ago_s = max(0.0, now_s - self.at_s)
        return PhaseChange(self.phase, ago_s, self.cause, self.num_tokens, self.num_cached_tokens)


class PhaseLog:
    """The phases of one request. `recorder` has the time."""

    __slots__ = ("_api_id", "_epoch", "_num_changes", "_recorder", "_request_id", "phase")

    def __init__(self, recorder: "PhaseRecorder", request_id: str, epoch: int, api_id: str) -> None:
        self._recorder, self._request_id, self._epoch, self._api_id = recorder, request_id, epoch, api_id
        self._num_changes = 0
        self.phase: EnginePhase | None = None

    def enter(self, phase: EnginePhase, num_tokens: int, *, cause: PhaseCause = "", num_cached: int = 0) -> None:
        """Also from a phase to itself, where there is a cause: a request that is asked for again waits again."""
        if (phase == self.phase and not cause) or self._num_changes >= MAX_CHANGES:
            return
        self.phase = phase
        self._num_changes += 1
        change = _TimedChange(phase, cause, num_tokens, num_cached, self._recorder.now_s)
        self._recorder.pending.setdefault((self._api_id, self._request_id, self._epoch), []).append(change)


class PhaseRecorder:
    """Collects the changes of all traced requests until they are sent. The engine core sets `now_s` when it is called."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pending: dict[tuple[str, str, int], list[_TimedChange]] = {}
        """By api process, request and epoch."""

    def new_log(self, request_id: str, epoch: int, api_id: str) -> PhaseLog:
        return PhaseLog(self, request_id, epoch, api_id)

    def drop(self, api_id: str) -> None:
        """The api process is gone: nothing is sent to it."""
        self.pending = {key: changes for key, changes in self.pending.items() if key[0] != api_id}

    def take_messages(self) -> list[tuple[str, RequestPhases]]:
        """To each api process what has happened to its requests. They go out before the tokens that they explain."""
        pending, self.pending = self.pending, {}
        return [
            (api_id, RequestPhases(request_id, epoch, [change.to_message(self.now_s) for change in changes]))
            for (api_id, request_id, epoch), changes in pending.items()
        ]
