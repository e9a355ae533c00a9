"""Keeps a cluster on Ray alive: starts its members as actors, and starts those again that end or whose node is lost.

It knows their command lines and lines of output, and nothing of their work. Each start of an instance has a higher
generation than the one before it, so a router never has two of one name.
"""

import logging
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import ray
from ray.exceptions import ActorUnavailableError, RayError

from onward import log
from onward.clock import Clock
from onward.errors import StartupError
from onward.proto.cluster_control import UpgradeInstances
from onward.ray.member_actor import MemberReport
from onward.ray.node_guard import NODE_LOST
from onward.ray.ray_member import MemberStart, RayMember
from onward.supervisor.cluster_control import ClusterControl, listen_for_changes, refuse_change
from onward.supervisor.cluster_member import MemberSpec
from onward.supervisor.cluster_scaling import ClusterScaling
from onward.supervisor.local_cluster import KILL_AFTER_S, STOP_ORDER
from onward.supervisor.scale_change import MemberOperations, ScalableMember

POLL_S = 0.2
PLACED_AFTER_S = 10.0
"""For how long a member may wait for a place before a warning says so."""

logger = logging.getLogger(__name__)

PlanMember = Callable[[str, str, Sequence[str]], MemberSpec]
"""Plans a member of this role and model beside those of these names. Raises `StartupError` if there can be none."""


class RayCluster:
    def __init__(
        self,
        specs: Sequence[MemberSpec],
        clock: Clock,
        start: MemberStart,
        *,
        drain_s: float,
        plan_member: PlanMember,
        on_line: Callable[[str, str], None],
        on_ready: Callable[["RayCluster"], None],
        new_scaling: Callable[[MemberOperations], ClusterScaling],
        control_port: int | None = None,
    ) -> None:
        """Lines of a member's standard error go to `on_line(name, line)`. `control_port`: the port by which `onward scale`
        finds the cluster."""
        self.members = [RayMember(spec) for spec in specs]
        self._clock, self._start, self._drain_s, self._plan_member = clock, start, drain_s, plan_member
        self._on_line, self._on_ready = on_line, on_ready
        self._generations: dict[str, int] = defaultdict(int)
        """Number of starts by name, also of members that have left."""
        self._unplaced_since_s: dict[RayMember, float] = {}
        """Members that have not reported anything since their start."""
        self._was_ready = False
        self._stop_requests = 0
        self._control = ClusterControl(None) if control_port is None else listen_for_changes(control_port)
        self._scaling = new_scaling(self)

    def run(self) -> None:
        """Keeps the cluster alive until a stop signal. Raises `StartupError` if an instance of the start cannot start."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if any(member.spec.reloads_on_sighup for member in self.members):
            signal.signal(signal.SIGHUP, self._on_hangup)
        try:
            for member in self.members:
                self._start_member(member)
            while not self._stop_requests:
                self._run_once()
            self._shut_down()
        finally:
            self._control.close()
            self._scaling.cancel("the cluster is being stopped")
            for member in self.members:
                member.drop()

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stop_requests += 1

    def _on_hangup(self, _number: int, _frame: object) -> None:
        for member in list(self.members):
            member.reload_pending = member.spec.reloads_on_sighup

    def _run_once(self) -> None:
        self._read_reports()
        now_s = self._clock.now_s()
        for member in list(self.members):
            if member.is_leaving and now_s >= member.kill_at_s:
                self._forget(member)
            elif member.restart_at_s is not None and member.restart_at_s <= now_s:
                self._start_member(member)
            if member.reload_pending and member.is_ready:
                member.reload_pending = False
                member.send_signal(signal.SIGHUP)
        self._warn_of_unplaced(now_s)
        if self._was_ready:
            self._receive_change(now_s)
            self._scaling.advance(now_s)

    def _receive_change(self, now_s: float) -> None:
        request = self._control.receive(now_s)
        if request is None:
            return
        if isinstance(request.change, UpgradeInstances):
            refuse_change(request, "a cluster on Ray is not upgraded in place; stop it and start the new version")
        else:
            self._scaling.begin(request, request.change)

    # Members.

    def _start_member(self, member: RayMember) -> None:
        name = member.spec.name
        self._generations[name] += 1
        member.start(self._start, self._generations[name])
        self._unplaced_since_s[member] = self._clock.now_s()

    def _read_reports(self) -> None:
        waiting = {member.report: member for member in self.members if member.report is not None}
        if not waiting:
            time.sleep(POLL_S)
            return
        done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_S)
        for reference in done:
            self._read_report(waiting[reference])

    def _read_report(self, member: RayMember) -> None:
        try:
            report: MemberReport = ray.get(member.report)
        except ActorUnavailableError:  # the connection to its node is interrupted
            member.await_report()
            return
        except RayError as fault:
            self._on_end(member, f"lost: {str(fault).strip().partition(chr(10))[0]}", is_lost=True)
            return
        self._unplaced_since_s.pop(member, None)
        member.node = report.node
        for line in report.lines:
            member.last_lines.append(line)
            self._on_line(member.spec.name, line)
        if report.is_ready and not member.is_ready:
            member.is_ready = True
            member.num_times_ready += 1
            logger.info(log.event("instance ready", instance=member.spec.name, node=member.node))
            self._announce()
        if report.exit_code is None:
            member.await_report()
        else:
            self._on_end(member, f"exit code {report.exit_code}", is_lost=report.exit_code == NODE_LOST)

    def _announce(self) -> None:
        if not self._was_ready and all(member.is_ready for member in self.members):
            self._was_ready = True
            self._on_ready(self)

    def _on_end(self, member: RayMember, cause: str, *, is_lost: bool) -> None:
        """Handles the end of a process, of its actor or of its node. A process that ends before it was ever ready has a
        reason of its own, and is not started again. `is_lost`: its actor or node has ended, and it has no reason."""
        self._unplaced_since_s.pop(member, None)
        reason = member.last_lines[-1] if member.last_lines else cause
        node = member.node
        member.drop()
        if member.is_leaving:
            self._forget(member)
            return
        if not member.num_times_ready and not is_lost:
            reason = reason.removeprefix("onward serve: ").removeprefix("onward router: ")
            if not self._was_ready:
                raise StartupError(f"{member.spec.name} cannot start: {reason}")
            logger.error(log.event("new instance cannot start", instance=member.spec.name, why=reason))
            self._forget(member)
            self._scaling.on_lost(member, reason)
            return
        now_s = self._clock.now_s()
        delay_s = member.policy.record_death(now_s, member.num_times_ready)
        logger.warning(
            log.event("instance died", instance=member.spec.name, node=node, cause=cause, restart_in_s=delay_s)
        )
        member.restart_at_s = now_s + delay_s

    def _forget(self, member: RayMember) -> None:
        member.drop()
        self._unplaced_since_s.pop(member, None)
        self.members.remove(member)
        logger.info(log.event("instance removed", instance=member.spec.name))

    def _warn_of_unplaced(self, now_s: float) -> None:
        for member, since_s in list(self._unplaced_since_s.items()):
            if now_s - since_s >= PLACED_AFTER_S:
                self._unplaced_since_s[member] = now_s
                needs = self._start.resources.bundle()
                logger.warning(log.event("instance waits for a node", instance=member.spec.name, needs=needs))

    # Changes of the number of instances (`MemberOperations`).

    def members_now(self) -> Sequence[RayMember]:
        return self.members

    def add_member(self, role: str, model: str) -> RayMember:
        member = RayMember(self._plan_member(role, model, [member.spec.name for member in self.members]))
        self._start_member(member)
        self.members.append(member)
        logger.info(log.event("instance added", instance=member.spec.name))
        return member

    def remove_member(self, member: ScalableMember) -> None:
        assert isinstance(member, RayMember), "members of this cluster"
        member.is_leaving, member.restart_at_s = True, None
        if not member.node:  # it waits for a place or a restart
            self._forget(member)
            return
        member.kill_at_s = self._clock.now_s() + self._drain_s + KILL_AFTER_S
        member.send_signal(signal.SIGTERM)

    # Shutdown.

    def _shut_down(self) -> None:
        """Stops the members, role by role. A further signal ends the streams at once."""
        self._scaling.cancel("the cluster is being stopped")
        for roles in STOP_ORDER:
            requests = self._stop_requests
            members = [member for member in self.members if member.spec.role in roles]
            self._stop(members, self._drain_s)
            if self._stop_requests > requests:
                self._stop(members, 0.0)
                return

    def _stop(self, members: list[RayMember], grace_s: float) -> None:
        """Asks these members to stop and waits until they have ended, time is over or a further signal comes."""
        requests, deadline_s = self._stop_requests, self._clock.now_s() + grace_s + KILL_AFTER_S
        for member in members:
            member.restart_at_s = None
            if member.node and not (member.is_leaving and grace_s > 0):
                member.send_signal(signal.SIGTERM)
            member.is_leaving = True
        members = [member for member in members if member.node]
        while self._stop_requests == requests and self._clock.now_s() < deadline_s:
            if not any(member in self.members for member in members):
                return
            self._read_reports()
