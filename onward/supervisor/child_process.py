"""A child process of the supervisor: its start, the messages to it, and its end."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass, field

from onward.obs.process_usage import memory_file_bytes, private_memory_bytes
from onward.proto.control import ToChild
from onward.proto.rank import SHARED_ARRAYS_FILE
from onward.supervisor.children import ProcessRole
from onward.supervisor.peer_writer_watch import PeerWriterWatch
from onward.supervisor.rank_process import RankProcess
from onward.supervisor.worker_deaths import first_to_end
from onward.transport.control_channel import ChannelClosed, ControlChannel, control_pair

_MODULES = {ProcessRole.STANDBY: "onward.worker.main"}
"""Modules of roles without a package of their own."""
PEER_QUIET_TIMEOUT_S = 0.5
"""How long peers may take to unmap the memory of a dead worker. A running peer needs milliseconds. One that needs
longer than this is stopped, or the machine is overloaded."""


@dataclass(slots=True, eq=False)
class ChildProcess:
    process: "subprocess.Popen[bytes]"
    channel: ControlChannel
    pidfd: int
    killed_by_supervisor: bool = False
    """The supervisor has sent it SIGKILL, so its death needs no other explanation."""
    peer_writers: PeerWriterWatch | None = None
    """Set for a worker whose KV memory peers map."""
    ranks: list[RankProcess] = field(default_factory=list)
    """The other ranks of a worker with `--tensor-parallel`, of which `process` is rank 0."""
    _return_codes: dict[int, int] | None = None
    """By rank, of the processes that had ended by themselves; if there was none, of all."""

    def send(self, message: ToChild, fds: tuple[int, ...] = ()) -> bool:
        """Sends a message. Returns False if it cannot be delivered: the child is dead or stuck, and that is detected
        soon."""
        try:
            return self.channel.send(message, fds)
        except ChannelClosed:
            return False

    @property
    def has_ended(self) -> bool:
        """Whether the process, or one of its ranks, has ended. Then `end` has to be called."""
        return any(process.poll() is not None for process in self._processes().values())

    def end(self) -> None:
        """Ends what is left of the child and waits until it is gone. SIGKILL needs no cooperation, so the wait is
        short. A group of ranks ends as a whole: the others may be waiting for one that is dead."""
        processes = self._processes()
        ended = {rank: code for rank, process in processes.items() if (code := process.poll()) is not None}
        for process in processes.values():
            process.kill()
        for process in processes.values():
            process.wait()
        if self._return_codes is None:
            self._return_codes = ended or {rank: process.wait() for rank, process in processes.items()}

    def kill(self) -> None:
        self.killed_by_supervisor = True
        self.end()

    def discard(self) -> None:
        """Ends a process whose start could not be completed."""
        self.kill()
        self.close()

    def send_sigkill(self) -> None:
        self.killed_by_supervisor = True
        for process in self._processes().values():
            process.kill()

    def pids(self) -> dict[int, int]:
        """Returns the process ids by rank."""
        return {rank: process.pid for rank, process in self._processes().items()}

    def own_memory_bytes(self) -> int:
        """Returns the memory that no other child uses: private memory of all ranks, and the arrays that they share."""
        private = sum(map(private_memory_bytes, self.pids().values()))
        return private + memory_file_bytes(self.process.pid, SHARED_ARRAYS_FILE)

    def pidfds(self) -> list[int]:
        return [self.pidfd, *(rank.pidfd for rank in self.ranks)]

    def _processes(self) -> dict[int, "subprocess.Popen[bytes]"]:
        return {0: self.process, **{rank.rank: rank.process for rank in self.ranks}}

    @property
    def killed_externally(self) -> bool:
        """Whether a dead child was killed by the kernel or by hand."""
        return self.return_code == -signal.SIGKILL and not self.killed_by_supervisor

    @property
    def return_code(self) -> int:
        """The return code of a dead child; negative for a signal. With ranks, that of `first_rank_to_end`."""
        return self._codes_of_dead()[self.first_rank_to_end]

    @property
    def first_rank_to_end(self) -> int:
        """The rank whose end explains that of a dead child."""
        return first_to_end(self._codes_of_dead())

    def _codes_of_dead(self) -> dict[int, int]:
        assert self._return_codes is not None, "a child that lives has no return code"
        return self._return_codes

    def peer_may_write(self) -> bool:
        """Returns whether a peer may still write the KV memory of this dead worker. Gives peers a moment to notice the
        death."""
        return self.peer_writers is not None and not self.peer_writers.wait_until_quiet(PEER_QUIET_TIMEOUT_S)

    def close(self) -> None:
        self.channel.close()
        for pidfd in self.pidfds():
            os.close(pidfd)
        if self.peer_writers is not None:
            self.peer_writers.close()

    def exit_cause(self) -> str:
        cause = _cause_of(self.return_code)
        has_rank = self.ranks and not self.killed_by_supervisor
        return f"rank {self.first_rank_to_end}: {cause}" if has_rank else cause


def _cause_of(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"


def new_incarnation(role: str) -> str:
    return f"{role}-{secrets.token_hex(6)}"


def spawn(role: ProcessRole, inherit_fds: tuple[int, ...] = ()) -> ChildProcess:
    """Starts a process of that role in a process group of its own, so that Ctrl-C in the terminal reaches only the
    supervisor. Raises `OSError` if the system refuses; nothing is left running then."""
    channel, child_end = control_pair()
    try:
        with child_end:
            process = _start_process(role, child_end.fileno(), inherit_fds)
        return ChildProcess(process, channel, _pidfd_of(process))
    except OSError:
        channel.close()
        raise


def _start_process(role: ProcessRole, control_fd: int, inherit_fds: tuple[int, ...]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", _MODULES.get(role, f"onward.{role.value}.main"), "--control-fd", str(control_fd)],
        pass_fds=(control_fd, *inherit_fds),
        stdin=subprocess.DEVNULL,
        process_group=0,
    )


def _pidfd_of(process: "subprocess.Popen[bytes]") -> int:
    try:
        return os.pidfd_open(process.pid)
    except OSError:  # a process that cannot be watched is not kept
        process.kill()
        process.wait()
        raise
