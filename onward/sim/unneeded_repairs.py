"""Where nothing went wrong, nothing may have been repaired.

Clients see no bug that a retry hides. But a request that was started again, a token that came twice or a handoff that
ran into its timeout is counted; and in a run in which clients did what they liked and no process, wire or transfer
suffered, each such count is a bug.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from onward.proto.stats import MetricFamily

if TYPE_CHECKING:
    from onward.sim.simulation import Simulation

CLIENT_ONLY_FAULTS = frozenset({"abort", "leave", "disconnect", "deadline", "doom", "pry", "detach", "cancel"})
"""Kinds of faults that are one request's own business."""
REPAIR_COUNTERS: dict[str, frozenset[str] | None] = {
    "onward_resubmissions_total": None,
    "onward_isolated_faults_total": None,
    "onward_worker_losses_total": None,
    "onward_stale_events_total": frozenset({"duplicate", "epoch", "incarnation", "position"}),
    "onward_pd_handovers_total": frozenset({"pd_lease_expired"}),
    "onward_router_attempts_total": frozenset({"refused", "lost", "stall", "restart", "gone", "protocol"}),
    "onward_router_resumes_total": frozenset({"lost", "stall", "restart", "gone", "protocol"}),
}
"""Counters that stay at nothing in such a run: all of their series, or those with one of these labels."""
COUNTED_WITHOUT_ABORTS = frozenset({"pd_transfer_failed"})
"""Labels that count as well where nobody has left or aborted: a lease that is taken back breaks its transfer off."""


IGNORED_AFTER_DROPPED_RESPONSE = frozenset({"epoch"})
"""Labels that do not count where a response was cut off: who follows it takes it up before that was noticed, and the last
word of the earlier attempt comes late."""


def find_unneeded_repair(simulation: "Simulation") -> str | None:
    """What was repaired although nothing was broken, if something was."""
    if not simulation.active_faults.trigger_counts.keys() <= CLIENT_ONLY_FAULTS:
        return None
    provoked = bool(simulation.active_faults.trigger_counts)
    follows = any(
        request.path == "/v1/responses" and request.disconnect_at_s for request in simulation.scenario.requests
    )
    for process, family in _families(simulation):
        if family.name not in REPAIR_COUNTERS:
            continue
        which = REPAIR_COUNTERS[family.name]
        for series in family.series:
            labels = set(series.labels.values()) - (IGNORED_AFTER_DROPPED_RESPONSE if follows else frozenset())
            is_one = (
                which is None
                or which.intersection(labels)
                or (not provoked and COUNTED_WITHOUT_ABORTS.intersection(labels))
            )
            if series.value and is_one:
                return f"{process} counts {family.name}{series.labels or ''} where nothing was wrong"
    return None


def _families(simulation: "Simulation") -> Iterator[tuple[str, MetricFamily]]:
    for name, router in simulation.routers.items():
        yield from ((name, family) for family in router.router.registry.snapshot())
    for instance in simulation.instances.values():
        engine = instance.lifetime.engine
        if engine is not None and engine.core is not None:
            yield from ((engine.process.name, family) for family in engine.core.registry.snapshot())
        for api in instance.lifetime.apis.values():
            yield from ((api.process.name, family) for family in api.api._supervisor._snapshot())
