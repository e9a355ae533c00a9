"""Scaling of a cluster: takes requests of `onward scale`, asks the scaling policy, and carries out one change at a time."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from onward import log
from onward.errors import StartupError
from onward.proto.cluster_control import ScaleInstances
from onward.supervisor.cluster_control import ChangeRequest, refuse_change
from onward.supervisor.scale_change import (
    MemberOperations,
    ScalableMember,
    ScaleChange,
    Targets,
    count_members,
    targets_of,
)
from onward.supervisor.scaling_policy import LoadFigures, ScalingPolicy

READ_LOAD_EVERY_S = 1.0
PAUSE_AFTER_ERROR_S = 60.0
"""How long nothing is scaled by load after a change by load has failed."""

logger = logging.getLogger(__name__)

ReadLoad: TypeAlias = Callable[[], Mapping[str, LoadFigures]]
"""Returns the load of each model whose load is known."""


@dataclass(slots=True)
class LoadScaling:
    role: str
    """The role of the instances that are added and removed."""
    policies: Mapping[str, ScalingPolicy]
    """By model."""
    read_load: ReadLoad


@dataclass(slots=True)
class ClusterScaling:
    cluster: MemberOperations
    models: Sequence[str]
    check_counts: Callable[[Mapping[str, int]], None]
    """Raises `StartupError` for numbers of instances by role that a cluster cannot have."""
    by_load: LoadScaling | None = None
    _change: ScaleChange | None = None
    _next_read_s: float = field(default=0.0)

    @property
    def is_changing(self) -> bool:
        return self._change is not None

    def begin(self, request: ChangeRequest, change: ScaleInstances) -> None:
        """Begins a change that a command requests, or refuses it."""
        if self._change is not None:
            refuse_change(request, "the number of instances is being changed already; wait until that has ended")
            return
        try:
            targets = self._targets_of(change)
        except StartupError as fault:
            refuse_change(request, fault.message)
            return
        logger.info(log.event("scaling", model=change.model or "all", **change.counts))
        self._change = ScaleChange(targets, self.cluster, request.requester)

    def advance(self, now_s: float) -> None:
        """Carries out the change in progress. Without one it asks the scaling policy from time to time."""
        if self._change is None:
            self._scale_by_load(now_s)
        change = self._change
        if change is not None and change.advance(now_s):
            self._change = None
            is_by_load_and_failed = change.error and self.by_load is not None
            self._next_read_s = now_s + (PAUSE_AFTER_ERROR_S if is_by_load_and_failed else READ_LOAD_EVERY_S)

    def on_lost(self, member: ScalableMember, reason: str) -> None:
        """Handles the end of a new instance that was never ready."""
        if self._change is not None:
            self._change.on_lost(member, reason)

    def cancel(self, error: str) -> None:
        if self._change is not None:
            self._change.end(error)
            self._change = None

    def _targets_of(self, change: ScaleInstances) -> Targets:
        by_load = self.by_load
        if by_load is not None and by_load.role in change.counts:
            limits = next(iter(by_load.policies.values())).limits
            raise StartupError(
                f"{by_load.role} instances are scaled by load, between --min {limits.minimum} and --max {limits.maximum}"
            )
        return targets_of(change, self.models, self.check_counts, count_members(self.cluster.members_now()))

    def _scale_by_load(self, now_s: float) -> None:
        if self.by_load is None or now_s < self._next_read_s:
            return
        self._next_read_s = now_s + READ_LOAD_EVERY_S
        load, targets = self.by_load.read_load(), count_members(self.cluster.members_now())
        wanted = dict(targets)
        for model, policy in self.by_load.policies.items():
            group = self.by_load.role, model
            wanted[group] = policy.target(targets[group], load.get(model), now_s)
            if wanted[group] != targets[group]:
                usage = load[model].usage if model in load else "unknown"
                logger.info(
                    log.event("scaling by load", model=model, usage=usage, before=targets[group], wanted=wanted[group])
                )
        if wanted != dict(targets):
            self._change = ScaleChange(wanted, self.cluster)
