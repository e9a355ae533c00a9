"""What must hold whatever happens, looked at from outside while a simulation runs. `docs/simulation.md` has the list.

1 to 3 are the visitors' to check, with `answers`. Here are 4 (nothing is held at idle), 5 (nobody writes what is not
theirs), 6 (progress), 7 (the first in line never loses its blocks), 9 (no starvation) and 10 (no preemption in vain).
"""

from collections import Counter
from typing import TYPE_CHECKING

from onward.api.ledger import LONE_DEATHS_TO_FAIL
from onward.engine.core import EngineCore
from onward.engine.policy import CHARGES_TO_FAIL, queue_key
from onward.engine.request import Request
from onward.proto.step import StepPlan
from onward.router.core import RouterCore
from onward.shelf.core import ShelfCore
from onward.sim import engine_state
from onward.sim.instance import Instance
from onward.sim.loop import START_S
from onward.sim.needless import HARMLESS, needless_repair
from onward.sim.preemptions import preempted_in_vain
from onward.supervisor.restarts import MAX_DEATHS

if TYPE_CHECKING:
    from onward.sim.world import World


LONGEST_TTL_S = 61.0
"""Of a record."""
KEEPS_RECORDS = frozenset(
    {"kill-worker", "kill-engine", "stop-worker", "stop-engine", "poison", "poison-engine", "slow-kv", "break-kv"}
)
"""Kinds of faults by which no record of a response is lost."""
LOOKED_INTO = 16
"""One run in so many has its engines' books checked at every turn."""


OVERTAKING_S = 1.0
"""A request has overtaken another if its client sent it so much later than the other came to the engine."""
MAX_OVERTAKEN = 4
"""By how many of the same priority a request may be overtaken while it waits in one engine."""


class Watch:
    def __init__(self, world: "World") -> None:
        self._world = world
        self._sent_s = {ask.name: START_S + ask.at_s for ask in world.scenario.asks}
        """By label: before this no client has sent it."""
        self._came_s: dict[tuple[str, int], float] = {}
        """By engine and serial: when each request was first seen there, by the simulation's own time. One that is aborted
        and comes again has another serial."""
        self._overtaken: Counter[tuple[str, int]] = Counter()

    def may_crash(self) -> bool:
        """Whether so many workers have died that a request may have been with each of them."""
        fired = self._world.weather.fired
        deaths = sum(fired[kind] for kind in ("kill-worker", "kill-engine", "stop-worker", "stop-instance", "poison"))
        return deaths >= CHARGES_TO_FAIL

    def may_crash_engine(self) -> bool:
        """Whether engines may have died, for other reasons, each time that a request which is not the cause ran alone."""
        fired = self._world.weather.fired
        return sum(fired[kind] for kind in ("kill-engine", "stop-engine", "stop-instance")) >= LONE_DEATHS_TO_FAIL

    def may_pause(self) -> bool:
        """Whether a supervisor may have seen so many deaths in a row that it waits for a minute before the next start."""
        fired = self._world.weather.fired
        deaths = sum(count for kind, count in fired.items() if kind.startswith(("kill-", "stop-", "poison")))
        return self.may_crash() or deaths + self._world.weather.num_killed_for_silence >= MAX_DEATHS

    def is_out_of_reach(self) -> bool:
        """Whether an instance cannot be asked for its records at the moment, or not for all of them."""
        return any(not _answers(one) for one in self._world.instances.values() if one.machine.role != "prefill")

    def may_forget(self, *, is_background: bool) -> bool:
        """Whether the record of a response may be lost. A router does not reach an instance whose api process is away."""
        fired = self._world.weather.fired
        outlived = {"kill-api"} if is_background and not self._world.routers else set[str]()
        return self.may_pause() or not fired.keys() <= HARMLESS | KEEPS_RECORDS | outlived

    def may_lose_tokens(self) -> bool:
        """Whether a response may have fewer tokens than its client was told, until they are made again."""
        return not self._world.weather.fired.keys() <= HARMLESS | KEEPS_RECORDS

    def is_undisturbed(self) -> bool:
        return self._world.weather.fired.keys() <= HARMLESS

    def is_computed(self, request_id: str) -> bool:
        engines = [instance.life.engine for instance in self._world.instances.values()]
        cores = [engine.core for engine in engines if engine is not None and engine.core is not None]
        return any(name.startswith(request_id) for core in cores for name in core._live)

    def num_resumes(self) -> int:
        return sum(
            int(series.value)
            for router in self._world.routers.values()
            for family in router.router.registry.snapshot()
            if family.name == "onward_router_resumes_total"
            for series in family.series
        )

    # 5.

    def on_write(self, instance: Instance, block: int, request_id: str, epoch: int) -> None:
        engine = instance.life.engine
        if engine is None or engine.core is None or engine.core.worker is None:
            return
        problem = misplaced(engine.core, block, epoch)
        if problem is not None:
            self._world.fail(
                5, f"{instance.machine.name}: {request_id} (epoch {epoch}) writes block {block}: {problem}"
            )

    # 7 and 10.

    def on_plan(self, instance: Instance, plan: StepPlan) -> None:
        engine = instance.life.engine
        if engine is None or engine.core is None or not engine.core._live:
            return
        self._check_order(instance, engine.core, plan)
        if not plan.preempt:
            return
        alone = "" if plan.run else ", and runs nothing"
        self._world.trace.note(f"{instance.machine.name} preempts {len(plan.preempt)} in step {plan.step}{alone}")
        first = min(engine.core._live.values(), key=queue_key)
        if first.slot_epoch in {preempt.epoch for preempt in plan.preempt}:
            self._world.fail(7, f"{instance.machine.name}: {first.request_id} is first in line, and is preempted")
        if (victim := preempted_in_vain(engine.core, plan)) is not None:
            what = f"{victim.request_id} is preempted, and no request before it has enough blocks by that"
            self._world.fail(10, f"{instance.machine.name}: {what}")

    # 9.

    def _check_order(self, instance: Instance, core: EngineCore, plan: StepPlan) -> None:
        """A request that is admitted has overtaken those of its priority that came before it and still wait."""
        for assign in plan.assign:
            admitted = core.scheduler.find(assign.epoch)
            if admitted is None or admitted.handover is not None:
                continue
            for waiting in core.scheduler.waiting:
                if waiting.handover is not None or not self._overtakes(core, admitted, waiting):
                    continue
                key = (core.incarnation, waiting.serial)
                self._overtaken[key] += 1
                if self._overtaken[key] > MAX_OVERTAKEN:
                    what = f"{waiting.request_id} waits, and {self._overtaken[key]} that came later"
                    self._world.fail(9, f"{instance.machine.name}: {what} were admitted before it")

    def _overtakes(self, core: EngineCore, admitted: Request, waiting: Request) -> bool:
        """Time that a request has waited elsewhere may put it before another, but not before its client has sent it."""
        sent_s = self._sent_s.get(admitted.label.partition(".")[0])
        came_s = self._came_s.get((core.incarnation, waiting.serial))
        if sent_s is None or came_s is None or admitted.priority != waiting.priority:
            return False
        return sent_s > came_s + OVERTAKING_S

    # The engine's own books.

    def after_turn(self, instance: Instance) -> None:
        """Between two events of an engine. Looking at everything takes longer than the turn, so not every run does."""
        core = instance.life.engine.core if instance.life.engine is not None else None
        if core is not None:
            for request in core._live.values():
                self._came_s.setdefault((core.incarnation, request.serial), self._world.loop.now_s)
        if core is None or self._world.scenario.seed % LOOKED_INTO:
            return
        try:
            engine_state.check(core)
        except AssertionError as fault:
            self._world.fail(0, f"{instance.machine.name}: {fault}")

    # 4.

    def is_settled(self) -> bool:
        return self._unsettled() is None

    def audit(self) -> None:
        what = self._unsettled()
        if what is not None:
            self._world.fail(4, what)
            return
        for instance in self._world.instances.values():
            self._audit(instance)
        for name, router in self._world.routers.items():
            if kept := kept_by_router(router.router.serving.core, router.process.now_s()):
                self._world.fail(4, f"router {name} still has {kept} records")
        if (needless := needless_repair(self._world)) is not None:
            self._world.fail(6, needless)

    def _unsettled(self) -> str | None:
        """Somebody who still holds something, if there is one."""
        for name, router in self._world.routers.items():
            if router.router.serving.core.routes():
                return f"router {name} still has streams"
            if booked := sum(one.booked for one in router.router.serving.core.replicas.all(router.process.now_s())):
                return f"router {name} still has {booked} places booked"
        for instance in self._world.instances.values():
            problem = _busy(instance)
            if problem is not None:
                return f"{instance.machine.name}: {problem}"
        return "a connection is still open" if self._world.web.num_serving else None

    def _audit(self, instance: Instance) -> None:
        engine = instance.life.engine
        assert engine is not None and engine.core is not None
        try:
            engine.core.audit_idle()
        except AssertionError as leak:
            self._world.fail(4, f"{instance.machine.name}: {leak}")
        assert instance.life.shelf is not None
        if kept := kept_for_ever(instance.life.shelf.core, instance.life.shelf.process.now_s()):
            self._world.fail(4, f"{instance.machine.name}: the shelf still has {kept}")


def _answers(instance: Instance) -> bool:
    """All of its processes that have records, or the way to them, run."""
    running = [one for role in ("api", "shelf") for one in instance.processes(role) if not one.is_stopped]
    return len(running) == instance.machine.num_apis + 1


def kept_for_ever(shelf: ShelfCore, now_s: float) -> dict[str, int]:
    """What a shelf would still have when the time of all that it has is over, by kind."""
    shelf.tick(now_s + LONGEST_TTL_S)
    return {kind: count for kind, count in shelf.records.count().items() if count}


def kept_by_router(core: RouterCore, now_s: float) -> int:
    core.tick(now_s + LONGEST_TTL_S)
    return len(core.records)


def misplaced(core: EngineCore, block: int, epoch: int) -> str | None:
    """What is wrong with a write to this block by the request under this epoch, if something is."""
    pool, request = core.scheduler.pool, core.scheduler.seating.by_epoch.get(epoch)
    if block in pool._fenced:
        return None  # given up, and kept from others until this step is answered
    if request is None or block not in request.block_ids:
        holder = next((r.request_id for r in core._live.values() if block in r.block_ids), None)
        if holder is None:
            return None if block in pool._sending else "it is free"
        return f"it belongs to {holder}"
    if block in pool._leased:
        return "a peer has the lease"
    return "others share it" if pool._holders[block] > 1 + pool._sending[block] else None


def _busy(instance: Instance) -> str | None:
    life = instance.life
    if life.supervisor.is_dead or life.engine is None or life.engine.core is None or life.engine.core.worker is None:
        return "it is not back"
    if not life.engine.core.idle:
        return f"the engine is not idle: {life.engine.core.stats(0.0).requests}"
    if life.shelf is None or life.shelf.core.num_questions:
        return "the shelf is not back, or owes answers"
    plane = life.worker.plane if life.worker is not None else None
    if plane is not None and (plane.expected or plane.pushes):
        return f"leases {sorted(plane.expected)} and pushes {sorted(plane.pushes)} are left"
    for api in life.apis.values():
        if (held := api.api.num_held) > 0:
            return f"an api process still holds {held} requests"
    return None
