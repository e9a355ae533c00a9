"""Either wire between engine and worker, behind one pair of functions: same messages, same order, same events."""

import socket
from typing import Protocol

from onward.proto.step import StepPlan, StepResult, WorkerHello
from onward.proto.worker_wire_address import ShmWireAddress, WorkerWireAddress
from onward.transport.shm_wire import ShmEngineWireEnd, ShmWorkerWireEnd
from onward.transport.zmq_sockets import Pollable, SocketPoller


class EngineWireEnd(Pollable, Protocol):
    def send(self, plan: StepPlan) -> None: ...
    def receive(self) -> WorkerHello | StepResult | None: ...


class WorkerWireEnd(Pollable, Protocol):
    def send(self, message: WorkerHello | StepResult) -> None: ...
    def receive(self) -> StepPlan | None: ...


def open_engine_wire_end(wires: SocketPoller, wire: WorkerWireAddress, fds: list[int]) -> EngineWireEnd:
    """`fds` came with the wire's description: memory and doorbell, for `shm`."""
    if isinstance(wire, ShmWireAddress):
        memory_fd, doorbell_fd = fds
        return wires.watch(ShmEngineWireEnd(wire, memory_fd, socket.socket(fileno=doorbell_fd)))
    assert not fds, "zmq meets at an address"
    return wires.engine_wire_end(wire.address)


def open_worker_wire_end(wires: SocketPoller, wire: WorkerWireAddress) -> WorkerWireEnd:
    if isinstance(wire, ShmWireAddress):
        return wires.watch(ShmWorkerWireEnd(wire, wire.memory_fd, socket.socket(fileno=wire.doorbell_fd)))
    return wires.worker_wire_end(wire.address)
