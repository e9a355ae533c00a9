"""Typed msgpack messages over zmq: between api and engine, and between engine and worker. Creates all sockets of a
process. A wire encodes and decodes messages, and does not interpret them.

The supervisor creates the addresses, which contain incarnations, so a message can only reach the process for which it
was meant. Every socket has a bounded queue; a message beyond the bound is refused, and the protocols above repair the
loss.

Local addresses are abstract: no file is created, so none can be left behind. Abstract addresses have no file
permissions, so each address contains a CURVE key that only the supervisor's children know.
"""

import contextlib
from typing import Any, Protocol, TypeVar

import msgspec
import zmq

from onward.proto.engine import FromEngine, ToEngine
from onward.proto.step import StepPlan, StepResult, WorkerHello
from onward.transport.api_sockets import ApiClientSocket, ApiServerSocket
from onward.transport.curve import bind, connect
from onward.transport.handoff_sockets import HandoffClientSocket, HandoffServerSocket
from onward.transport.kv_wire import EngineKvWireEnd, WorkerKvWireEnd
from onward.transport.stream_store_sockets import StreamStoreServerSocket

API_QUEUE_LENGTH = 100_000
WORKER_QUEUE_LENGTH = 64
"""Two plans are in flight at most. zmq returns credit for what was read only when it is polled, so there is room to
spare for a process that reads several messages between two waits."""


class Pollable(Protocol):
    """One end of a wire on which a process waits."""

    @property
    def pollable(self) -> "zmq.Socket[bytes] | int":
        """The object to poll: a zmq socket or a file descriptor."""
        ...

    def close(self) -> None: ...


Port = TypeVar("Port", bound=Pollable)


class SocketPoller:
    """The wires of one process: creates its zmq sockets, and waits for all of them together."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._poller = zmq.Poller()

    def engine_server(self, address: str) -> "EngineServerSocket":
        return self.watch(EngineServerSocket(self._context, address))

    def engine_wire_end(self, address: str) -> "ZmqEngineWireEnd":
        return self.watch(ZmqEngineWireEnd(self._context, address))

    def worker_wire_end(self, address: str) -> "ZmqWorkerWireEnd":
        return self.watch(ZmqWorkerWireEnd(self._context, address))

    def handoff_server(self, listening_fd: int, cluster_key: str) -> HandoffServerSocket:
        return self.watch(HandoffServerSocket(self._context, listening_fd, cluster_key))

    def handoff_client(self, address: str, cluster_key: str, incarnation: str) -> HandoffClientSocket:
        return self.watch(HandoffClientSocket(self._context, address, cluster_key, incarnation))

    def stream_store_server(self, address: str) -> StreamStoreServerSocket:
        return self.watch(StreamStoreServerSocket(self._context, address))

    def engine_kv_wire_end(self, address: str) -> EngineKvWireEnd:
        return self.watch(EngineKvWireEnd(self._context, address))

    def worker_kv_wire_end(self, address: str) -> WorkerKvWireEnd:
        return self.watch(WorkerKvWireEnd(self._context, address))

    def watch(self, port: Port) -> Port:
        self._poller.register(port.pollable, zmq.POLLIN)
        return port

    def watch_fd(self, fd: int) -> None:
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_ms: int | None = None) -> None:
        self._poller.poll(timeout_ms)

    def drop(self, port: Pollable) -> None:
        self._poller.unregister(port.pollable)
        port.close()

    def close(self) -> None:
        self._context.destroy(linger=0)


class WorkerMessage(msgspec.Struct, frozen=True, array_like=True):
    """A worker's message: a hello at first, then one result for each plan."""

    hello: WorkerHello | None = None
    result: StepResult | None = None


class EngineClientSocket(ApiClientSocket[ToEngine, FromEngine]):
    """An api process's socket to the engine. The `HeldRequestsReport`, once a second, repairs the loss of a refused
    message."""

    def __init__(self, address: str, api_incarnation: str) -> None:
        super().__init__(address, api_incarnation, FromEngine, API_QUEUE_LENGTH)


class EngineServerSocket(ApiServerSocket[ToEngine, FromEngine]):
    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        super().__init__(context, address, ToEngine, API_QUEUE_LENGTH)


class ZmqEngineWireEnd:
    """The engine's end of the wire to one worker incarnation."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.pollable = _worker_socket(context)
        bind(self.pollable, address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(WorkerMessage)

    def send(self, plan: StepPlan) -> None:
        # The queue holds far more plans than are ever in flight, so a plan is refused only if the worker is gone. The
        # supervisor reports the death, and then the plan is void.
        with contextlib.suppress(zmq.Again):
            self.pollable.send(self._encoder.encode(plan), zmq.NOBLOCK)

    def receive(self) -> WorkerHello | StepResult | None:
        try:
            message = self._decoder.decode(self.pollable.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
        return message.hello or message.result

    def close(self) -> None:
        self.pollable.close()


class ZmqWorkerWireEnd:
    """The worker's end."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.pollable = _worker_socket(context)
        connect(self.pollable, address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepPlan)

    def send(self, message: WorkerHello | StepResult) -> None:
        worker_message = (
            WorkerMessage(hello=message) if isinstance(message, WorkerHello) else WorkerMessage(result=message)
        )
        self.pollable.send(self._encoder.encode(worker_message), zmq.NOBLOCK)

    def receive(self) -> StepPlan | None:
        try:
            return self._decoder.decode(self.pollable.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        self.pollable.close()


def _worker_socket(context: zmq.Context[Any]) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, WORKER_QUEUE_LENGTH)
    socket.setsockopt(zmq.RCVHWM, WORKER_QUEUE_LENGTH)
    return socket
