"""A worker process in a simulation: the hash worker behind its wires, one step after another, each taking a while."""

from collections import deque

from onward.proto.kv_transfer import KvCommand
from onward.proto.step import StepPlan
from onward.sim.data_plane import DataPlane, PlaneNetwork
from onward.sim.engine_wires import KvPort, WorkerPort
from onward.sim.process import Process
from onward.sim.scenario import Machine
from onward.sim.wire import Ground
from onward.sim.worker import HashWorker, Poisoned

PLANE_STEP_S = 0.004


class WorkerNode:
    def __init__(
        self,
        ground: Ground,
        process: Process,
        machine: Machine,
        worker: HashWorker,
        incarnations: tuple[str, str],
        planes: PlaneNetwork | None,
    ) -> None:
        self.process, self.worker = process, worker
        self._ground, self._machine, self._planes = ground, machine, planes
        self.incarnation, self._engine_incarnation = incarnations
        self._chance = ground.chance.of(f"{process} steps")
        self._plans: deque[StepPlan] = deque()
        self._is_busy = self._plane_is_due = self._report_is_due = False
        if planes is not None:
            assert worker.plane is not None
            planes.add(worker.plane)
            worker.plane.notify = self._report_later
            process.on_death.append(self._leave_planes)
            process.on_stop.append(self._stall)

    def join(self, port: WorkerPort, kv: KvPort | None) -> None:
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
        step_s = self._chance.about(self._machine.step_s) * (1 + num_tokens / 64)
        self.process.later(step_s, self._end_step)

    def _end_step(self) -> None:
        try:
            result = self.worker.step(self._plans.popleft())
        except Poisoned:
            self._ground.weather.fired["poison"] += 1
            self.process.kill()
            return
        self._results.send(result)
        self._is_busy = False
        if self._plans:
            self._start_step()
        self._move_planes_later()

    # The data plane.

    @property
    def plane(self) -> DataPlane | None:
        return self.worker.plane

    def _commanded(self, command: KvCommand) -> None:
        assert self.worker.plane is not None
        self.worker.plane.command(command)
        self._move_planes_later()

    def _move_planes_later(self) -> None:
        if self._planes is not None and not self._plane_is_due:
            self._plane_is_due = True
            self.process.later(self._chance.about(PLANE_STEP_S), self._move_planes)

    def _move_planes(self) -> None:
        """Writes land one by one. A process that is stopped does not come here, so its writes stay with it."""
        planes, plane, weather = self._planes, self.worker.plane, self._ground.weather
        assert planes is not None and plane is not None
        self._plane_is_due = False
        if plane.outgoing and weather.strikes("break-kv", self.process.name):
            planes.break_transfer(plane)
        elif not (plane.outgoing and weather.strikes("slow-kv", self.process.name)):
            planes.move(plane)
        planes.quiet(plane)
        if plane.is_busy:
            self._move_planes_later()

    def _report_later(self) -> None:
        if not self._report_is_due:
            self._report_is_due = True
            self.process.soon(self._report)

    def _report(self) -> None:
        self._report_is_due = False
        assert self.worker.plane is not None
        reports, self.worker.plane.reports = self.worker.plane.reports, []
        for report in reports:
            self._reports.send(report)

    def _stall(self, is_stopped: bool) -> None:
        assert self.worker.plane is not None
        self.worker.plane.stalled = is_stopped

    def _leave_planes(self) -> None:
        assert self._planes is not None and self.worker.plane is not None
        self._planes.remove(self.worker.plane.address)
