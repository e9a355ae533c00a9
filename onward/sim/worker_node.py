"""A worker process in a simulation: the hash worker behind its wires, one step after another, each taking a while."""

from collections import deque

from onward.proto.kv_transfer import KvCommand, KvReport
from onward.proto.step import StepPlan, StepResult, WorkerHello
from onward.sim.hash_worker import HashWorker, WorkerPoisoned
from onward.sim.kv_transfer import SimKvNetwork, SimKvTransfer
from onward.sim.ports import SimWorkerPort
from onward.sim.process import SimProcess
from onward.sim.scenario import SimInstanceSpec
from onward.sim.wire import SimContext

PLANE_STEP_S = 0.004


class WorkerNode:
    def __init__(
        self,
        context: SimContext,
        process: SimProcess,
        spec: SimInstanceSpec,
        worker: HashWorker,
        incarnations: tuple[str, str],
        kv_network: SimKvNetwork | None,
    ) -> None:
        self.process, self.worker = process, worker
        self._context, self._spec, self._kv_network = context, spec, kv_network
        self.incarnation, self._engine_incarnation = incarnations
        self._random = context.random.substream(f"{process} steps")
        self._plans: deque[StepPlan] = deque()
        self._is_busy = False
        self._move_kv_later = process.coalesced(self._move_kv, lambda: self._random.jittered(PLANE_STEP_S))
        if kv_network is not None:
            assert worker.kv_transfer is not None
            kv_network.add(worker.kv_transfer)
            worker.kv_transfer.notify = process.coalesced(self._report)
            process.on_death.append(self._leave_kv_network)
            process.on_stop.append(self._stall)

    def join(self, port: SimWorkerPort, kv_port: SimWorkerPort | None) -> None:
        hello, self._results = port.connect(self.process, self._on_plan, StepPlan, WorkerHello, StepResult)
        if kv_port is not None:
            [self._reports] = kv_port.connect(self.process, self._on_kv_command, KvCommand, KvReport, name_suffix=" kv")
        hello.send(self.worker.hello(self.incarnation, self._engine_incarnation))

    def _on_plan(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        if not self._is_busy:
            self._start_step()

    def _start_step(self) -> None:
        self._is_busy = True
        num_tokens = sum(run.num_tokens for run in self._plans[0].run)
        step_s = self._random.jittered(self._spec.step_s) * (1 + num_tokens / 64)
        self.process.call_later(step_s, self._end_step)

    def _end_step(self) -> None:
        try:
            result = self.worker.step(self._plans.popleft())
        except WorkerPoisoned:
            self._context.active_faults.trigger_counts["poison"] += 1
            self.process.kill()
            return
        self._results.send(result)
        self._is_busy = False
        if self._plans:
            self._start_step()
        if self._kv_network is not None:
            self._move_kv_later()

    # KV transfer.

    @property
    def kv_transfer(self) -> SimKvTransfer | None:
        return self.worker.kv_transfer

    def _on_kv_command(self, command: KvCommand) -> None:
        assert self.worker.kv_transfer is not None
        self.worker.kv_transfer.command(command)
        self._move_kv_later()

    def _move_kv(self) -> None:
        """Writes land one by one. A process that is stopped does not come here, so its writes stay with it."""
        kv_network, kv_transfer, active_faults = self._kv_network, self.worker.kv_transfer, self._context.active_faults
        assert kv_network is not None and kv_transfer is not None
        if kv_transfer.outgoing and active_faults.hits("break-kv", self.process.name):
            kv_network.break_transfer(kv_transfer)
        elif not (kv_transfer.outgoing and active_faults.hits("slow-kv", self.process.name)):
            kv_network.move_one_write(kv_transfer)
        kv_network.settle_revoked_leases(kv_transfer)
        if kv_transfer.is_busy:
            self._move_kv_later()

    def _report(self) -> None:
        assert self.worker.kv_transfer is not None
        reports, self.worker.kv_transfer.reports = self.worker.kv_transfer.reports, []
        for report in reports:
            self._reports.send(report)

    def _stall(self, is_stopped: bool) -> None:
        assert self.worker.kv_transfer is not None
        self.worker.kv_transfer.stalled = is_stopped

    def _leave_kv_network(self) -> None:
        assert self._kv_network is not None and self.worker.kv_transfer is not None
        self._kv_network.remove(self.worker.kv_transfer.address)
