"""Replaces the instances of a cluster on this machine, one after the other, each by a process that adopts its port
and its cache.

A new process that fails leaves its old one running, and ends the upgrade. The router stays as it is.
"""

import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from onward import log
from onward.proto.cluster_control import FromCluster, MemberUpgraded, UpgradeEnded
from onward.supervisor.adoption_socket import AdoptionPeer
from onward.supervisor.cluster_member import ClusterMember
from onward.transport.control_channel import ChannelClosed

START_TIMEOUT_S = 900.0
"""How long a new process may take to take over. It may have to compile kernels first. Also how long an instance may take
to get ready again before it is replaced, and after that."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RollingUpgrade:
    requester: AdoptionPeer
    members: list[ClusterMember]
    """The members of the cluster. A new process takes its old one's place in this list."""
    start: Callable[[ClusterMember], None]
    drop: Callable[[ClusterMember], None]
    _old: ClusterMember | None = None
    _new: ClusterMember | None = None
    _ends_at_s: float = 0.0
    _done: set[str] = field(default_factory=set)

    def advance(self, now_s: float) -> bool:
        """Starts the next new process when it is due. Returns True when the upgrade has ended."""
        if self._new is None:
            return self._begin_next(now_s)
        if self._new in self.members:
            return self._await_ready(self._new, now_s)
        process = self._new.process
        assert process is not None, "it was started"
        if process.poll() is None and now_s < self._ends_at_s:
            return False
        self.drop(self._new)
        last_line = self._new.last_lines[-1] if self._new.last_lines else "it said nothing"
        self._end_with(f"the new process ended before it took over: {last_line}")
        return True

    def replace(self, old: ClusterMember) -> bool:
        """Handles the end of an old process. Returns True if its new one has taken its place, so that it is not
        restarted."""
        if old is not self._old or self._new is None:
            return False
        self._new.spec, self._new.num_times_ready = old.spec, old.num_times_ready + self._new.num_times_ready
        self._new.policy, self._new.reload_pending = old.policy, old.reload_pending or self._new.reload_pending
        self.members[self.members.index(old)] = self._new
        return True

    @property
    def starting(self) -> list[ClusterMember]:
        """The new process, until it has its old one's place."""
        return [] if self._new is None or self._new in self.members else [self._new]

    def cancel(self, error: str) -> None:
        """Ends the upgrade. A new process that serves already becomes a member, and the old one, which has handed over, is
        dropped."""
        for new in self.starting:
            assert self._old is not None, "a new process has an old one"
            has_taken_over = new.is_ready and self.replace(self._old)
            self.drop(self._old if has_taken_over else new)
        self._end_with(error)

    def _begin_next(self, now_s: float) -> bool:
        waiting = [m for m in self.members if m.spec.role != "router" and m.spec.name not in self._done]
        if not waiting:
            self._send(UpgradeEnded())
            self.requester.close()
            return True
        old = waiting[0]
        if self._old is not old:
            self._old, self._ends_at_s = old, now_s + START_TIMEOUT_S
        if not old.is_ready:  # it is being started again, with the new version
            return self._has_waited_too_long(now_s)
        spec = replace(old.spec, command=(*old.spec.command, "--adopt"))
        new = ClusterMember(spec)
        logger.info(log.event("upgrading", instance=spec.name, python=sys.executable))
        try:
            self.start(new)
        except OSError as fault:
            self._end_with(f"the new process cannot be started: {fault}")
            return True
        self._new, self._ends_at_s = new, now_s + START_TIMEOUT_S
        return False

    def _await_ready(self, new: ClusterMember, now_s: float) -> bool:
        """Waits for a new process that has taken its place. It may have died and been restarted meanwhile."""
        if not new.is_ready:
            return self._has_waited_too_long(now_s)
        self._done.add(new.spec.name)
        self._send(MemberUpgraded(new.spec.name))
        self._old = self._new = None
        return False

    def _has_waited_too_long(self, now_s: float) -> bool:
        if now_s < self._ends_at_s:
            return False
        self._end_with(f"the instance has not been ready for {START_TIMEOUT_S:g} s")
        return True

    def _end_with(self, error: str) -> None:
        name = self._old.spec.name if self._old is not None else ""
        logger.error(log.event("upgrade stopped", instance=name, why=error))
        self._send(MemberUpgraded(name, error))
        self._send(UpgradeEnded(f"{name}: {error}"))
        self.requester.close()
        self._old = self._new = None

    def _send(self, message: FromCluster) -> None:
        with contextlib.suppress(ChannelClosed):  # the command was interrupted; the upgrade goes on
            self.requester.channel.send(message)
