"""Opens the engine's and the worker's end of a worker wire, by zmq or shared memory. Both kinds carry the same messages
in the same order."""

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


def open_engine_wire_end(poller: SocketPoller, wire_address: WorkerWireAddress, fds: list[int]) -> EngineWireEnd:
    """Opens the engine's end. `fds` came with the wire's address: memory and doorbell for `shm`, none for zmq."""
    if isinstance(wire_address, ShmWireAddress):
        memory_fd, doorbell_fd = fds
        return poller.watch(ShmEngineWireEnd(wire_address, memory_fd, socket.socket(fileno=doorbell_fd)))
    assert not fds, "zmq meets at an address"
    return poller.engine_wire_end(wire_address.address)


def open_worker_wire_end(poller: SocketPoller, wire_address: WorkerWireAddress) -> WorkerWireEnd:
    if isinstance(wire_address, ShmWireAddress):
        return poller.watch(
            ShmWorkerWireEnd(wire_address, wire_address.memory_fd, socket.socket(fileno=wire_address.doorbell_fd))
        )
    return poller.worker_wire_end(wire_address.address)
