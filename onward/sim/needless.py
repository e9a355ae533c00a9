"""Where nothing went wrong, nothing may have been repaired.

Clients see no bug that a retry hides. But a request that was started again, a token that came twice or a hand-over that
ran into its timeout is counted; and in a run in which clients did what they liked and no process, wire or transfer
suffered, each such count is a bug.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from onward.proto.stats import Family

if TYPE_CHECKING:
    from onward.sim.world import World

HARMLESS = frozenset({"abort", "leave", "disconnect", "deadline", "doom", "pry", "detach", "cancel"})
"""Kinds of faults that are one request's own business."""
REPAIRS: dict[str, frozenset[str] | None] = {
    "onward_resubmissions_total": None,
    "onward_isolated_faults_total": None,
    "onward_worker_losses_total": None,
    "onward_stale_events_total": frozenset({"duplicate", "epoch", "incarnation", "position"}),
    "onward_pd_handovers_total": frozenset({"pd_lease_expired"}),
    "onward_router_attempts_total": frozenset({"refused", "lost", "stall", "restart", "gone", "protocol"}),
    "onward_router_resumes_total": frozenset({"lost", "stall", "restart", "gone", "protocol"}),
}
"""Counters that stay at nothing in such a run: all of their series, or those with one of these labels."""
UNPROVOKED = frozenset({"pd_transfer_failed"})
"""Labels that count as well where nobody has left or aborted: a lease that is taken back breaks its transfer off."""


FOLLOWED = frozenset({"epoch"})
"""Labels that do not count where a response was cut off: who follows it takes it up before that was noticed, and the last
word of the earlier attempt comes late."""


def needless_repair(world: "World") -> str | None:
    """What was repaired although nothing was broken, if something was."""
    if not world.weather.fired.keys() <= HARMLESS:
        return None
    provoked = bool(world.weather.fired)
    follows = any(ask.path == "/v1/responses" and ask.drop_at_s for ask in world.scenario.asks)
    for process, family in _families(world):
        if family.name not in REPAIRS:
            continue
        which = REPAIRS[family.name]
        for series in family.series:
            labels = set(series.labels.values()) - (FOLLOWED if follows else frozenset())
            is_one = which is None or which.intersection(labels) or (not provoked and UNPROVOKED.intersection(labels))
            if series.value and is_one:
                return f"{process} counts {family.name}{series.labels or ''} where nothing was wrong"
    return None


def _families(world: "World") -> Iterator[tuple[str, Family]]:
    for name, router in world.routers.items():
        yield from ((name, family) for family in router.router.registry.snapshot())
    for instance in world.instances.values():
        engine = instance.life.engine
        if engine is not None and engine.core is not None:
            yield from ((engine.process.name, family) for family in engine.core.registry.snapshot())
        for api in instance.life.apis.values():
            yield from ((api.process.name, family) for family in api.api._link._snapshot())
