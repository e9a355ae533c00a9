"""Decides which processes have been stopped (SIGSTOP) for so long that they are replaced. Does no I/O.

The kernel reports whether a process is stopped, so no bound on the time of a step is needed. A process that computes,
loads, compiles or waits for a slow disk is never stopped, however slow the machine is. A process under a debugger does
not count as stopped.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

MAX_SAMPLE_GAP_S = 3.0
"""Samples come once a second. A longer gap means that the supervisor was suspended itself, perhaps with all other
processes, so earlier samples no longer count."""


@dataclass(slots=True)
class StoppedProcesses:
    timeout_s: float
    """How long a process may be stopped before it is replaced."""
    _since_s: dict[Hashable, float] = field(default_factory=dict)
    """When each process that is stopped now was first seen so."""
    _sampled_at_s: float = 0.0

    def record(self, stopped: Iterable[Hashable], now_s: float) -> None:
        """Records which processes are stopped now."""
        known = self._since_s if now_s - self._sampled_at_s <= MAX_SAMPLE_GAP_S else {}
        self._since_s = {process: known.get(process, now_s) for process in stopped}
        self._sampled_at_s = now_s

    def overdue(self, now_s: float) -> list[Hashable]:
        """Returns the processes that have been stopped for too long."""
        return [process for process, since_s in self._since_s.items() if now_s - since_s >= self.timeout_s]
