"""A member of a cluster on Ray: what it runs, where it is placed, and its state."""

import contextlib
import math
import signal
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from onward.ray.member_actor import MemberActor
from onward.supervisor.cluster_member import NUM_LAST_LINES, MemberSpec
from onward.supervisor.restart_policy import RestartPolicy

REPORT_EVERY_S = 0.5
NODE_SHARE = 0.001
"""How much of a node's own resource, of which it has 1, an instance reserves that must be placed there."""


@dataclass(frozen=True, slots=True)
class MemberResources:
    """What Ray reserves for one instance. Its ranks share memory, so they are on one node."""

    num_cpus: float
    num_gpus: float = 0.0
    address: str = ""
    """The address of the nodes on which the instance is placed; empty: any."""

    def bundle(self) -> dict[str, float]:
        bundle = {"CPU": self.num_cpus}
        if self.num_gpus:
            bundle["GPU"] = self.num_gpus
        if self.address:
            bundle[f"node:{self.address}"] = NODE_SHARE  # every node of Ray has a resource with its address as its name
        return bundle


@dataclass(frozen=True, slots=True)
class MemberStart:
    """What every actor of a cluster gets."""

    cluster_key: str
    ready_prefix: str
    host: str
    """Address on which instances listen; empty: that of their node."""
    resources: MemberResources
    driver_node_id: str
    """The node of this process, on which the router runs, so that its address stays."""


@dataclass(slots=True, eq=False)
class RayMember:
    spec: MemberSpec
    is_ready: bool = False
    is_leaving: bool = False
    num_times_ready: int = 0
    reload_pending: bool = False
    """A SIGHUP has to be passed on as soon as the member is ready; before that it cannot handle one."""
    restart_at_s: float | None = None
    kill_at_s: float = math.inf
    node: str = ""
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_LAST_LINES))
    report: Any = None
    """The next report. None: it does not run."""
    _actor: Any = None
    _placement: PlacementGroup | None = None

    def start(self, given: MemberStart, generation: int) -> None:
        assert self._actor is None, "a member has one actor at a time"
        self.restart_at_s, self.is_ready, self.node = None, False, ""
        self.last_lines.clear()
        spec = spec_of_start(self.spec, generation)
        if spec.role == "router":
            resources = {"num_cpus": 0}
            strategy: Any = NodeAffinitySchedulingStrategy(given.driver_node_id, soft=False)
        else:
            self._placement = placement_group([given.resources.bundle()], strategy="STRICT_PACK")
            resources = {"num_cpus": given.resources.num_cpus, "num_gpus": given.resources.num_gpus}
            strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=0)
        actor_class: Any = ray.remote(MemberActor)
        # The cluster starts it again itself, with the next generation.
        options = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": strategy, **resources}
        self._actor = actor_class.options(**options).remote(spec, given.cluster_key, given.ready_prefix, given.host)
        self.await_report()

    def await_report(self) -> None:
        self.report = self._actor.next_report.remote(REPORT_EVERY_S)

    def send_signal(self, number: signal.Signals) -> None:
        if self._actor is not None:
            self._actor.send_signal.remote(int(number))

    def drop(self) -> None:
        """Ends its actor, and the process with it, and releases its place. Both may be gone already."""
        actor, placement = self._actor, self._placement
        self._actor = self._placement = self.report = None
        self.is_ready, self.node = False, ""
        if actor is not None:
            with contextlib.suppress(RayActorError, RayError, ValueError):
                ray.kill(actor)
        if placement is not None:
            remove_placement_group(placement)


def spec_of_start(spec: MemberSpec, generation: int) -> MemberSpec:
    """Returns the member as it is started this time."""
    if spec.role == "router":
        return spec
    command = (*spec.command, "--instance-generation", str(generation))
    return MemberSpec(spec.name, spec.role, command, spec.url, None, spec.threads, spec.environment, model=spec.model)
