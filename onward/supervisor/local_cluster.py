"""Keeps a cluster on this machine alive: instances, each an `onward serve` with children of its own, and their router.

It knows command lines and lines of output, nothing of what they do or say to each other. Whoever was ready once and dies
is started again on the same ports; one that never gets ready ends the cluster.
"""

import logging
import os
import selectors
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from onward import log
from onward.clock import Clock
from onward.config import environment_with
from onward.errors import StartupError
from onward.supervisor.oom import OomWatch
from onward.supervisor.restart_policy import RestartPolicy
from onward.transport.control_channel import exit_with_parent

logger = logging.getLogger(__name__)

POLL_S = 0.2
KILL_AFTER_S = 10.0
"""Beyond the drain: how long whoever was told to stop may take."""
STOP_ORDER = (("router",), ("decode", "mixed"), ("prefill",))
"""The router first, so that no request comes to someone who leaves; prefill instances last, while there are still streams
that wait for them."""
READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 16
NUM_LAST_LINES = 20
MAX_LAST_READS = 64


@dataclass(slots=True, frozen=True)
class MemberSpec:
    name: str
    """As its lines of output are marked."""
    role: str
    command: tuple[str, ...]
    url: str
    handoff_address: str | None
    threads: int | None
    """None for a router, which computes nothing."""
    environment: dict[str, str] = field(default_factory=dict)
    """Beside our own: for secrets, which a command line would show to everybody on the machine."""
    reloads_on_sighup: bool = False
    """A SIGHUP that we get is for it: it reads its keys again. Whoever has no file of them would die of it."""


@dataclass(slots=True, eq=False)
class MemberOutput:
    """One of an instance's two streams, cut into lines."""

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
    """Until it is ready it cannot take it."""


class LocalCluster:
    def __init__(
        self,
        specs: Sequence[MemberSpec],
        clock: Clock,
        *,
        inherit_fds: tuple[int, ...],
        ready_prefix: str,
        drain_s: float,
        on_line: Callable[[str, str], None],
        on_ready: Callable[["LocalCluster"], None],
    ) -> None:
        """An instance is ready when a line of its standard output begins with `greeting`. What else it prints there is
        for someone who has started it alone; its standard error goes to `on_line(name, line)`."""
        self.members = [ClusterMember(spec) for spec in specs]
        self._clock, self._inherit_fds, self._greeting, self._drain_s = clock, inherit_fds, ready_prefix, drain_s
        self._on_line, self._on_ready = on_line, on_ready
        self._selector = selectors.DefaultSelector()
        self._oom_watch, self._next_oom_note_s = OomWatch(), 0.0
        self._was_ready = False
        self._stop_requests = 0

    def run(self) -> None:
        """Until told to stop. Raises `StartupError` if an instance never gets ready."""
        wakeup_read, wakeup_write = socket.socketpair()
        with wakeup_read, wakeup_write:
            self._catch_signals(wakeup_read, wakeup_write)
            try:
                for instance in self.members:
                    self._start(instance)
                while not self._stop_requests:
                    self._run_once()
                self._shut_down()
            finally:
                self._clean_up()

    def _catch_signals(self, wakeup_read: socket.socket, wakeup_write: socket.socket) -> None:
        for end in (wakeup_read, wakeup_write):
            end.setblocking(False)
        signal.set_wakeup_fd(wakeup_write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if any(instance.spec.reloads_on_sighup for instance in self.members):
            signal.signal(signal.SIGHUP, self._on_hangup)
        self._selector.register(wakeup_read, selectors.EVENT_READ, None)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stop_requests += 1

    def _on_hangup(self, _number: int, _frame: object) -> None:
        for instance in self.members:
            instance.reload_pending = instance.spec.reloads_on_sighup

    def _run_once(self) -> None:
        self._read()
        now_s = self._clock.now_s()
        if now_s >= self._next_oom_note_s:
            self._next_oom_note_s = now_s + 1.0
            self._oom_watch.sample(now_s)
        for instance in self.members:
            if instance.process is not None and instance.process.poll() is not None:
                self._on_exit(instance, instance.process.returncode, now_s)
            if instance.restart_at_s is not None and instance.restart_at_s <= now_s:
                self._start(instance)
            if instance.reload_pending and instance.is_ready and instance.process is not None:
                instance.reload_pending = False
                instance.process.send_signal(signal.SIGHUP)

    def _start(self, instance: ClusterMember) -> None:
        """In a group of its own: Ctrl-C in the terminal is for us to hear."""
        supervisor_pid = os.getpid()
        instance.restart_at_s = None
        instance.last_lines.clear()
        instance.process = subprocess.Popen(
            instance.spec.command,
            env=environment_with(instance.spec.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=self._inherit_fds,
            process_group=0,
            preexec_fn=lambda: exit_with_parent(supervisor_pid),  # no thread runs here, so it is safe
        )
        for stream in (instance.process.stdout, instance.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            output = MemberOutput(instance, stream is instance.process.stdout)
            self._selector.register(stream, selectors.EVENT_READ, output)

    def _on_exit(self, instance: ClusterMember, code: int, now_s: float) -> None:
        assert instance.process is not None
        self._read_remaining_output(instance)
        instance.process, instance.is_ready = None, False
        cause = f"exit code {code}" if code >= 0 else f"signal {-code}"
        if code == -signal.SIGKILL and (oom := self._oom_watch.explain_kill()) is not None:
            cause += f", {oom.value}"
        if not instance.num_times_ready:
            reason = instance.last_lines[-1] if instance.last_lines else cause
            reason = reason.removeprefix("onward serve: ").removeprefix("onward router: ")
            raise StartupError(f"{instance.spec.name} cannot start: {reason}")
        # Getting ready is the progress of an instance: a start takes long enough to keep a loop of deaths calm.
        delay_s = instance.policy.record_death(now_s, instance.num_times_ready)
        logger.warning(log.event("instance died", instance=instance.spec.name, cause=cause, restart_in_s=delay_s))
        instance.restart_at_s = now_s + delay_s

    # What instances say.

    def _read(self, timeout_s: float = POLL_S) -> None:
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, MemberOutput):
                self._read_stream(key.fd, key.data)
            else:
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.recv(64)

    def _read_stream(self, fd: int, output: MemberOutput) -> bool:
        """Whether there was something."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(fd)
        for line in output.lines(data) if data else output.last_line():
            self._take_line(output, line)
        return bool(data)

    def _take_line(self, output: MemberOutput, line: str) -> None:
        instance = output.member
        if not output.is_stdout:
            if line:
                instance.last_lines.append(line)
                self._on_line(instance.spec.name, line)
        elif line.startswith(self._greeting) and not instance.is_ready:
            instance.is_ready = True
            instance.num_times_ready += 1
            logger.info(log.event("instance ready", instance=instance.spec.name))
            self._announce()

    def _announce(self) -> None:
        if not self._was_ready and all(instance.is_ready for instance in self.members):
            self._was_ready = True
            self._on_ready(self)

    def _read_remaining_output(self, instance: ClusterMember) -> None:
        """A dead instance's last words. Its own children may hold the pipes a little longer; we do not wait for them."""
        assert instance.process is not None
        for stream in (instance.process.stdout, instance.process.stderr):
            assert stream is not None
            if (key := self._selector.get_map().get(stream.fileno())) is not None:
                for _ in range(MAX_LAST_READS):
                    if not self._read_stream(key.fd, key.data):
                        break
            if stream.fileno() in self._selector.get_map():
                self._selector.unregister(stream)
            stream.close()

    # The end.

    def _shut_down(self) -> None:
        """A further signal ends the streams at once: whoever serves clients is asked again, and tells them."""
        for roles in STOP_ORDER:
            requests = self._stop_requests  # one that comes while they are told counts as well
            instances = [i for i in self.members if i.spec.role in roles]
            self._stop(instances, self._drain_s)
            if self._stop_requests > requests:
                self._stop(instances, 0.0)
                return

    def _stop(self, instances: list[ClusterMember], grace_s: float) -> None:
        """Asks them to leave and waits; those that do not are ended before others are asked."""
        requests, deadline_s = self._stop_requests, self._clock.now_s() + grace_s + KILL_AFTER_S
        running = [i.process for i in instances if i.process is not None]
        for process in running:
            process.terminate()
        while any(process.poll() is None for process in running) and self._stop_requests == requests:
            if self._clock.now_s() >= deadline_s:
                for process in running:
                    process.kill()
                    process.wait()
                return
            self._read()

    def _clean_up(self) -> None:
        for instance in self.members:
            if instance.process is not None:
                instance.process.kill()  # its own children die with it
                instance.process.wait()
                self._read_remaining_output(instance)
        self._selector.close()
