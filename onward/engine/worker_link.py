"""The engine's side of the wire to its worker: which incarnation it listens to, and that nothing is missed.

Between engine and worker the stream is in order and complete, or the worker is dead. A result whose number is not the
next one, or a worker that speaks another version, is a fault that ends the process: the supervisor starts both anew.
"""

from onward.errors import StartupError
from onward.proto import SCHEMA_VERSION
from onward.proto.control import WorkerStarting
from onward.proto.step import StepPlan, StepResult, WorkerHello
from onward.transport.worker_wire import open_engine_end
from onward.transport.zmq import Wires


class WorkerLink:
    def __init__(self, wires: Wires, starting: WorkerStarting, fds: list[int], engine_incarnation: str) -> None:
        self.incarnation = starting.incarnation
        self._engine_incarnation = engine_incarnation
        self._wires = wires
        self._port = open_engine_end(wires, starting.wire, fds)

    def send(self, plan: StepPlan) -> None:
        self._port.send(plan)

    def receive(self) -> WorkerHello | StepResult | None:
        message = self._port.receive()
        if isinstance(message, WorkerHello):
            self._check(message)
        return message

    def close(self) -> None:
        self._wires.drop(self._port)

    def _check(self, hello: WorkerHello) -> None:
        if hello.schema_version != SCHEMA_VERSION:
            raise StartupError(f"the worker speaks schema {hello.schema_version}, the engine {SCHEMA_VERSION}")
        assert hello.worker_incarnation == self.incarnation, "the wire is known to one worker only"
        assert hello.engine_incarnation == self._engine_incarnation, "a worker serves one engine"
