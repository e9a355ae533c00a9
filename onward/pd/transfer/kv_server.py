"""Where writers come in: accepts connections, has them prove themselves, and passes on to the sink what they say.

A connection that broke the rules is not simply closed: its writer might still have our memory mapped. It sees our end of
the stream, stops and closes its own; until then the sink holds on to its leases.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from onward import log
from onward.pd.transfer.authenticated_link import KvListenSocket, ReceiverLink
from onward.pd.transfer.backend import ReceiverBackend, RemoteMemoryInfo
from onward.pd.transfer.framed_channel import LinkClosed, MalformedMessage
from onward.pd.transfer.handshake import ClusterSecret
from onward.pd.transfer.kv_receiver import KvReceiver, ProtocolViolation
from onward.pd.transfer.poller import Poller
from onward.proto.kv_transfer import KvLayout

HANDSHAKE_TIMEOUT_S = 5.0
IDLE_TIMEOUT_S = 120.0
"""Longer than writers keep an idle connection: so it is they who close it, and not under a lease that is on its way."""
MAX_CONNECTIONS = 128

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _SenderConnection:
    number: int
    link: ReceiverLink
    since_s: float
    active_s: float
    num_received: int = 0
    is_ignored: bool = False
    """It has broken the rules; we only wait for its end."""


class KvServer:
    def __init__(
        self,
        door: KvListenSocket,
        poller: Poller,
        sink: KvReceiver,
        receiver: ReceiverBackend,
        *,
        secret: ClusterSecret,
        incarnation: str,
        layout: KvLayout,
        num_blocks: int,
        can_expel: bool,
        now_s: Callable[[], float],
    ) -> None:
        self._door, self._poller, self._sink, self._receiver, self._now_s = door, poller, sink, receiver, now_s
        self._secret, self._incarnation, self._layout, self._num_blocks = secret, incarnation, layout, num_blocks
        self._can_expel = can_expel
        self._visitors: dict[int, _SenderConnection] = {}
        self._num_seen = 0
        poller.watch(door, self._accept)

    @property
    def num_connections(self) -> int:
        return len(self._visitors)

    def run_once(self) -> None:
        """Sends what waits, and closes what has been silent for too long."""
        now_s = self._now_s()
        for visitor in list(self._visitors.values()):
            self._flush(visitor)
            self._check_idle(visitor, now_s)
        if self._can_expel:
            for number in self._sink.overdue_senders(now_s) & self._visitors.keys():
                self._close_connection(self._visitors[number], "it did not stop in time")

    def close(self) -> None:
        for visitor in list(self._visitors.values()):
            self._close_connection(visitor, "the worker is leaving")
        self._poller.forget(self._door)
        self._door.close()

    def _accept(self) -> None:
        while (sock := self._door.accept()) is not None:
            if len(self._visitors) >= MAX_CONNECTIONS:
                logger.warning(log.event("kv connection refused", because="too many", limit=MAX_CONNECTIONS))
                sock.close()
                continue
            self._num_seen += 1
            number = self._num_seen
            link = ReceiverLink(
                sock, self._secret, self._incarnation, self._layout, lambda n=number: self._register_sender(n)
            )
            visitor = self._visitors[number] = _SenderConnection(number, link, self._now_s(), self._now_s())
            self._poller.watch(link.channel, lambda v=visitor: self._on_socket_ready(v))

    def _register_sender(self, number: int) -> RemoteMemoryInfo:
        assert number in self._visitors, "a sender is registered while it is connected"
        invitation = self._receiver.register_sender(number)
        self._sink.add_sender(number, self._visitors[number].link.channel)
        return invitation

    def _on_socket_ready(self, visitor: _SenderConnection) -> None:
        try:
            if visitor.is_ignored:
                visitor.link.channel.discard_input()
                return
            for message in visitor.link.messages(self._num_blocks):
                self._sink.receive(visitor.number, message, self._now_s())
            self._flush(visitor)
        except ProtocolViolation as fault:
            self._stop_listening_to(visitor, str(fault))
        except MalformedMessage as garbled:
            self._stop_listening_to(visitor, str(garbled))
        except LinkClosed as lost:
            self._close_connection(visitor, str(lost))
        else:
            if visitor.link.is_refused:
                self._close_connection(visitor, "it was refused")

    def _flush(self, visitor: _SenderConnection) -> None:
        if visitor.is_ignored:
            return
        channel = visitor.link.channel
        try:
            channel.flush()
        except LinkClosed as lost:
            # Not read to the end yet: what the writer said last may still be there, and tells more than this.
            self._stop_listening_to(visitor, str(lost))
            return
        self._poller.watch(channel, lambda: self._on_socket_ready(visitor), for_writing=channel.wants_to_write)

    def _check_idle(self, visitor: _SenderConnection, now_s: float) -> None:
        received = visitor.link.channel.num_bytes_received
        assert received >= visitor.num_received, "the number of received bytes only grows"
        if received != visitor.num_received:
            visitor.num_received, visitor.active_s = received, now_s
        if not visitor.link.is_open and now_s - visitor.since_s > HANDSHAKE_TIMEOUT_S:
            self._close_connection(visitor, f"it has not introduced itself within {HANDSHAKE_TIMEOUT_S:g} s")
        elif now_s - visitor.active_s > IDLE_TIMEOUT_S and not self._sink.has_open_lease(visitor.number):
            self._close_connection(visitor, "it has been idle")

    def _stop_listening_to(self, visitor: _SenderConnection, reason: str) -> None:
        if visitor.number in self._visitors and not visitor.is_ignored:
            visitor.is_ignored = True
            logger.warning(log.event("kv connection given up", writer=visitor.number, because=reason))
            self._sink.stop_listening_to(visitor.number, reason)
            visitor.link.channel.shutdown_write()
            self._poller.watch(visitor.link.channel, lambda: self._on_socket_ready(visitor))

    def _close_connection(self, visitor: _SenderConnection, reason: str) -> None:
        if self._visitors.pop(visitor.number, None) is None:
            return
        self._poller.forget(visitor.link.channel)
        visitor.link.close()
        self._sink.remove_sender(visitor.number, reason)
