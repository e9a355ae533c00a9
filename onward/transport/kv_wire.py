"""The wire for messages about KV transfers between an engine and its worker, separate from the worker wire. See
`proto/kv_transfer`.

Messages are in order and complete while both processes live. Neither end ever blocks: messages that the other end does
not take at once are queued. A full queue raises `KvWireFull`, which ends the process, because a dropped report or
command would leave blocks without an owner. The engine's bound on leases keeps the queue far from full.
"""

from collections import deque
from typing import Any

import msgspec
import zmq

from onward.proto.kv_transfer import KvCommand, KvReport
from onward.transport.curve import bind, connect

KV_QUEUE_LENGTH = 16_384


class KvWireFull(Exception):
    """The other side does not read."""


class _KvWireEnd:
    """A socket with a queue in front. A zmq socket refuses to send while no process is connected, so earlier messages
    wait in the queue."""

    def __init__(self, context: zmq.Context[Any], message_type: Any) -> None:
        self.pollable: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.pollable.setsockopt(zmq.LINGER, 0)
        self.pollable.setsockopt(zmq.SNDHWM, KV_QUEUE_LENGTH)
        self.pollable.setsockopt(zmq.RCVHWM, KV_QUEUE_LENGTH)
        self._waiting: deque[bytes] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def send_or_queue(self, message: Any) -> None:
        if len(self._waiting) >= KV_QUEUE_LENGTH:
            raise KvWireFull(f"{KV_QUEUE_LENGTH} messages about KV transfers wait for the other side")
        self._waiting.append(self._encoder.encode(message))
        self.flush()

    def flush(self) -> None:
        try:
            while self._waiting:
                self.pollable.send(self._waiting[0], zmq.NOBLOCK)
                self._waiting.popleft()
        except zmq.Again:
            return

    def receive(self) -> Any | None:
        """Sends waiting messages first, because each end is read at least once per turn of its process."""
        self.flush()
        try:
            return self._decoder.decode(self.pollable.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        self.pollable.close()


class EngineKvWireEnd:
    """The engine's end, for one worker incarnation. It listens before the worker starts."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._end = _KvWireEnd(context, KvReport)
        self.pollable = self._end.pollable
        bind(self.pollable, address)

    def send(self, command: KvCommand) -> None:
        self._end.send_or_queue(command)

    def receive(self) -> KvReport | None:
        return self._end.receive()

    def close(self) -> None:
        self._end.close()


class WorkerKvWireEnd:
    """The worker's end. Not for use by several threads at once."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._end = _KvWireEnd(context, KvCommand)
        self.pollable = self._end.pollable
        connect(self.pollable, address)

    def send(self, report: KvReport) -> None:
        self._end.send_or_queue(report)

    def receive(self) -> KvCommand | None:
        return self._end.receive()

    def close(self) -> None:
        self._end.close()
