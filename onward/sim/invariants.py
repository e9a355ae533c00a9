"""Checks invariants from outside while a simulation runs. `docs/simulation.md` has the list.

The clients check 1 to 3, with a `ReplyChecker`. This module checks the others:

    4     nothing is held at idle
    5     each block is written only by its owner or lease holder
    6     progress
    7     the first in line never loses its blocks
    9     no starvation
    10    no preemption in vain
"""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from onward.api.engine_link.request_tracker import ISOLATED_CRASHES_TO_FAIL
from onward.engine.core import EngineCore
from onward.engine.request import Request
from onward.engine.scheduling.scheduling_policy import MAX_CRASH_CHARGES, queue_key
from onward.proto.stats import MetricFamily
from onward.proto.step import StepPlan
from onward.router.core import RouterCore
from onward.sim import engine_audit
from onward.sim.engine_audit import find_useless_preemption
from onward.sim.instance import SimInstance
from onward.sim.loop import START_S
from onward.stream_store.core import StreamStoreCore
from onward.supervisor.restart_policy import MAX_DEATHS

if TYPE_CHECKING:
    from onward.sim.simulation import Simulation

CLIENT_ONLY_FAULTS = frozenset({"abort", "leave", "disconnect", "deadline", "doom", "pry", "detach", "cancel"})
"""Kinds of faults that affect only their own request."""
REPAIR_COUNTERS: dict[str, frozenset[str] | None] = {
    "onward_resubmissions_total": None,
    "onward_isolated_faults_total": None,
    "onward_worker_losses_total": None,
    "onward_stale_events_total": frozenset({"duplicate", "epoch", "incarnation", "position"}),
    "onward_pd_handoffs_total": frozenset({"pd_lease_expired"}),
    "onward_router_attempts_total": frozenset({"refused", "lost", "stall", "restart", "gone", "protocol"}),
    "onward_router_resumes_total": frozenset({"lost", "stall", "restart", "gone", "protocol"}),
}
"""Counters that stay at zero in a run with only client faults: all of their series (None), or those with one of these
labels."""
COUNTED_WITHOUT_ABORTS = frozenset({"pd_transfer_failed"})
"""Labels that must stay at zero too in a run without any fault. A client fault may revoke a lease, which breaks off its
transfer."""

IGNORED_AFTER_DROPPED_RESPONSE = frozenset({"epoch"})
"""Labels that do not count if a client's connection to a response was dropped. The client may resume the response
before the server notices the drop, and the last message of the earlier attempt comes late."""
LONGEST_TTL_S = 61.0
"""Longer than the TTL of any record."""
RECORD_SAFE_FAULTS = frozenset(
    {
        "kill-worker",
        "crash-worker",
        "kill-standby",
        "kill-engine",
        "stop-worker",
        "stop-engine",
        "poison",
        "poison-engine",
        "slow-kv",
        "break-kv",
        "late-kv",
    }
)
"""Kinds of faults by which no record of a response is lost."""
DEADLY_KINDS = ("kill-", "crash-", "stop-", "poison")
AUDIT_ONE_RUN_IN = 16
"""One in this number of runs audits its engines after every turn."""

OVERTAKING_S = 1.0
"""A request has overtaken another if its client sent it at least this long after the other one arrived at the engine."""
MAX_OVERTAKEN = 4
"""How many requests of the same priority may overtake a request while it waits in one engine."""

ORPHAN_S = 10.0
"""How long an engine may hold a request whose api process is gone: faults may delay the announcement."""


class InvariantMonitor:
    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._sent_s = {request.name: START_S + request.at_s for request in simulation.scenario.requests}
        """Earliest time at which a client sends each request, by label."""
        self._came_s: dict[tuple[str, int], float] = {}
        """When each request was first seen in an engine, in global virtual time, by engine and arrival number. A
        request that is aborted and sent again has another arrival number."""
        self._overtaken: Counter[tuple[str, int]] = Counter()
        self._orphaned_s: dict[tuple[str, str], float] = {}
        """When a request was first seen in an engine without its api process, by engine and api process."""

    def may_crash(self) -> bool:
        """Returns whether so many workers have died that one request may have been charged with too many crashes."""
        trigger_counts = self._simulation.active_faults.trigger_counts
        causes = ("kill-worker", "crash-worker", "kill-engine", "stop-worker", "stop-instance", "poison")
        deaths = sum(trigger_counts[kind] for kind in causes)
        return deaths >= MAX_CRASH_CHARGES

    def may_crash_engine(self) -> bool:
        """Returns whether other faults have killed so many engines that they may have failed an isolated request which
        was not the cause."""
        trigger_counts = self._simulation.active_faults.trigger_counts
        return (
            sum(trigger_counts[kind] for kind in ("kill-engine", "stop-engine", "stop-instance"))
            >= ISOLATED_CRASHES_TO_FAIL
        )

    def may_pause(self) -> bool:
        """Returns whether a supervisor may have seen so many deaths in a row that it waits for a minute before the next
        start."""
        trigger_counts = self._simulation.active_faults.trigger_counts
        deaths = sum(count for kind, count in trigger_counts.items() if kind.startswith(DEADLY_KINDS))
        return self.may_crash() or deaths + self._simulation.active_faults.num_killed_for_silence >= MAX_DEATHS

    def is_out_of_reach(self) -> bool:
        """Returns whether the records of some instance cannot all be queried at the moment."""
        return any(
            not _answers(instance)
            for instance in self._simulation.instances.values()
            if instance.spec.role != "prefill"
        )

    def may_lose_records(self, *, is_background: bool) -> bool:
        """Returns whether the record of a response may be lost. A router does not reach an instance whose api process
        is dead."""
        trigger_counts = self._simulation.active_faults.trigger_counts
        survivable = {"kill-api"} if is_background and not self._simulation.routers else set[str]()
        return self.may_pause() or not trigger_counts.keys() <= CLIENT_ONLY_FAULTS | RECORD_SAFE_FAULTS | survivable

    def may_lose_tokens(self) -> bool:
        """Returns whether a response may have fewer tokens than its client has received, until they are generated
        again."""
        return not self._simulation.active_faults.trigger_counts.keys() <= CLIENT_ONLY_FAULTS | RECORD_SAFE_FAULTS

    def is_undisturbed(self) -> bool:
        """Returns whether only faults of clients have taken effect."""
        return self._simulation.active_faults.trigger_counts.keys() <= CLIENT_ONLY_FAULTS

    def is_computed(self, request_id: str) -> bool:
        """Returns whether an engine works on the request."""
        cores = [instance.engine_core for instance in self._simulation.instances.values()]
        return any(name.startswith(request_id) for core in cores if core is not None for name in core._live)

    def num_resumes(self) -> int:
        return sum(
            int(series.value)
            for router in self._simulation.routers.values()
            for family in router.router.registry.snapshot()
            if family.name == "onward_router_resumes_total"
            for series in family.series
        )

    # Invariant 5.

    def on_write(self, instance: SimInstance, block: int, request_id: str, epoch: int) -> None:
        core = instance.engine_core
        if core is None or core.worker is None:
            return
        problem = find_write_violation(core, block, epoch)
        if problem is not None:
            self._simulation.fail(
                5, f"{instance.spec.name}: {request_id} (epoch {epoch}) writes block {block}: {problem}"
            )

    # Invariants 7 and 10.

    def on_plan(self, instance: SimInstance, plan: StepPlan) -> None:
        core = instance.engine_core
        if core is None or not core._live:
            return
        self._check_order(instance, core, plan)
        if not plan.preempt:
            return
        alone = "" if plan.run else ", and runs nothing"
        self._simulation.trace.note(f"{instance.spec.name} preempts {len(plan.preempt)} in step {plan.step}{alone}")
        first_request = min(core._live.values(), key=queue_key)
        if first_request.slot_epoch in {preempt.slot_epoch for preempt in plan.preempt}:
            self._simulation.fail(
                7, f"{instance.spec.name}: {first_request.request_id} is first in line, and is preempted"
            )
        if (victim := find_useless_preemption(core, plan)) is not None:
            description = f"{victim.request_id} is preempted, and no request before it has enough blocks by that"
            self._simulation.fail(10, f"{instance.spec.name}: {description}")

    # Invariant 9.

    def _check_order(self, instance: SimInstance, core: EngineCore, plan: StepPlan) -> None:
        """Counts how often each waiting request was overtaken by a request that this plan admits, and fails the run if
        that is too often."""
        for assign in plan.assign:
            admitted = core.scheduler.request_of_slot_epoch(assign.slot_epoch)
            if admitted is None or admitted.handoff is not None:
                continue
            for waiting in core.scheduler.waiting:
                if waiting.handoff is not None or not self._overtakes(core, admitted, waiting):
                    continue
                key = (core.incarnation, waiting.arrival_number)
                self._overtaken[key] += 1
                if self._overtaken[key] > MAX_OVERTAKEN:
                    description = f"{waiting.request_id} waits, and {self._overtaken[key]} that came later"
                    self._simulation.fail(9, f"{instance.spec.name}: {description} were admitted before it")

    def _overtakes(self, core: EngineCore, admitted: Request, waiting: Request) -> bool:
        """Returns whether an admitted request has overtaken a waiting one of its priority. The time at which its client
        sent it counts, because a request that has waited elsewhere may come before one that arrived here earlier."""
        sent_s = self._sent_s.get(admitted.spec.client_request_id.partition(".")[0])
        came_s = self._came_s.get((core.incarnation, waiting.arrival_number))
        if sent_s is None or came_s is None or admitted.priority != waiting.priority:
            return False
        return sent_s > came_s + OVERTAKING_S

    # Invariant 4.

    def _check_api_process(self, instance: SimInstance, core: EngineCore, request: Request) -> None:
        """Fails the run if a request stays in the engine long after its api process has died, because no client waits
        for it."""
        if not request.api_id or request.api_id in instance.lifetime.nodes:
            return
        now_s = self._simulation.loop.now_s
        since_s = self._orphaned_s.setdefault((core.incarnation, request.api_id), now_s)
        if now_s - since_s > ORPHAN_S:
            self._simulation.fail(4, f"{instance.spec.name}: {request.request_id} outlives its api process")

    # The engine's state.

    def after_turn(self, instance: SimInstance) -> None:
        """Checks an engine between two events. A full audit takes longer than the turn, so only some runs do it."""
        core = instance.engine_core
        if core is None:
            return
        for request in core._live.values():
            self._came_s.setdefault((core.incarnation, request.arrival_number), self._simulation.loop.now_s)
            self._check_api_process(instance, core, request)
        if self._simulation.scenario.seed % AUDIT_ONE_RUN_IN:
            return
        try:
            engine_audit.audit_engine(core)
        except AssertionError as fault:
            self._simulation.fail(0, f"{instance.spec.name}: {fault}")

    # Invariant 4.

    def is_settled(self) -> bool:
        return self._unsettled() is None

    def audit(self) -> None:
        description = self._unsettled()
        if description is not None:
            self._simulation.fail(4, description)
            return
        for instance in self._simulation.instances.values():
            self._audit(instance)
        for name, router in self._simulation.routers.items():
            if num_records := unexpired_router_records(router.router.stream_runner.core, router.process.now_s()):
                self._simulation.fail(4, f"router {name} still has {num_records} records")
        if (repair := find_unneeded_repair(self._simulation)) is not None:
            self._simulation.fail(6, repair)

    def _unsettled(self) -> str | None:
        """Returns a description of a process that still holds something, or None."""
        for name, router in self._simulation.routers.items():
            if router.router.stream_runner.core.live_streams():
                return f"router {name} still has streams"
            if num_reserved := sum(
                one.num_reserved
                for one in router.router.stream_runner.core.instances.list_instances(router.process.now_s())
            ):
                return f"router {name} still has {num_reserved} places booked"
        for instance in self._simulation.instances.values():
            problem = _find_unsettled(instance)
            if problem is not None:
                return f"{instance.spec.name}: {problem}"
        return "a connection is still open" if self._simulation.http.num_serving else None

    def _audit(self, instance: SimInstance) -> None:
        core, stream_store = instance.engine_core, instance.lifetime.stream_store
        assert core is not None and stream_store is not None, "it is settled"
        try:
            core.audit_idle()
        except AssertionError as leak:
            self._simulation.fail(4, f"{instance.spec.name}: {leak}")
        if num_records := unexpired_records(stream_store.core, stream_store.process.now_s()):
            self._simulation.fail(4, f"{instance.spec.name}: the stream store still has {num_records}")


def _answers(instance: SimInstance) -> bool:
    """Returns whether the stream store and all api processes of the instance run, so that all its records can be
    queried."""
    running = [process for role in ("api", "shelf") for process in instance.processes(role) if not process.is_stopped]
    return len(running) == instance.spec.num_api_processes + 1


def unexpired_records(core: StreamStoreCore, now_s: float) -> dict[str, int]:
    """Returns the number of records, by kind, that a stream store still has after the longest TTL."""
    core.tick(now_s + LONGEST_TTL_S)
    return {kind: count for kind, count in core.entries.count().items() if count}


def unexpired_router_records(core: RouterCore, now_s: float) -> int:
    core.tick(now_s + LONGEST_TTL_S)
    return len(core.resumable_streams)


def find_write_violation(core: EngineCore, block: int, epoch: int) -> str | None:
    """Returns why the request with this slot epoch may not write the block, or None."""
    pool, request = core.scheduler.pool, core.scheduler.allocator.by_slot_epoch.get(epoch)
    if block in pool._fenced:
        return None  # released, and not reused before the result of this step
    if request is None or block not in request.block_ids:
        holder = next((r.request_id for r in core._live.values() if block in r.block_ids), None)
        if holder is None:
            return None if block in pool._sending else "it is free"
        return f"it belongs to {holder}"
    if block in pool._leased:
        return "a peer has the lease"
    return "others share it" if pool._ref_counts[block] > 1 + pool._sending[block] else None


def _find_unsettled(instance: SimInstance) -> str | None:
    lifetime, core = instance.lifetime, instance.engine_core
    if lifetime.supervisor.is_dead or core is None or core.worker is None:
        return "it is not back"
    if not core.idle:
        return f"the engine is not idle: {core.stats(0.0).requests}"
    if lifetime.stream_store is None or lifetime.stream_store.core.num_pending_queries:
        return "the stream store is not back, or owes answers"
    kv_transfer = lifetime.worker.kv_transfer if lifetime.worker is not None else None
    if kv_transfer is not None and (kv_transfer.expected_leases or kv_transfer.pushes):
        return f"leases {sorted(kv_transfer.expected_leases)} and pushes {sorted(kv_transfer.pushes)} are left"
    for api in lifetime.apis.values():
        if (held := api.api.num_unfinished) > 0:
            return f"an api process still holds {held} requests"
    return None


def find_unneeded_repair(simulation: "Simulation") -> str | None:
    """Returns a description of an unneeded repair, or None.

    Clients do not see a bug that a retry hides. But a restarted request, a duplicate token or a handoff that ran into
    its timeout is counted. In a run in which no fault affected a process, wire or transfer, each such count is a bug,
    whatever clients did."""
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
        engine, core = instance.lifetime.engine, instance.engine_core
        if engine is not None and core is not None:
            yield from ((engine.process.name, family) for family in core.registry.snapshot())
        for api in instance.lifetime.apis.values():
            yield from ((api.process.name, family) for family in api.api._supervisor._snapshot())
