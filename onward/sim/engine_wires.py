"""The engine's sockets in a simulation: the same ports as `transport.zmq_sockets.SocketPoller` gives, over simulated wires.

An address belongs to whoever has bound it last. What is sent to one that nobody has bound is lost, or refused where the
real socket would refuse it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from onward.proto.engine import FromEngine, ToEngine
from onward.proto.handoff import ToDecode, ToPrefill
from onward.proto.kv_transfer import KvCommand, KvReport
from onward.proto.step import StepPlan, StepResult, WorkerHello
from onward.sim.process import SimProcess
from onward.sim.stream_store_node import SimStreamStorePort
from onward.sim.wire import SimContext, SimWire


@dataclass(slots=True)
class SimAddresses:
    """Who listens where."""

    stream_stores: dict[str, SimStreamStorePort] = field(default_factory=dict)
    apis: dict[str, "SimApiPort"] = field(default_factory=dict)
    workers: dict[str, "SimWorkerPort"] = field(default_factory=dict)
    kv: dict[str, "SimKvPort"] = field(default_factory=dict)
    handoff: dict[str, "SimDecodePort"] = field(default_factory=dict)


class SimEngineWires:
    def __init__(
        self,
        context: SimContext,
        addresses: SimAddresses,
        process: SimProcess,
        wake: Callable[[], None],
        watch_plan: Callable[[StepPlan], None],
    ) -> None:
        self.context, self.addresses, self.process = context, addresses, process
        self.wake = wake
        """Something has arrived."""
        self.watch_plan = watch_plan
        self.handoff_address = ""
        """Where decode instances find us: in the place of a listening socket."""

    def watch_fd(self, fd: int) -> None:
        pass

    def engine_server(self, address: str) -> "SimApiPort":
        port = self.addresses.apis[address] = SimApiPort(self)
        return port

    def engine_wire_end(self, address: str) -> "SimWorkerPort":
        port = self.addresses.workers[address] = SimWorkerPort(self)
        return port

    def engine_kv_wire_end(self, address: str) -> "SimKvPort":
        port = self.addresses.kv[address] = SimKvPort(self)
        return port

    def handoff_server(self, listening_fd: int, cluster_key: str) -> "SimDecodePort":
        port = self.addresses.handoff[self.handoff_address] = SimDecodePort(self)
        return port

    def handoff_client(self, address: str, cluster_key: str, incarnation: str) -> "SimPrefillPeer":
        return SimPrefillPeer(self, address, incarnation)

    def drop(self, port: Any) -> None:
        port.close()

    def close(self) -> None:
        pass


class _SimEnginePort:
    def __init__(self, wires: SimEngineWires) -> None:
        self._wires = wires
        self._inbox: deque[Any] = deque()
        self.is_open = True

    def arrived(self, message: Any) -> None:
        if self.is_open:
            self._inbox.append(message)
            self._wires.wake()

    def receive(self) -> Any | None:
        return self._inbox.popleft() if self._inbox else None

    def close(self) -> None:
        self.is_open = False

    @property
    def is_alive(self) -> bool:
        return self.is_open and not self._wires.process.is_dead


class SimApiPort(_SimEnginePort):
    """Of an engine, for the api processes of its instance."""

    def __init__(self, wires: SimEngineWires) -> None:
        super().__init__(wires)
        self._outgoing: dict[str, SimWire] = {}

    def connect(self, incarnation: str, api: SimProcess, deliver: Callable[[FromEngine], None]) -> SimWire:
        """The api's way to us; what we say goes to `deliver`."""
        context, engine = self._wires.context, self._wires.process
        self._outgoing[incarnation] = SimWire(context, f"{engine}>{api}", engine, api, deliver, FromEngine)

        def arrived(message: ToEngine) -> None:
            self.arrived((incarnation, message))

        return SimWire(context, f"{api}>{engine}", api, engine, arrived, ToEngine)

    def send(self, receiver: str, message: FromEngine) -> bool:
        wire = self._outgoing.get(receiver)
        if wire is None:
            return False
        wire.send(message)
        return True


class SimWorkerPort(_SimEnginePort):
    """Of an engine, for one worker: in order and complete, or the worker is dead."""

    _to_worker: SimWire | None = None

    def connect(self, worker: SimProcess, deliver: Callable[[StepPlan], None]) -> tuple[SimWire, SimWire]:
        """The worker's ways to us: for its hello, and for results."""
        context, engine = self._wires.context, self._wires.process
        self._to_worker = SimWire(context, f"{engine}>{worker}", engine, worker, deliver, StepPlan, may_lose=False)
        name = f"{worker}>{engine}"
        hello = SimWire(context, name, worker, engine, self.arrived, WorkerHello, may_lose=False)
        return hello, SimWire(context, name, worker, engine, self.arrived, StepResult, may_lose=False)

    def send(self, plan: StepPlan) -> None:
        assert self._to_worker is not None, "it has said hello"
        self._wires.watch_plan(plan)
        self._to_worker.send(plan)


class SimKvPort(_SimEnginePort):
    """Of an engine, about its worker's data plane."""

    _to_worker: SimWire | None = None

    def connect(self, worker: SimProcess, deliver: Callable[[KvCommand], None]) -> SimWire:
        context, engine = self._wires.context, self._wires.process
        self._to_worker = SimWire(context, f"{engine}>{worker} kv", engine, worker, deliver, KvCommand, may_lose=False)
        return SimWire(context, f"{worker}>{engine} kv", worker, engine, self.arrived, KvReport, may_lose=False)

    def send(self, command: KvCommand) -> None:
        assert self._to_worker is not None, "it has said hello"
        self._to_worker.send(command)


class SimDecodePort(_SimEnginePort):
    """Of a prefill engine. Each decode instance is known by its incarnation."""

    def __init__(self, wires: SimEngineWires) -> None:
        super().__init__(wires)
        self._outgoing: dict[str, SimWire] = {}

    def connect(self, peer: "SimPrefillPeer", decode: SimProcess, incarnation: str) -> SimWire:
        context, engine = self._wires.context, self._wires.process
        to_decode = SimWire(
            context, f"{engine}>{decode} peers", engine, decode, peer.arrived, ToDecode, may_reorder=True
        )
        self._outgoing[incarnation] = to_decode

        def arrived(message: ToPrefill) -> None:
            self.arrived((incarnation, message))

        return SimWire(context, f"{decode}>{engine} peers", decode, engine, arrived, ToPrefill, may_reorder=True)

    def send(self, decode: str, message: ToDecode) -> bool:
        wire = self._outgoing.get(decode)
        if wire is None:
            return False
        wire.send(message)
        return True


class SimPrefillPeer(_SimEnginePort):
    """A decode engine's way to one prefill instance: connects, and connects again."""

    def __init__(self, wires: SimEngineWires, address: str, incarnation: str) -> None:
        super().__init__(wires)
        self._address, self._incarnation = address, incarnation
        self._port: SimDecodePort | None = None
        self._wire: SimWire | None = None

    def send(self, message: ToPrefill) -> bool:
        if self._port is None or not self._port.is_alive:
            self._connect()
        if self._wire is None:
            return False
        self._wire.send(message)
        return True

    def _connect(self) -> None:
        port = self._wires.addresses.handoff.get(self._address)
        self._port = port if port is not None and port.is_alive else None
        self._wire = self._port.connect(self, self._wires.process, self._incarnation) if self._port else None
