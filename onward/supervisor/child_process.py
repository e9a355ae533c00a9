"""One child process: how it is born, how it is told things, how it ends."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass

from onward.proto.control import ToChild
from onward.supervisor.children import ProcessRole
from onward.transport.control_channel import ChannelClosed, ControlChannel, control_pair

_MODULES = {ProcessRole.STANDBY: "onward.worker.main"}
"""Of roles that have no package of their own."""


@dataclass(slots=True, eq=False)
class ChildProcess:
    process: "subprocess.Popen[bytes]"
    channel: ControlChannel
    pidfd: int
    killed_by_supervisor: bool = False
    """By the supervisor, so that its SIGKILL needs no other explanation."""

    def send(self, message: ToChild, fds: tuple[int, ...] = ()) -> bool:
        """False if the child cannot hear: it is dead or stuck, and will be found so soon."""
        try:
            return self.channel.send(message, fds)
        except ChannelClosed:
            return False

    def kill(self) -> None:
        """Ends the child and waits until it is gone. SIGKILL needs no cooperation, so the wait is short."""
        self.send_sigkill()
        self.process.wait()

    def send_sigkill(self) -> None:
        self.killed_by_supervisor = True
        self.process.kill()

    @property
    def killed_externally(self) -> bool:
        """Of a dead child: by the kernel, or by hand."""
        return self.process.returncode == -signal.SIGKILL and not self.killed_by_supervisor

    @property
    def return_code(self) -> int:
        """Of a dead child; negative for a signal."""
        code = self.process.returncode
        assert code is not None, "a child that lives has no return code"
        return code

    def close(self) -> None:
        self.channel.close()
        os.close(self.pidfd)

    def exit_cause(self) -> str:
        code = self.process.wait()
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"signal {-code} ({signal.Signals(-code).name})"
        return f"signal {-code}"


def new_incarnation(role: str) -> str:
    return f"{role}-{secrets.token_hex(6)}"


def spawn(role: ProcessRole, inherit_fds: tuple[int, ...] = ()) -> ChildProcess:
    """Starts a process of that role in a group of its own: Ctrl-C in the terminal is the supervisor's to hear. Raises
    `OSError` where the system does not allow it, and has left nothing then."""
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
    except OSError:  # who cannot be watched is not kept
        process.kill()
        process.wait()
        raise
