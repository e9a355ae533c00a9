"""CPU time and memory of processes, as the kernel counts them, for `/metrics` of an instance and of a router.

The supervisor reads the usage of its children, so it costs them nothing. The CPU time of a dead process stays in the
sum.
"""

import contextlib
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
    is_stopped: bool = False
    """Whether a signal such as SIGSTOP has stopped the process. A stop by a debugger does not count."""


def register_own_usage(registry: Registry, process: str) -> None:
    """Registers the usage of the calling process, which is read when metrics are scraped."""
    usage = ProcessUsage()
    usage.register(registry, lambda: usage.sample({None: (process, os.getpid())}))


def read_usage(pid: int, proc: Path = Path("/proc")) -> UsageSample | None:
    """Returns the usage of a process, or None if it has ended or the system has no such file."""
    try:
        # The command's name, in parentheses, may have spaces and parentheses too.
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # As `man 5 proc_pid_stat` numbers them, from 3 on: 14 and 15 are user and system time, 24 the resident pages.
    utime, stime, resident_pages = (int(fields[number - 3]) for number in (14, 15, 24))
    return UsageSample((utime + stime) / _CLOCK_TICKS, resident_pages * _PAGE_BYTES, is_stopped=fields[0] == "T")


def private_memory_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Returns the resident memory that neither a file nor a memory file holds. It is 0 if the process is gone or the
    system does not report it."""
    try:
        lines = (proc / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def memory_file_bytes(pid: int, name: str, proc: Path = Path("/proc")) -> int:
    """Returns the memory of the memory files with this name that the process has open. It is 0 if the process is gone or
    the system does not report it."""
    sizes: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for link in (proc / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if link.readlink().name.partition(" ")[0] == f"memfd:{name}":
                    status = link.stat()
                    sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


@dataclass(slots=True)
class ProcessUsage:
    """Usage of several processes, by process name."""

    _latest: dict[Hashable, tuple[str, UsageSample]] = field(default_factory=dict)
    _dead_cpu_s: dict[str, float] = field(default_factory=dict)

    def register(self, registry: Registry, before_read: Callable[[], None] = lambda: None) -> None:
        """Registers the metrics. Their values are those of the last `sample`."""

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
        """Reads the usage of all `processes`, each given by its name and pid. A process that is no longer given is
        dead."""
        for key in [key for key in self._latest if key not in processes]:
            process, last = self._latest.pop(key)
            self._dead_cpu_s[process] = self._dead_cpu_s.get(process, 0.0) + last.cpu_s
        for key, (process, pid) in processes.items():
            if key in self._latest and self._latest[key][0] != process:
                self._relabel(key, process)
            if (sample := read_usage(pid)) is not None:
                self._latest[key] = (process, sample)

    def stopped(self) -> set[Hashable]:
        """Returns the keys of the processes that were suspended by a signal such as SIGSTOP, and not ended, when they
        were last sampled."""
        return {key for key, (_, sample) in self._latest.items() if sample.is_stopped}

    def _relabel(self, key: Hashable, process: str) -> None:
        """Gives a process another name. The CPU time that it has used so far counts for its earlier name."""
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
