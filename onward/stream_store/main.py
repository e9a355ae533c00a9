"""The stream store process: a socket and the clock around `StreamStoreCore`. It starts before the api processes.

There is one per instance. Its records are lost when it dies. A client that reconnects then gets the answer for an
unknown stream, and repeats its POST.
"""

import logging
from typing import Protocol

import msgspec

from onward import log
from onward.clock import Clock, SystemClock
from onward.proto.control import (
    ApiGone,
    ChildReady,
    MetricsSnapshot,
    QueryMetrics,
    StartStreamStore,
    StopChild,
    ToChild,
)
from onward.proto.stream_store import FromStreamStore, ToStreamStore
from onward.stream_store.core import OutgoingMessages, StreamStoreCore
from onward.transport.control_channel import ChannelClosed, SupervisorChannel, join_supervisor_as
from onward.transport.zmq_sockets import SocketPoller

TICK_MS = 50
MAX_INBOX_PER_TURN = 1000
"""A bound, so that a flood of records cannot delay the replies to the supervisor."""

logger = logging.getLogger(__name__)


class StreamStoreServer(Protocol):
    """The methods of `transport.stream_store_sockets.StreamStoreServerSocket` that the store uses."""

    def receive(self) -> tuple[str, ToStreamStore] | None: ...
    def send(self, receiver: str, message: FromStreamStore) -> bool: ...


class StreamStoreProcess:
    """Runs the store on a channel, a server socket and a clock. The simulator passes its own, and calls `run_once`."""

    def __init__(self, channel: SupervisorChannel, port: StreamStoreServer, clock: Clock) -> None:
        self.core = StreamStoreCore()
        self.is_stopped = False
        self._channel, self._port, self._clock = channel, port, clock
        channel.send(ChildReady())

    def run_once(self) -> None:
        """Handles messages that have arrived, then what is due by time."""
        now_s = self._clock.now_s()
        while (control_message := self._channel.receive()) is not None:
            self._on_control(control_message, now_s)
        for _ in range(MAX_INBOX_PER_TURN):
            try:
                received = self._port.receive()
            except msgspec.DecodeError as fault:
                logger.warning(log.event("message dropped", fault=str(fault)))
                continue
            if received is None:
                break
            self._send_all(self.core.receive(*received, now_s), now_s)
        self._send_all(self.core.tick(now_s), now_s)

    def _on_control(self, message: ToChild, now_s: float) -> None:
        match message:
            case ApiGone():
                self._send_all(self.core.api_gone(message.incarnation, now_s), now_s)
            case QueryMetrics():
                self._channel.send(MetricsSnapshot(message.query_id, self.core.registry.snapshot()))
            case StopChild():
                self.is_stopped = True
            case _:
                logger.warning(log.event("unexpected message", kind=type(message).__name__))

    def _send_all(self, messages: OutgoingMessages, now_s: float) -> None:
        for receiver, message in messages:
            if not self._port.send(receiver, message):
                # A failed delivery leads only to replies to other processes, not to new queries, so the recursion ends.
                self._send_all(self.core.undelivered(receiver, message, now_s), now_s)


def main() -> None:
    channel, start = join_supervisor_as(StartStreamStore)
    log.configure("stream_store", start.log_level, start.log_format)
    poller = SocketPoller()
    poller.watch_fd(channel.fileno())
    try:
        process = StreamStoreProcess(channel, poller.stream_store_server(start.address), SystemClock())
        while not process.is_stopped:
            poller.wait(TICK_MS)
            process.run_once()
    except ChannelClosed:
        logger.warning("the supervisor is gone")
    finally:
        poller.close()


if __name__ == "__main__":
    main()
