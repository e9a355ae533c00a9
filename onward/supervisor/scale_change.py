"""One change of the number of instances of a cluster: adds instances, waits until they are ready, then removes others.

It knows a cluster's members by name, role and model only, and neither how they are started nor where they run.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeAlias

from onward import log
from onward.errors import StartupError
from onward.proto.cluster_control import FromCluster, InstanceAdded, InstanceRemoved, ScaleEnded, ScaleInstances
from onward.supervisor.adoption_socket import AdoptionPeer
from onward.supervisor.cluster_member import MemberSpec
from onward.transport.control_channel import ChannelClosed

START_TIMEOUT_S = 900.0
"""How long new instances may take to get ready. They may have to compile kernels first."""
ROLES = ("prefill", "decode", "mixed")
TAKES_REQUESTS = ("decode", "mixed")
REMOVAL_ORDER = (TAKES_REQUESTS, ("prefill",))
"""Prefill instances are removed last, because streams of decode instances may wait for them."""

logger = logging.getLogger(__name__)

Group: TypeAlias = tuple[str, str]
"""Role and model of instances."""
Targets: TypeAlias = Mapping[Group, int]


class ScalableMember(Protocol):
    @property
    def spec(self) -> MemberSpec: ...

    is_ready: bool
    is_leaving: bool


class MemberOperations(Protocol):
    """What a cluster does for a change."""

    def members_now(self) -> Sequence[ScalableMember]: ...

    def add_member(self, role: str, model: str) -> ScalableMember:
        """Raises `StartupError` if it cannot be started."""
        ...

    def remove_member(self, member: ScalableMember) -> None:
        """Begins to drain and stop it. It is a member until it has ended."""
        ...


def count_members(members: Sequence[ScalableMember]) -> Counter[Group]:
    """Returns the number of instances of each role and model, without those that are leaving."""
    return Counter((m.spec.role, m.spec.model) for m in members if m.spec.role != "router" and not m.is_leaving)


def targets_of(
    request: ScaleInstances, models: Sequence[str], check_counts: Callable[[Mapping[str, int]], None], current: Targets
) -> dict[Group, int]:
    """Returns how many instances of each role and model a request asks for. Raises `StartupError` if a cluster cannot have
    these numbers."""
    if unknown := [role for role in request.counts if role not in ROLES]:
        raise StartupError(f"there are no {unknown[0]!r} instances; a role is one of {', '.join(ROLES)}")
    if request.model and request.model not in models:
        raise StartupError(f"--model {request.model!r} is not served here; there is {', '.join(map(repr, models))}")
    targets = dict(current)
    for model in [request.model] if request.model else models:
        targets.update({(role, model): number for role, number in request.counts.items()})
        check_counts({role: targets.get((role, model), 0) for role in ROLES})
    check_counts({role: sum(n for (of_role, _), n in targets.items() if of_role == role) for role in ROLES})
    return targets


class _Phase(Enum):
    ADD = "add"
    AWAIT_READY = "await ready"
    REMOVE = "remove"


@dataclass(slots=True)
class ScaleChange:
    targets: Targets
    cluster: MemberOperations
    requester: AdoptionPeer | None = None
    """The command that asked for it. None: it was decided by load."""
    error: str = ""
    """Why it was not carried out completely."""
    _phase: _Phase = _Phase.ADD
    _added: list[ScalableMember] = field(default_factory=list)
    _leaving: list[ScalableMember] = field(default_factory=list)
    _ends_at_s: float = 0.0

    def advance(self, now_s: float) -> bool:
        """Takes the next step when it is due. Returns True when the change has ended."""
        if self._phase is _Phase.ADD:
            self._add(now_s)
        if self._phase is _Phase.AWAIT_READY:
            self._await_ready(now_s)
        if self._phase is not _Phase.REMOVE:
            return False
        if self._remove_next():
            return False
        self.end(self.error)
        return True

    def end(self, error: str) -> None:
        self.error = error
        if error:
            logger.error(log.event("scaling stopped", why=error))
        self._send(ScaleEnded(error))
        if self.requester is not None:
            self.requester.close()
            self.requester = None

    def on_lost(self, member: ScalableMember, reason: str) -> None:
        """Handles the end of a new instance that was never ready, and that the cluster has given up."""
        if member in self._added:
            self._added.remove(member)
            self.error = self.error or f"{member.spec.name} cannot start: {reason}"

    def _add(self, now_s: float) -> None:
        missing = Counter(dict(self.targets))
        missing.subtract(count_members(self.cluster.members_now()))
        try:
            for role in ROLES:  # prefill instances first, so that the others find them
                for (of_role, model), number in missing.items():
                    for _ in range(number if of_role == role else 0):
                        self._added.append(self.cluster.add_member(role, model))
        except StartupError as fault:
            self.error = fault.message
        self._phase, self._ends_at_s = _Phase.AWAIT_READY, now_s + START_TIMEOUT_S

    def _await_ready(self, now_s: float) -> None:
        for member in [m for m in self._added if m.is_ready]:
            self._added.remove(member)
            self._send(InstanceAdded(member.spec.name))
        model_at_risk = None if self.error else self._model_at_risk()
        if (self._added or model_at_risk is not None) and now_s < self._ends_at_s:
            return
        for member in self._added:
            self.error = self.error or f"{member.spec.name} has not been ready for {START_TIMEOUT_S:g} s"
            self.cluster.remove_member(member)
        if model_at_risk is not None:
            of_model = f" of {model_at_risk}" if model_at_risk else ""
            self.error = self.error or f"no instance{of_model} that stays has been ready for {START_TIMEOUT_S:g} s"
        self._added.clear()
        self._phase = _Phase.REMOVE

    def _model_at_risk(self) -> str | None:
        """Returns a model whose last ready instance would be removed, if there is one."""
        members = self.cluster.members_now()
        ready = count_members([member for member in members if member.is_ready])
        for model in sorted({model for _, model in ready}):
            takers = [(role, model) for role in TAKES_REQUESTS]
            num_kept = sum(min(ready[group], self.targets.get(group, 0)) for group in takers)
            if not num_kept and any(ready[group] for group in takers):
                return model
        return None

    def _remove_next(self) -> bool:
        """Removes surplus instances, some roles after the others. Returns whether there is anything left to wait for. After
        an error nothing is removed: the cluster may have fewer instances than were asked for."""
        members = self.cluster.members_now()
        for member in [m for m in self._leaving if m not in members]:
            self._leaving.remove(member)
            self._send(InstanceRemoved(member.spec.name))
        if self._leaving or self.error:
            return bool(self._leaving)
        surplus = count_members(members)
        surplus.subtract(dict(self.targets))
        for roles in REMOVAL_ORDER:
            for (role, model), number in surplus.items():
                if role in roles and number > 0:
                    self._leaving += _in_order_of_removal(members, role, model)[:number]
            if self._leaving:
                break
        for member in self._leaving:
            self.cluster.remove_member(member)
        return bool(self._leaving)

    def _send(self, message: FromCluster) -> None:
        if self.requester is not None:
            with contextlib.suppress(ChannelClosed):  # the command was interrupted; the change goes on
                self.requester.channel.send(message)


def _in_order_of_removal(members: Sequence[ScalableMember], role: str, model: str) -> list[ScalableMember]:
    """Returns the instances of a group that can be removed: first those that are not ready, which have no streams, then
    those with the highest numbers."""
    group = [m for m in members if (m.spec.role, m.spec.model) == (role, model) and not m.is_leaving]
    return sorted(group, key=lambda member: (member.is_ready, -member_number(member.spec.name)))


def member_number(name: str) -> int:
    """Returns the number at the end of the name of a member."""
    return int(name.rpartition("-")[2])
