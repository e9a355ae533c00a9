"""The engine's sockets in a simulation: replaces `transport.zmq_sockets.SocketPoller` by ports over simulated wires.

An address belongs to the port that was bound to it last. A message to an address without a port is lost, or refused if
the real socket would refuse it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from onward.proto.engine import FromEngine, ToEngine
from onward.proto.handoff import ToDecode, ToPrefill
from onward.proto.step import StepPlan
from onward.sim.ports import SimPort, SimServerPort, SimWorkerPort
from onward.sim.process import SimProcess
from onward.sim.wire import SimContext, SimWire


@dataclass(slots=True)
class SimAddresses:
    """The listening ports by address."""

    stream_stores: dict[str, SimServerPort] = field(default_factory=dict)
    apis: dict[str, SimServerPort] = field(default_factory=dict)
    workers: dict[str, SimWorkerPort] = field(default_factory=dict)
    kv: dict[str, SimWorkerPort] = field(default_factory=dict)
    handoff: dict[str, SimServerPort] = field(default_factory=dict)


class SimEngineWires:
    def __init__(
        self,
        context: SimContext,
        addresses: SimAddresses,
        process: SimProcess,
        wake: Callable[[], None],
        watch_plan: Callable[[StepPlan], None],
        handoff_address: str,
    ) -> None:
        """`wake` is called when a message has arrived. `handoff_address` is the address for decode instances, in place
        of a listening socket."""
        self.addresses = addresses
        self._end = (context, process, wake)
        self._watch_plan, self._handoff_address = watch_plan, handoff_address

    def watch_fd(self, fd: int) -> None:
        pass

    def engine_server(self, address: str) -> SimServerPort:
        port = self.addresses.apis[address] = SimServerPort(*self._end, received=ToEngine, sent=FromEngine)
        return port

    def engine_wire_end(self, address: str) -> SimWorkerPort:
        port = self.addresses.workers[address] = SimStepPort(*self._end, self._watch_plan)
        return port

    def engine_kv_wire_end(self, address: str) -> SimWorkerPort:
        port = self.addresses.kv[address] = SimWorkerPort(*self._end)
        return port

    def handoff_server(self, listening_fd: int, cluster_key: str) -> SimServerPort:
        port = self.addresses.handoff[self._handoff_address] = SimServerPort(
            *self._end, received=ToPrefill, sent=ToDecode, name_suffix=" peers", may_reorder=True
        )
        return port

    def handoff_client(self, address: str, cluster_key: str, incarnation: str) -> "SimPrefillPeer":
        return SimPrefillPeer(*self._end, self.addresses, address, incarnation)

    def drop(self, port: SimPort) -> None:
        port.close()

    def close(self) -> None:
        pass


class SimStepPort(SimWorkerPort):
    """Passes each plan to `watch_plan` before it is sent."""

    def __init__(
        self,
        context: SimContext,
        process: SimProcess,
        wake: Callable[[], None],
        watch_plan: Callable[[StepPlan], None],
    ) -> None:
        super().__init__(context, process, wake)
        self._watch_plan = watch_plan

    def send(self, message: Any) -> None:
        self._watch_plan(message)
        super().send(message)


class SimPrefillPeer(SimPort):
    """A decode engine's socket to one prefill instance. It reconnects when it sends."""

    def __init__(
        self,
        context: SimContext,
        process: SimProcess,
        wake: Callable[[], None],
        addresses: SimAddresses,
        address: str,
        incarnation: str,
    ) -> None:
        super().__init__(context, process, wake)
        self._addresses, self._address, self._incarnation = addresses, address, incarnation
        self._port: SimServerPort | None = None
        self._wire: SimWire | None = None

    def send(self, message: ToPrefill) -> bool:
        if self._port is None or not self._port.is_alive:
            port = self._addresses.handoff.get(self._address)
            self._port = port if port is not None and port.is_alive else None
            self._wire = self._port.connect(self._incarnation, self._process, self.arrived) if self._port else None
        if self._wire is not None:
            self._wire.send(message)
        return self._wire is not None
