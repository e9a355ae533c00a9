"""Keeps a cluster on this machine alive: instances, each an `onward serve` with children of its own, and their router.

It knows their command lines and lines of output, and nothing of their work or their messages. A process that was ready
once and dies is started again on the same ports; a process of the start that never gets ready ends the cluster.
"""

import logging
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Protocol

from onward import log
from onward.clock import Clock
from onward.config import environment_with
from onward.errors import StartupError
from onward.proto.cluster_control import UpgradeInstances
from onward.supervisor.cluster_control import ChangeRequest, ClusterControl, listen_for_changes, refuse_change
from onward.supervisor.cluster_member import ClusterMember, MemberOutput, MemberSpec
from onward.supervisor.cluster_scaling import ClusterScaling
from onward.supervisor.oom import OomWatch
from onward.supervisor.rolling_upgrade import RollingUpgrade
from onward.supervisor.scale_change import MemberOperations, ScalableMember
from onward.transport.control_channel import exit_with_parent

logger = logging.getLogger(__name__)

POLL_S = 0.2
START_RETRY_S = 1.0
"""Delay before a restart that the operating system refused is tried again."""
KILL_AFTER_S = 10.0
"""How long a member may take to stop, beyond the drain time."""
STOP_ORDER = (("router",), ("decode", "mixed"), ("prefill",))
"""The router stops first, so that no request comes to an instance that stops. Prefill instances stop last, because
streams of decode instances may wait for them."""
READ_BYTES = 1 << 16
MAX_LAST_READS = 64


class ScaleUpPlanner(Protocol):
    """Plans the instances that a scale-up adds to a running cluster."""

    def plan_member(self, role: str, model: str, members: Sequence[ClusterMember]) -> MemberSpec:
        """Raises `StartupError` if there can be no further instance."""
        ...

    def release(self, spec: MemberSpec) -> None:
        """Releases what was reserved for an instance that has ended for good."""
        ...


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
        control_port: int | None = None,
        planner: ScaleUpPlanner | None = None,
        new_scaling: Callable[[MemberOperations], ClusterScaling] | None = None,
    ) -> None:
        """An instance is ready when a line of its standard output begins with `ready_prefix`. Other lines of its standard
        output are ignored. Lines of its standard error go to `on_line(name, line)`.
        `control_port`: the port by which `onward upgrade` and `onward scale` find the cluster. `planner` and `new_scaling`
        are given together; without them the cluster keeps its instances."""
        self.members = [ClusterMember(spec) for spec in specs]
        self._clock, self._inherit_fds, self._greeting, self._drain_s = clock, inherit_fds, ready_prefix, drain_s
        self._on_line, self._on_ready = on_line, on_ready
        self._selector = selectors.DefaultSelector()
        self._oom_watch, self._next_oom_note_s = OomWatch(), 0.0
        self._was_ready = False
        self._stop_requests = 0
        self._control = ClusterControl(None) if control_port is None else listen_for_changes(control_port)
        self._upgrade: RollingUpgrade | None = None
        """The upgrade in progress."""
        self._planner = planner
        self._scaling = None if new_scaling is None else new_scaling(self)

    def run(self) -> None:
        """Keeps the cluster alive until a stop signal. Raises `StartupError` if an instance never gets ready."""
        wakeup_read, wakeup_write = socket.socketpair()
        with wakeup_read, wakeup_write:
            self._catch_signals(wakeup_read, wakeup_write)
            try:
                for instance in self.members:
                    self._start_first(instance)
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
        starting = [] if self._upgrade is None else self._upgrade.starting
        for instance in [*self.members, *starting]:
            instance.reload_pending = instance.spec.reloads_on_sighup

    def _run_once(self) -> None:
        self._read()
        now_s = self._clock.now_s()
        if now_s >= self._next_oom_note_s:
            self._next_oom_note_s = now_s + 1.0
            self._oom_watch.sample(now_s)
        for instance in list(self.members):
            if instance.process is not None and instance.process.poll() is not None:
                self._on_exit(instance, instance.process.returncode, now_s)
            elif instance.process is not None and now_s >= instance.kill_at_s:
                instance.process.kill()
            if instance.restart_at_s is not None and instance.restart_at_s <= now_s:
                self._restart(instance, now_s)
            if instance.reload_pending and instance.is_ready and instance.process is not None:
                instance.reload_pending = False
                instance.process.send_signal(signal.SIGHUP)
        if self._was_ready:
            self._tend_changes(now_s)

    def _tend_changes(self, now_s: float) -> None:
        """Carries out upgrades and changes of the number of instances, one at a time."""
        request = self._control.receive(now_s)
        if request is not None:
            self._begin_change(request)
        if self._upgrade is not None:
            if self._upgrade.advance(now_s):
                self._upgrade = None
        elif self._scaling is not None:
            self._scaling.advance(now_s)

    def _begin_change(self, request: ChangeRequest) -> None:
        is_scaling = self._scaling is not None and self._scaling.is_changing
        if self._upgrade is not None:
            refuse_change(request, "an upgrade of this cluster is in progress; wait until it has ended")
        elif isinstance(request.change, UpgradeInstances) and is_scaling:
            refuse_change(request, "the number of instances is being changed; wait until that has ended")
        elif isinstance(request.change, UpgradeInstances):
            self._upgrade = RollingUpgrade(request.requester, self.members, self._start, self._drop)
        elif self._scaling is None:
            refuse_change(request, "instances that no router is in front of cannot be added or removed")
        else:
            self._scaling.begin(request, request.change)

    # Changes of the number of instances (`MemberOperations`).

    def members_now(self) -> Sequence[ClusterMember]:
        return self.members

    def add_member(self, role: str, model: str) -> ClusterMember:
        assert self._planner is not None, "a cluster that is scaled has a planner"
        spec = self._planner.plan_member(role, model, self.members)
        member = ClusterMember(spec)
        try:
            self._start_first(member)
        except StartupError:
            self._planner.release(spec)
            raise
        self.members.append(member)
        logger.info(log.event("instance added", instance=spec.name, url=spec.url))
        return member

    def remove_member(self, member: ScalableMember) -> None:
        assert isinstance(member, ClusterMember), "members of this cluster"
        member.is_leaving, member.restart_at_s = True, None
        if member.process is None:
            self._forget(member)
            return
        member.kill_at_s = self._clock.now_s() + self._drain_s + KILL_AFTER_S
        member.process.terminate()

    def _forget(self, member: ClusterMember) -> None:
        """Ends the membership of an instance that has no process any more."""
        self.members.remove(member)
        if self._planner is not None:
            self._planner.release(member.spec)
        logger.info(log.event("instance removed", instance=member.spec.name))

    def _drop(self, instance: ClusterMember) -> None:
        """Ends a process that is not kept. It may be dead already."""
        assert instance.process is not None, "it was started"
        instance.process.kill()
        instance.process.wait()
        self._read_remaining_output(instance)
        instance.process = None

    def _start_first(self, instance: ClusterMember) -> None:
        try:
            self._start(instance)
        except OSError as fault:
            raise StartupError(f"{instance.spec.name} cannot start: {fault}") from fault

    def _restart(self, instance: ClusterMember, now_s: float) -> None:
        """Tries again later if the operating system refuses, for example for lack of processes or files."""
        try:
            self._start(instance)
        except OSError as fault:
            name = instance.spec.name
            logger.error(log.event("cannot start", instance=name, why=fault, again_in_s=START_RETRY_S))
            instance.restart_at_s = now_s + START_RETRY_S

    def _start(self, instance: ClusterMember) -> None:
        """Starts a process in a process group of its own, so that Ctrl-C in the terminal does not reach it. Raises
        `OSError` if the operating system refuses."""
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
        try:
            for stream in (instance.process.stdout, instance.process.stderr):
                assert stream is not None
                os.set_blocking(stream.fileno(), False)
                output = MemberOutput(instance, stream is instance.process.stdout)
                self._selector.register(stream, selectors.EVENT_READ, output)
        except OSError:  # a process whose output cannot be read is not kept
            self._drop(instance)
            raise

    def _on_exit(self, instance: ClusterMember, code: int, now_s: float) -> None:
        assert instance.process is not None
        self._read_remaining_output(instance)
        instance.process, instance.is_ready = None, False
        if self._upgrade is not None and self._upgrade.replace(instance):
            return
        if instance.is_leaving:
            self._forget(instance)
            return
        cause = f"exit code {code}" if code >= 0 else f"signal {-code}"
        if code == -signal.SIGKILL and (oom := self._oom_watch.explain_kill()) is not None:
            cause += f", {oom.value}"
        if not instance.num_times_ready:
            reason = instance.last_lines[-1] if instance.last_lines else cause
            reason = reason.removeprefix("onward serve: ").removeprefix("onward router: ")
            if not self._was_ready:
                raise StartupError(f"{instance.spec.name} cannot start: {reason}")
            self._give_up(instance, reason)
            return
        # Progress of an instance is that it gets ready. A start takes long enough to slow down a loop of deaths.
        delay_s = instance.policy.record_death(now_s, instance.num_times_ready)
        logger.warning(log.event("instance died", instance=instance.spec.name, cause=cause, restart_in_s=delay_s))
        instance.restart_at_s = now_s + delay_s

    def _give_up(self, instance: ClusterMember, reason: str) -> None:
        """Ends the membership of an instance that was added, and never got ready."""
        logger.error(log.event("new instance cannot start", instance=instance.spec.name, why=reason))
        self._forget(instance)
        if self._scaling is not None:
            self._scaling.on_lost(instance, reason)

    # Output of instances.

    def _read(self, timeout_s: float = POLL_S) -> None:
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, MemberOutput):
                self._read_stream(key.fd, key.data)
            else:
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.recv(64)

    def _read_stream(self, fd: int, output: MemberOutput) -> bool:
        """Returns whether there was data."""
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
        """Reads the remaining output of a dead instance. Its own children may keep the pipes open a little longer; this
        does not wait for them."""
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

    # Shutdown.

    def _shut_down(self) -> None:
        """Stops the members, role by role. A further signal ends the streams at once: the members that are being
        stopped get a second signal and inform their clients. The remaining ones are killed afterwards."""
        self._cancel_changes()
        for roles in STOP_ORDER:
            requests = self._stop_requests  # a signal that comes during `terminate` counts as well
            instances = [i for i in self.members if i.spec.role in roles]
            self._stop(instances, self._drain_s)
            if self._stop_requests > requests:
                self._stop(instances, 0.0)
                return

    def _stop(self, instances: list[ClusterMember], grace_s: float) -> None:
        """Terminates these instances and waits until they have ended or a further signal comes. Kills them if they take
        too long."""
        requests, deadline_s = self._stop_requests, self._clock.now_s() + grace_s + KILL_AFTER_S
        running = [i.process for i in instances if i.process is not None]
        for instance in instances:
            # A second signal would end the streams of an instance that is leaving already.
            if instance.process is not None and not (instance.is_leaving and grace_s > 0):
                instance.process.terminate()
        while any(process.poll() is None for process in running) and self._stop_requests == requests:
            if self._clock.now_s() >= deadline_s:
                for process in running:
                    process.kill()
                    process.wait()
                return
            self._read()

    def _cancel_changes(self) -> None:
        if self._upgrade is not None:
            self._upgrade.cancel("the cluster is being stopped")
            self._upgrade = None
        if self._scaling is not None:
            self._scaling.cancel("the cluster is being stopped")

    def _clean_up(self) -> None:
        self._control.close()
        self._cancel_changes()
        for instance in self.members:
            if instance.process is not None:
                instance.process.kill()  # its own children die with it
                instance.process.wait()
                self._read_remaining_output(instance)
        self._selector.close()
