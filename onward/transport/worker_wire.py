"""Either wire between engine and worker, behind one pair of functions: same messages, same order, same events."""

import socket
from typing import Protocol

from onward.proto.step import StepPlan, StepResult, WorkerHello
from onward.proto.wire import ShmWire, Wire
from onward.transport.shm import ShmPlanSocket, ShmWorkerPort
from onward.transport.zmq import Pollable, Wires


class EngineEnd(Pollable, Protocol):
    def send(self, plan: StepPlan) -> None: ...
    def receive(self) -> WorkerHello | StepResult | None: ...


class WorkerEnd(Pollable, Protocol):
    def send(self, message: WorkerHello | StepResult) -> None: ...
    def receive(self) -> StepPlan | None: ...


def open_engine_end(wires: Wires, wire: Wire, fds: list[int]) -> EngineEnd:
    """`fds` came with the wire's description: memory and doorbell, for `shm`."""
    if isinstance(wire, ShmWire):
        memory_fd, doorbell_fd = fds
        return wires.watch(ShmWorkerPort(wire, memory_fd, socket.socket(fileno=doorbell_fd)))
    assert not fds, "zmq meets at an address"
    return wires.worker_port(wire.address)


def open_worker_end(wires: Wires, wire: Wire) -> WorkerEnd:
    if isinstance(wire, ShmWire):
        return wires.watch(ShmPlanSocket(wire, wire.memory_fd, socket.socket(fileno=wire.doorbell_fd)))
    return wires.plan_socket(wire.address)
