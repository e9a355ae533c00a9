"""Detects whether the kernel has killed a child for lack of memory. A process that gets SIGKILL cannot report it
itself.

The kernel counts such kills, for a control group or for the whole machine. If a child died of a SIGKILL that the
supervisor did not send, and a counter rose at that time, the child was one of them.
"""

from collections import deque
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from onward.obs.cgroup_memory import PROC_SELF, memory_cgroups

WINDOW_S = 10.0
"""The counter rises when the signal is sent; a process with much memory takes a while to end."""


class OomEvidence(Enum):
    CERTAIN = "killed by the kernel for lack of memory"
    LIKELY = "likely killed by the kernel for lack of memory"
    """No counter for our own control group exists."""


class OomCounts(NamedTuple):
    cgroup: int | None
    """Kills in our control group."""
    machine: int | None


def read_counts(proc: Path = PROC_SELF, vmstat: Path = Path("/proc/vmstat")) -> OomCounts:
    """Reads the counters. Children are in our own control group; groups above it count the kills of others too."""
    kills = [group.oom_kills() for group, *_ in memory_cgroups(proc)]
    return OomCounts(next((count for count in kills if count is not None), None), _read_vmstat(vmstat))


def _read_vmstat(vmstat: Path) -> int | None:
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


class OomWatch:
    def __init__(self, read: Callable[[], OomCounts] = read_counts) -> None:
        self._read = read
        self._samples: deque[tuple[float, OomCounts]] = deque()

    def sample(self, now_s: float) -> None:
        """Records the counters. Called about once a second, because only a recent rise explains a death."""
        self._samples.append((now_s, self._read()))
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - WINDOW_S:
            self._samples.popleft()

    def explain_kill(self) -> OomEvidence | None:
        """Returns the evidence for a child that died of a SIGKILL not sent by the supervisor. Each counted kill
        explains one death."""
        now = self._read()
        earlier = self._samples[0][1] if self._samples else now
        self._samples = deque((at_s, _minus_explained_kill(counts, now)) for at_s, counts in self._samples)
        if earlier.cgroup is not None and now.cgroup is not None:
            return OomEvidence.CERTAIN if now.cgroup > earlier.cgroup else None
        if earlier.machine is not None and now.machine is not None:
            return OomEvidence.LIKELY if now.machine > earlier.machine else None
        return OomEvidence.LIKELY


def _minus_explained_kill(counts: OomCounts, limit: OomCounts) -> OomCounts:
    """Counts one more kill as explained, if there was one."""
    return OomCounts(*(None if a is None or b is None else min(a + 1, b) for a, b in zip(counts, limit, strict=True)))
