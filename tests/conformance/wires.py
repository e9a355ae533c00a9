"""An engine core and a hash worker joined by a real wire, both ends in this process: what a step costs is out of sight
here, what it means is not."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from onward.proto.engine import FromEngine
from onward.proto.step import SlotEvent, StepPlan, StepResult, WorkerHello
from onward.proto.worker_wire_address import ShmWireAddress, WorkerWireAddress, ZmqWireAddress
from onward.sim.hash_worker import HashWorker, KvCells
from onward.transport import shm_wire
from onward.transport.inproc_wire import InprocWorkerWire, StepRunner
from onward.transport.worker_wire import open_engine_wire_end, open_worker_wire_end
from onward.transport.zmq_sockets import SocketPoller
from tests.engine.harness import Harness

KINDS = ["inproc", "zmq", "shm"]
WAIT_MS = 10_000
MAX_TOKENS_PER_ROW = 8

Change = Callable[[list[SlotEvent]], list[SlotEvent]]


class PairedWire:
    """Both ends of a wire between processes. The worker's side acts when its result is asked for, as `InprocWorkerWire`."""

    def __init__(self, description: WorkerWireAddress, fds: list[int], runner: StepRunner, hello: WorkerHello) -> None:
        self._runner = runner
        # One for each side, as each process has its own: an end that is waited for is waited for alone.
        self._engine_wires, self._worker_wires = SocketPoller(), SocketPoller()
        self._engine = open_engine_wire_end(self._engine_wires, description, fds)
        self._worker = open_worker_wire_end(self._worker_wires, description)
        self._worker.send(hello)
        assert self._heard_by_engine() == hello

    def send(self, plan: StepPlan) -> None:
        self._engine.send(plan)

    def receive(self) -> StepResult:
        # Waiting comes first on both sides, as in the processes' loops: it also lets zmq see what was read meanwhile.
        self._worker_wires.wait(WAIT_MS)
        plan = self._worker.receive()
        assert plan is not None, "no plan came over the wire"
        self._worker.send(self._runner.step(plan))
        result = self._heard_by_engine()
        assert isinstance(result, StepResult)
        return result

    def close(self) -> None:
        self._engine_wires.drop(self._engine)
        self._worker_wires.drop(self._worker)
        self._engine_wires.close()
        self._worker_wires.close()

    def _heard_by_engine(self) -> WorkerHello | StepResult:
        self._engine_wires.wait(WAIT_MS)
        message = self._engine.receive()
        assert message is not None, "nothing came over the wire"
        return message


def open_wire(
    kind: str, folder: Path, num_slots: int, runner: StepRunner, hello: WorkerHello
) -> InprocWorkerWire | PairedWire:
    if kind == "inproc":
        return InprocWorkerWire(runner)
    if kind == "zmq":
        return PairedWire(ZmqWireAddress(f"ipc://{folder}/{hello.worker_incarnation}"), [], runner, hello)
    shape = ShmWireAddress(
        hello.worker_incarnation, num_slots, MAX_TOKENS_PER_ROW, plan_bytes=1 << 16, extras_bytes=1 << 16
    )
    memory, ours, theirs = shm_wire.create_ring(shape)
    fds = [os.dup(memory), ours.detach()]
    wire = msgspec.structs.replace(shape, memory_fd=memory, doorbell_fd=theirs.detach())
    return PairedWire(wire, fds, runner, hello)


class WiredHarness(Harness):
    def __init__(self, kind: str, folder: Path, **shape: object) -> None:
        self.kind, self._folder = kind, folder
        self._wire: InprocWorkerWire | PairedWire | None = None
        self._num_wires = 0
        self._change: Change | None = None
        self.sent: list[bytes] = []
        """Every message of the core, encoded at the moment it was sent."""
        super().__init__(**shape)  # type: ignore[arg-type]

    def answer(self, change: Change | None = None) -> None:
        """As always; `change` is applied to the events on the worker's side, before they go over the wire."""
        self._change = change
        super().answer()
        self._change = None

    def step(self, plan: StepPlan) -> StepResult:
        """The runner behind the wire."""
        result = self.worker.step(plan)
        events = self._change(result.events) if self._change else result.events
        return StepResult(result.step, events, busy_s=0.125)

    def close(self) -> None:
        if isinstance(self._wire, PairedWire):
            self._wire.close()

    def _new_worker(self, memory: KvCells | None = None) -> HashWorker:
        self.close()
        self._num_wires += 1
        worker = super()._new_worker(memory)
        hello = worker.hello(f"w{self._num_wires}")
        self._wire = open_wire(self.kind, self._folder, self.config.max_num_seqs, self, hello)
        return worker

    def _send(self, plan: StepPlan) -> None:
        assert self._wire is not None
        self._wire.send(plan)

    def _result(self) -> StepResult:
        assert self._wire is not None
        self.plans.popleft()
        result = self._wire.receive()
        assert result is not None, "a result for every plan"
        return result

    def _hear(self, message: FromEngine) -> None:
        self.sent.append(msgspec.msgpack.encode(message))
        super()._hear(message)
