"""The engine's side of the wire to its worker: which incarnation it listens to, and that nothing is missed.

Between engine and worker the stream is in order and complete, or the worker is dead. A result whose number is not the
next one, or a worker that speaks another version, is a fault that ends the process: the supervisor starts both anew.
"""

from onward.errors import StartupError
from onward.proto import SCHEMA_VERSION
from onward.proto.control import WorkerStarting
from onward.proto.kv_transfer import KvCommand, KvReport
from onward.proto.step import StepPlan, StepResult, WorkerHello
from onward.transport.worker_wire import open_engine_wire_end
from onward.transport.zmq_sockets import SocketPoller


class WorkerLink:
    def __init__(self, wires: SocketPoller, starting: WorkerStarting, fds: list[int], engine_incarnation: str) -> None:
        self.incarnation = starting.incarnation
        self._engine_incarnation = engine_incarnation
        self._wires = wires
        self._port = open_engine_wire_end(wires, starting.wire, fds)
        self._kv = wires.engine_kv_wire_end(starting.kv_address) if starting.kv_address else None
        self.replacement_requested = False
        """The supervisor was asked to end this worker."""

    def send(self, plan: StepPlan) -> None:
        self._port.send(plan)

    def receive(self) -> WorkerHello | StepResult | None:
        message = self._port.receive()
        if isinstance(message, WorkerHello):
            self._check(message)
        return message

    def send_kv(self, commands: list[KvCommand]) -> None:
        for command in commands:
            assert self._kv is not None, "only a worker with a data plane is spoken to about it"
            self._kv.send(command)

    def receive_kv(self) -> KvReport | None:
        return self._kv.receive() if self._kv is not None else None

    def close(self) -> None:
        self._wires.drop(self._port)
        if self._kv is not None:
            self._wires.drop(self._kv)

    def _check(self, hello: WorkerHello) -> None:
        if hello.schema_version != SCHEMA_VERSION:
            raise StartupError(f"the worker speaks schema {hello.schema_version}, the engine {SCHEMA_VERSION}")
        assert hello.worker_incarnation == self.incarnation, "the wire is known to one worker only"
        assert hello.engine_incarnation == self._engine_incarnation, "a worker serves one engine"
