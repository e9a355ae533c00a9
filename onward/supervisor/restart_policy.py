"""Decides how long a restart is delayed: not at all after a first death, longer after each further one, and for a
cool-down after five.

Only deaths without a completed step between them count: deaths of an instance that makes progress are bad luck.

All deaths that one isolated request explains count as one. Otherwise two requests that kill every process they run in
would cause a cool-down before both are found. A cool-down lasts as long as clients wait, so they would repeat their
requests without the charges of earlier deaths, and the search would begin anew each time. If five isolated requests die
one after the other, the instance is the likelier cause, and it cools down.
"""

from dataclasses import dataclass, field

from onward.proto.engine import CRASHES_TO_ISOLATE

WINDOW_S = 60.0
MAX_DEATHS = 5
COOL_DOWN_S = 60.0
DELAYS_S = (0.0, 0.2, 1.0, 3.0)


@dataclass(slots=True)
class RestartPolicy:
    _unexplained_deaths_s: list[float] = field(default_factory=list)
    _isolated_deaths_s: dict[str, float] = field(default_factory=dict)
    """For each request that ran alone when a process died: the time of the last such death."""
    _progress: int = 0

    def record_death(self, now_s: float, progress: int, isolated_request_id: str | None = None) -> float:
        """Records a death and returns how long to wait before the restart. `progress` grows when steps are completed.
        `isolated_request_id` is the request that ran alone, if one did."""
        if progress > self._progress:
            self._clear()
            self._progress = progress
        self._drop_old_deaths(now_s)
        if isolated_request_id is None:
            self._unexplained_deaths_s.append(now_s)
        else:
            if isolated_request_id not in self._isolated_deaths_s:
                del self._unexplained_deaths_s[-CRASHES_TO_ISOLATE:]  # the deaths that made it a suspect
            self._isolated_deaths_s[isolated_request_id] = now_s
        num_deaths = len(self._unexplained_deaths_s) + len(self._isolated_deaths_s)
        if num_deaths >= MAX_DEATHS:
            self._clear()
            return COOL_DOWN_S
        return DELAYS_S[min(num_deaths, len(DELAYS_S)) - 1]

    def _drop_old_deaths(self, now_s: float) -> None:
        self._unexplained_deaths_s = [at_s for at_s in self._unexplained_deaths_s if now_s - at_s < WINDOW_S]
        self._isolated_deaths_s = {
            request_id: at_s for request_id, at_s in self._isolated_deaths_s.items() if now_s - at_s < WINDOW_S
        }

    def _clear(self) -> None:
        self._unexplained_deaths_s.clear()
        self._isolated_deaths_s.clear()
