"""CPU time and memory of processes, as the kernel counts them: for `/metrics` of an instance and of a router.

The supervisor reads those of its children, which so pay nothing for it. What a dead process has used stays in the sum.
"""

import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onward.obs.metrics import LabelValues, Registry

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class UsageSample:
    cpu_s: float
    resident_bytes: int


def register_own_usage(registry: Registry, process: str) -> None:
    """Of the process that calls this, read when asked for."""
    usage = ProcessUsage()
    usage.register(registry, lambda: usage.sample({None: (process, os.getpid())}))


def read_usage(pid: int, proc: Path = Path("/proc")) -> UsageSample | None:
    """None: there is no such process any more, or the system has no such file."""
    try:
        # The command's name, in parentheses, may have spaces and parentheses too.
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # As `man 5 proc_pid_stat` numbers them, from 3 on: 14 and 15 are user and system time, 24 the resident pages.
    utime, stime, resident_pages = (int(fields[number - 3]) for number in (14, 15, 24))
    return UsageSample((utime + stime) / _CLOCK_TICKS, resident_pages * _PAGE_BYTES)


def private_memory_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Resident memory that neither a file nor a memory file holds. 0: the process is gone, or the system does not say."""
    try:
        lines = (proc / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


@dataclass(slots=True)
class ProcessUsage:
    """Of several processes, by what each does."""

    _latest: dict[Hashable, tuple[str, UsageSample]] = field(default_factory=dict)
    _dead_cpu_s: dict[str, float] = field(default_factory=dict)

    def register(self, registry: Registry, before_read: Callable[[], None] = lambda: None) -> None:
        """The values are those of the last `sample`."""

        def cpu_seconds() -> dict[LabelValues, float]:
            before_read()
            return self._cpu_seconds()

        registry.derived_counter(
            "onward_process_cpu_seconds_total",
            "CPU time, user and system, by process; the time of dead ones included.",
            ["process"],
            cpu_seconds,
        )
        registry.gauge(
            "onward_process_resident_memory_bytes",
            "Memory that is resident, by process; pages that processes share count in each.",
            ["process"],
            self._resident_bytes,
        )

    def sample(self, processes: Mapping[Hashable, tuple[str, int]]) -> None:
        """`processes`: what each does, and its pid. One that is not among them any more is dead."""
        for key in [key for key in self._latest if key not in processes]:
            process, last = self._latest.pop(key)
            self._dead_cpu_s[process] = self._dead_cpu_s.get(process, 0.0) + last.cpu_s
        for key, (process, pid) in processes.items():
            if key in self._latest and self._latest[key][0] != process:
                self._relabel(key, process)
            if (sample := read_usage(pid)) is not None:
                self._latest[key] = (process, sample)

    def _relabel(self, key: Hashable, process: str) -> None:
        """A process does something else from now on. What it has used so far counts for what it did before."""
        before, last = self._latest[key]
        self._dead_cpu_s[before] = self._dead_cpu_s.get(before, 0.0) + last.cpu_s
        self._dead_cpu_s[process] = self._dead_cpu_s.get(process, 0.0) - last.cpu_s

    def _cpu_seconds(self) -> dict[LabelValues, float]:
        seconds = dict(self._dead_cpu_s)
        for process, sample in self._latest.values():
            seconds[process] = seconds.get(process, 0.0) + sample.cpu_s
        return {(process,): value for process, value in seconds.items()}

    def _resident_bytes(self) -> dict[LabelValues, float]:
        resident: dict[LabelValues, float] = {}
        for process, sample in self._latest.values():
            resident[(process,)] = resident.get((process,), 0.0) + sample.resident_bytes
        return resident
