"""When to try again: at once after a first death, later after each further one, and not at all for a while after five.

Only deaths without a completed step between them count: an instance that makes progress is allowed to be unlucky.
"""

from dataclasses import dataclass, field

WINDOW_S = 60.0
MAX_DEATHS = 5
COOL_DOWN_S = 60.0
DELAYS_S = (0.0, 0.2, 1.0, 3.0)


@dataclass(slots=True)
class RestartPolicy:
    _deaths_s: list[float] = field(default_factory=list)
    _progress: int = 0

    def record_death(self, now_s: float, progress: int) -> float:
        """Called at each death, with a number that grows when steps are completed. How long to wait before the restart."""
        if progress > self._progress:
            self._deaths_s.clear()
            self._progress = progress
        self._deaths_s = [death_s for death_s in self._deaths_s if now_s - death_s < WINDOW_S]
        self._deaths_s.append(now_s)
        if len(self._deaths_s) >= MAX_DEATHS:
            self._deaths_s.clear()
            return COOL_DOWN_S
        return DELAYS_S[min(len(self._deaths_s), len(DELAYS_S)) - 1]
