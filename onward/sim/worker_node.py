"""A worker process in a simulation: the hash worker behind its wires, one step after another, each taking a while."""

from collections import deque

from onward.proto.kv_transfer import KvCommand
from onward.proto.step import StepPlan
from onward.sim.engine_wires import SimKvPort, SimWorkerPort
from onward.sim.hash_worker import HashWorker, WorkerPoisoned
from onward.sim.kv_transfer import SimKvNetwork, SimKvTransfer
from onward.sim.process import SimProcess
from onward.sim.scenario import SimInstanceSpec
from onward.sim.wire import SimContext

PLANE_STEP_S = 0.004


class WorkerNode:
    def __init__(
        self,
        ground: SimContext,
        process: SimProcess,
        machine: SimInstanceSpec,
        worker: HashWorker,
        incarnations: tuple[str, str],
        planes: SimKvNetwork | None,
    ) -> None:
        self.process, self.worker = process, worker
        self._ground, self._machine, self._planes = ground, machine, planes
        self.incarnation, self._engine_incarnation = incarnations
        self._chance = ground.random.substream(f"{process} steps")
        self._plans: deque[StepPlan] = deque()
        self._is_busy = self._plane_is_due = self._report_is_due = False
        if planes is not None:
            assert worker.kv_transfer is not None
            planes.add(worker.kv_transfer)
            worker.kv_transfer.notify = self._report_later
            process.on_death.append(self._leave_planes)
            process.on_stop.append(self._stall)

    def join(self, port: SimWorkerPort, kv: SimKvPort | None) -> None:
        hello, self._results = port.connect(self.process, self._planned)
        if kv is not None:
            self._reports = kv.connect(self.process, self._commanded)
        hello.send(self.worker.hello(self.incarnation, self._engine_incarnation))

    def _planned(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        if not self._is_busy:
            self._start_step()

    def _start_step(self) -> None:
        self._is_busy = True
        num_tokens = sum(run.num_tokens for run in self._plans[0].run)
        step_s = self._chance.jittered(self._machine.step_s) * (1 + num_tokens / 64)
        self.process.call_later(step_s, self._end_step)

    def _end_step(self) -> None:
        try:
            result = self.worker.step(self._plans.popleft())
        except WorkerPoisoned:
            self._ground.active_faults.trigger_counts["poison"] += 1
            self.process.kill()
            return
        self._results.send(result)
        self._is_busy = False
        if self._plans:
            self._start_step()
        self._move_planes_later()

    # The data plane.

    @property
    def plane(self) -> SimKvTransfer | None:
        return self.worker.kv_transfer

    def _commanded(self, command: KvCommand) -> None:
        assert self.worker.kv_transfer is not None
        self.worker.kv_transfer.command(command)
        self._move_planes_later()

    def _move_planes_later(self) -> None:
        if self._planes is not None and not self._plane_is_due:
            self._plane_is_due = True
            self.process.call_later(self._chance.jittered(PLANE_STEP_S), self._move_planes)

    def _move_planes(self) -> None:
        """Writes land one by one. A process that is stopped does not come here, so its writes stay with it."""
        planes, plane, weather = self._planes, self.worker.kv_transfer, self._ground.active_faults
        assert planes is not None and plane is not None
        self._plane_is_due = False
        if plane.outgoing and weather.hits("break-kv", self.process.name):
            planes.break_transfer(plane)
        elif not (plane.outgoing and weather.hits("slow-kv", self.process.name)):
            planes.move_one_write(plane)
        planes.settle_revoked_leases(plane)
        if plane.is_busy:
            self._move_planes_later()

    def _report_later(self) -> None:
        if not self._report_is_due:
            self._report_is_due = True
            self.process.call_soon(self._report)

    def _report(self) -> None:
        self._report_is_due = False
        assert self.worker.kv_transfer is not None
        reports, self.worker.kv_transfer.reports = self.worker.kv_transfer.reports, []
        for report in reports:
            self._reports.send(report)

    def _stall(self, is_stopped: bool) -> None:
        assert self.worker.kv_transfer is not None
        self.worker.kv_transfer.stalled = is_stopped

    def _leave_planes(self) -> None:
        assert self._planes is not None and self.worker.kv_transfer is not None
        self._planes.remove(self.worker.kv_transfer.address)
