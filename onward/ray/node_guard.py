"""Runs a command for as long as its Ray node and its actor live."""

import os
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from onward.transport.control_channel import exit_with_parent

NODE_LOST = 70
"""Exit status after the raylet or the actor has ended."""
SIGNAL_STATUS = 128
"""Added to the number of the signal that has ended the command."""


def watch_node(raylet_pid: int, actor_pid: int) -> list[int]:
    """Returns file descriptors that become readable when the raylet or the actor ends. Raises `OSError` if either has
    ended already."""
    watched = [os.pidfd_open(raylet_pid), os.pidfd_open(actor_pid)]
    # The ids could belong to other processes by now.
    if os.getppid() != actor_pid or process_name(raylet_pid) != "raylet":
        raise ProcessLookupError("the raylet or the actor has ended")
    return watched


def process_name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()


def run_guarded(command: Sequence[str], watched: Sequence[int]) -> int:
    """Runs a command to its end, and passes signals to stop or to reload on to it. Kills it when one of `watched` becomes
    readable. Returns its exit status."""
    wakeup_read, wakeup_write = socket.socketpair()
    for end in (wakeup_read, wakeup_write):
        end.setblocking(False)
    signal.set_wakeup_fd(wakeup_write.fileno(), warn_on_full_buffer=False)
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: received.append(number))
    own_pid = os.getpid()
    child = subprocess.Popen(
        command,
        close_fds=False,  # the cluster key's; all others are closed on exec
        process_group=0,
        preexec_fn=lambda: exit_with_parent(own_pid),  # no thread runs here, so it is safe
    )
    child_fd = os.pidfd_open(child.pid)
    while True:
        readable, _, _ = select.select([*watched, child_fd, wakeup_read], [], [])
        if child_fd in readable:
            code = child.wait()
            return code if code >= 0 else SIGNAL_STATUS - code
        if any(fd in readable for fd in watched):
            child.kill()  # its own children end with it
            child.wait()
            return NODE_LOST
        while received:
            child.send_signal(received.pop(0))
        if wakeup_read in readable:
            wakeup_read.recv(64)
