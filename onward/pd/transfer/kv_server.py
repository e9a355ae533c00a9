"""Accepts the connections of writers, authenticates them, and passes their messages on to the KvReceiver.

A connection that has broken the protocol is not simply closed, because its writer may still have our memory mapped. The
writer sees the end of our stream, stops, and closes its own; until then the KvReceiver keeps its leases.
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
from onward.pd.transfer.socket_reactor import SocketReactor
from onward.proto.kv_transfer import KvLayout

HANDSHAKE_TIMEOUT_S = 5.0
IDLE_TIMEOUT_S = 120.0
"""Longer than writers keep an idle connection. So writers close it, and never while a lease for it is on its way."""
MAX_CONNECTIONS = 128

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _SenderConnection:
    sender_id: int
    link: ReceiverLink
    connected_s: float
    active_s: float
    num_received: int = 0
    is_ignored: bool = False
    """It has broken the protocol, or cannot be written to. Its input is discarded until it ends."""


class KvServer:
    def __init__(
        self,
        listen_socket: KvListenSocket,
        reactor: SocketReactor,
        receiver: KvReceiver,
        backend: ReceiverBackend,
        *,
        secret: ClusterSecret,
        incarnation: str,
        layout: KvLayout,
        num_blocks: int,
        can_expel: bool,
        now_s: Callable[[], float],
    ) -> None:
        self._listen_socket, self._reactor, self._receiver, self._backend, self._now_s = (
            listen_socket,
            reactor,
            receiver,
            backend,
            now_s,
        )
        self._secret, self._incarnation, self._layout, self._num_blocks = secret, incarnation, layout, num_blocks
        self._can_expel = can_expel
        self._senders: dict[int, _SenderConnection] = {}
        self._num_accepted = 0
        reactor.watch(listen_socket, self._accept)

    @property
    def num_connections(self) -> int:
        return len(self._senders)

    def run_once(self) -> None:
        """Sends waiting messages, and closes connections that have been silent for too long."""
        now_s = self._now_s()
        for sender in list(self._senders.values()):
            self._flush(sender)
            self._check_idle(sender, now_s)
        if self._can_expel:
            for sender_id in self._receiver.overdue_senders(now_s) & self._senders.keys():
                self._close_connection(self._senders[sender_id], "it did not stop in time")

    def close(self) -> None:
        for sender in list(self._senders.values()):
            self._close_connection(sender, "the worker is leaving")
        self._reactor.forget(self._listen_socket)
        self._listen_socket.close()

    def _accept(self) -> None:
        while (sock := self._listen_socket.accept()) is not None:
            if len(self._senders) >= MAX_CONNECTIONS:
                logger.warning(log.event("kv connection refused", because="too many", limit=MAX_CONNECTIONS))
                sock.close()
                continue
            self._num_accepted += 1
            sender_id = self._num_accepted
            link = ReceiverLink(
                sock,
                self._secret,
                self._incarnation,
                self._layout,
                lambda sender_id=sender_id: self._register_sender(sender_id),
            )
            sender = self._senders[sender_id] = _SenderConnection(sender_id, link, self._now_s(), self._now_s())
            self._reactor.watch(link.channel, lambda sender=sender: self._on_socket_ready(sender))

    def _register_sender(self, sender_id: int) -> RemoteMemoryInfo:
        assert sender_id in self._senders, "a sender is registered while it is connected"
        invitation = self._backend.register_sender(sender_id)
        self._receiver.add_sender(sender_id, self._senders[sender_id].link.channel)
        return invitation

    def _on_socket_ready(self, sender: _SenderConnection) -> None:
        try:
            if sender.is_ignored:
                sender.link.channel.discard_input()
                return
            for message in sender.link.messages(self._num_blocks):
                self._receiver.receive(sender.sender_id, message, self._now_s())
            self._flush(sender)
        except ProtocolViolation as fault:
            self._stop_listening_to(sender, str(fault))
        except MalformedMessage as garbled:
            self._stop_listening_to(sender, str(garbled))
        except LinkClosed as lost:
            self._close_connection(sender, str(lost))
        else:
            if sender.link.is_refused:
                self._close_connection(sender, "it was refused")

    def _flush(self, sender: _SenderConnection) -> None:
        if sender.is_ignored:
            return
        channel = sender.link.channel
        try:
            channel.flush()
        except LinkClosed as lost:
            # Not closed: the end of the writer's own stream is still to come, and until then it may write our memory.
            self._stop_listening_to(sender, str(lost))
            return
        self._reactor.watch(channel, lambda: self._on_socket_ready(sender), for_writing=channel.wants_to_write)

    def _check_idle(self, sender: _SenderConnection, now_s: float) -> None:
        received = sender.link.channel.num_bytes_received
        assert received >= sender.num_received, "the number of received bytes only grows"
        if received != sender.num_received:
            sender.num_received, sender.active_s = received, now_s
        if not sender.link.is_open and now_s - sender.connected_s > HANDSHAKE_TIMEOUT_S:
            self._close_connection(sender, f"it has not introduced itself within {HANDSHAKE_TIMEOUT_S:g} s")
        elif now_s - sender.active_s > IDLE_TIMEOUT_S and not self._receiver.has_open_lease(sender.sender_id):
            self._close_connection(sender, "it has been idle")

    def _stop_listening_to(self, sender: _SenderConnection, reason: str) -> None:
        """Ends our stream and discards the writer's until its end. The connection is closed then, not before, because the
        KvReceiver frees the leases of a closed connection."""
        if sender.sender_id in self._senders and not sender.is_ignored:
            sender.is_ignored = True
            logger.warning(log.event("kv connection given up", writer=sender.sender_id, because=reason))
            self._receiver.stop_listening_to(sender.sender_id, reason)
            sender.link.channel.shutdown_write()
            self._reactor.watch(sender.link.channel, lambda: self._on_socket_ready(sender))

    def _close_connection(self, sender: _SenderConnection, reason: str) -> None:
        if self._senders.pop(sender.sender_id, None) is None:
            return
        self._reactor.forget(sender.link.channel)
        sender.link.close()
        self._receiver.remove_sender(sender.sender_id, reason)
