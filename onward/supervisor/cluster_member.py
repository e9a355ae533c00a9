"""A process of a cluster on this machine: its command, its output and its state."""

import math
import subprocess
from collections import deque
from dataclasses import dataclass, field

from onward.supervisor.restart_policy import RestartPolicy

MAX_LINE_BYTES = 1 << 16
NUM_LAST_LINES = 20


@dataclass(slots=True, frozen=True)
class MemberSpec:
    name: str
    """Marks its lines of output."""
    role: str
    command: tuple[str, ...]
    url: str
    handoff_address: str | None
    threads: int | None
    """None for a router, which computes nothing."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables in addition to this process's own. They carry secrets, because all users of the machine can read a
    command line."""
    reloads_on_sighup: bool = False
    """Whether a SIGHUP is passed on to it, so that it reads its API keys again. It would end a process without a key
    file."""
    model: str = ""
    """Name of the model that it serves. Empty for a router, and where nothing distinguishes models."""


@dataclass(slots=True, eq=False)
class MemberOutput:
    """Standard output or standard error of a member, split into lines."""

    member: "ClusterMember"
    is_stdout: bool
    partial_line: bytes = b""

    def lines(self, data: bytes) -> list[str]:
        *lines, self.partial_line = (self.partial_line + data).split(b"\n")
        if len(self.partial_line) > MAX_LINE_BYTES:
            lines, self.partial_line = [*lines, self.partial_line], b""
        return [line.decode(errors="replace").rstrip() for line in lines]

    def last_line(self) -> list[str]:
        return self.lines(b"\n") if self.partial_line else []


@dataclass(slots=True, eq=False)
class ClusterMember:
    spec: MemberSpec
    process: "subprocess.Popen[bytes] | None" = None
    is_ready: bool = False
    num_times_ready: int = 0
    restart_at_s: float | None = None
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_LAST_LINES))
    reload_pending: bool = False
    """A SIGHUP has to be passed on as soon as the member is ready; before that it cannot handle one."""
    is_leaving: bool = False
    """It has been asked to stop, and is not started again."""
    kill_at_s: float = math.inf
    """When a leaving member that still runs is killed."""
