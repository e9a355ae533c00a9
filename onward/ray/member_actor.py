"""The actor that runs one member of a cluster on a Ray node: an instance or a router, as a child process.

It reports the child's output and end to the cluster, which decides what happens next. Methods run one at a time.
"""

import os
import selectors
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import ray
import ray.util

from onward.config import environment_outside_of_ray, raylet_pid
from onward.supervisor.cluster_key import key_in_memory
from onward.supervisor.cluster_member import ClusterMember, MemberOutput, MemberSpec

READ_BYTES = 1 << 16
MAX_LAST_READS = 64
"""Reads of the output of a process that has ended. Its own children may keep the pipes open a little longer."""
MAX_LINES = 1000
"""Lines of one report."""


@dataclass(frozen=True, slots=True)
class MemberReport:
    """What has happened since the last report."""

    node: str
    is_ready: bool = False
    """Whether it is ready, also if an earlier report said so: a reply can be lost."""
    lines: list[str] = field(default_factory=list)
    """New lines of standard error."""
    exit_code: int | None = None


class MemberActor:
    def __init__(self, spec: MemberSpec, cluster_key: str, ready_prefix: str, host: str) -> None:
        """The spec's command has neither the interpreter nor the flags that depend on the node. An instance is ready when a
        line of its standard output begins with `ready_prefix`. It listens on `host`; empty: the address of its node."""
        address = ray.util.get_node_ip_address()
        self._node = node_name(address, ray.get_runtime_context().get_node_id())
        self._greeting = ready_prefix
        self._stack = ExitStack()
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._member = ClusterMember(spec)
        self._lines: list[str] = []
        key_fd = self._stack.enter_context(key_in_memory(cluster_key))
        own_flags = ["--cluster-key-file", f"/dev/fd/{key_fd}"]
        if spec.role != "router":
            own_flags += ["--host", host or address, "--node-name", self._node]
        guard = (sys.executable, "-m", "onward.ray.guarded_command", str(raylet_pid()), str(os.getpid()))
        process = subprocess.Popen(
            (*guard, sys.executable, *spec.command, *own_flags),
            env=environment_outside_of_ray(spec.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(key_fd,),
            process_group=0,
        )
        self._member.process = process
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, MemberOutput(self._member, stream is process.stdout))

    def next_report(self, timeout_s: float) -> MemberReport:
        """Returns what has happened. Waits until something has, and no longer than `timeout_s`."""
        process = self._member.process
        assert process is not None, "the constructor has started it"
        self._read(timeout_s)
        code = process.poll()
        for _ in range(MAX_LAST_READS if code is not None else 0):
            self._read(0.0)
        lines, self._lines = self._lines[:MAX_LINES], self._lines[MAX_LINES:]
        return MemberReport(
            node=self._node,
            is_ready=self._member.is_ready,
            lines=lines,
            exit_code=code if not self._lines else None,
        )

    def send_signal(self, number: int) -> None:
        process = self._member.process
        assert process is not None, "the constructor has started it"
        process.send_signal(signal.Signals(number))

    def _read(self, timeout_s: float) -> None:
        if not self._selector.get_map():  # both pipes are closed, and the end of the process is near
            process = self._member.process
            assert process is not None, "the constructor has started it"
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
            return
        for key, _ in self._selector.select(timeout_s):
            data = os.read(key.fd, READ_BYTES)
            output: MemberOutput = key.data
            if not data:
                self._selector.unregister(key.fileobj)
            for line in output.lines(data) if data else output.last_line():
                self._take_line(line, is_stdout=output.is_stdout)

    def _take_line(self, line: str, *, is_stdout: bool) -> None:
        if is_stdout:
            self._member.is_ready = self._member.is_ready or line.startswith(self._greeting)
        elif line:
            self._lines.append(line)


def node_name(address: str, node_id: str) -> str:
    """Returns the name of a Ray node as people are shown it. One address may have several nodes."""
    return f"{address.replace(':', '.')}-{node_id[:8]}"
