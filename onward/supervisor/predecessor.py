"""The old server, seen from the supervisor of the new one that replaces it (`onward serve --adopt`)."""

import contextlib
import logging
import os
import select
import signal
import socket
from dataclasses import dataclass
from enum import Enum

import msgspec

from onward import log
from onward.errors import StartupError
from onward.proto.adoption import (
    ADOPTION_PROTOCOL,
    AdoptionAborted,
    AdoptionRequest,
    AdoptRefused,
    FromPredecessor,
    MemoryOffer,
    MemoryReleased,
    NowServing,
    ServerOffer,
    TakeOver,
)
from onward.proto.control import KeptWeights
from onward.supervisor.adoption_socket import AdoptionPeer, adoption_address, connect_to
from onward.transport.control_channel import ChannelClosed

OFFER_TIMEOUT_S = 10.0
RELEASE_TIMEOUT_S = 30.0
"""Limit from `TakeOver` to `MemoryReleased`. The old server needs less to end its processes, each within its own
limit."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OfferedMemory:
    """KV memory and weights that the old server offers to the new one, as the new server has received them. Owns the
    file descriptors: `close` closes them, which leaves the old server's own descriptors open."""

    offer: MemoryOffer
    pool_fd: int
    hashes_fd: int
    weights: KeptWeights | None

    def close(self) -> None:
        fds = [self.pool_fd, self.hashes_fd, -1 if self.weights is None else self.weights.fd]
        for fd in fds:
            if fd >= 0:
                os.close(fd)


class Release(Enum):
    """How the old server has ended after `TakeOver`."""

    WITH_MEMORY = "with memory"
    WITHOUT_MEMORY = "without memory"
    """It gave its memory up, or died before it could confirm that no process writes it any more."""


class Predecessor:
    """A connection to the old server, with the sockets and the memory that it has offered. `close` closes the connection,
    and the memory unless it was taken."""

    def __init__(
        self,
        peer: AdoptionPeer,
        listening: socket.socket,
        handoff: socket.socket | None,
        memory: OfferedMemory | None = None,
    ) -> None:
        self.listening, self.handoff, self.memory = listening, handoff, memory
        self._peer = peer
        self._adopted_name = ""
        """The old server's name for the memory that was taken; empty: none was."""
        self._takeover_requested = False
        self._takes_over_by_s = 0.0

    def fileno(self) -> int:
        return self._peer.channel.fileno()

    @property
    def is_takeover_requested(self) -> bool:
        """Whether `TakeOver` was sent."""
        return self._takeover_requested

    def take_memory(self) -> OfferedMemory:
        """Returns the offered memory. The caller must close its descriptors."""
        memory, self.memory = self.memory, None
        assert memory is not None, "memory was offered, and is taken once"
        self._adopted_name = memory.offer.kv_memory
        return memory

    def take_over(self, now_s: float) -> None:
        assert not self._takeover_requested, "a server is taken over once"
        self._takeover_requested, self._takes_over_by_s = True, now_s + RELEASE_TIMEOUT_S
        with contextlib.suppress(ChannelClosed):  # `released` detects it
            self._peer.channel.send(TakeOver())

    def released(self, now_s: float) -> Release | None:
        """Returns None while the old server still has processes. Kills an old server that does not end in time, so that
        there are never two servers."""
        if self._takeover_requested and now_s >= self._takes_over_by_s:
            logger.warning(log.event("old server killed", pid=self._peer.pid, cause="it did not hand over in time"))
            self._kill()
            return Release.WITHOUT_MEMORY
        try:
            message = self._peer.channel.receive()
        except (ChannelClosed, msgspec.DecodeError) as fault:
            logger.warning(log.event("old server lost", pid=self._peer.pid, cause=fault))
            self._kill()
            return Release.WITHOUT_MEMORY
        if not isinstance(message, MemoryReleased):
            return None
        is_adopted = bool(self._adopted_name) and message.kv_memory == self._adopted_name
        return Release.WITH_MEMORY if is_adopted else Release.WITHOUT_MEMORY

    def send_serving(self) -> None:
        with contextlib.suppress(ChannelClosed):
            self._peer.channel.send(NowServing())

    def abort(self, *, is_memory_suspect: bool) -> None:
        with contextlib.suppress(ChannelClosed):
            self._peer.channel.send(AdoptionAborted(is_memory_suspect))

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
            self.memory = None
        self._peer.close()

    def _kill(self) -> None:
        """Kills the old server and waits until it has ended. Its children end with it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._peer.pidfd, signal.SIGKILL)
        select.select([self._peer.pidfd], [], [])


def find_predecessor(host: str, port: int) -> Predecessor | None:
    """Connects to the server at this address and receives its offers. Returns None if no server listens there. Raises
    `StartupError` if the server cannot be replaced."""
    peer = connect_to(adoption_address(host, port), FromPredecessor)
    if peer is None:
        return None
    try:
        peer.channel.send(AdoptionRequest(ADOPTION_PROTOCOL))
        return receive_offers(peer)
    except (ChannelClosed, msgspec.DecodeError) as fault:
        peer.close()
        raise StartupError(f"--adopt: the server on {host}:{port} did not offer itself: {fault}") from fault
    except StartupError:
        peer.close()
        raise


def receive_offers(peer: AdoptionPeer) -> Predecessor:
    """Receives the old server's answer to an `AdoptionRequest`. Raises `StartupError` if it refuses."""
    server = _receive(peer)
    if isinstance(server, AdoptRefused):
        raise StartupError(f"--adopt: the old server refuses: {server.message}")
    fds = peer.channel.take_fds()
    if not isinstance(server, ServerOffer) or len(fds) != 1 + server.has_handoff_socket:
        raise ChannelClosed("its offer is incomplete: are there too many open files?")
    listening, *others = [socket.socket(fileno=fd) for fd in fds]
    memory = _receive_memory(peer) if server.has_memory else None
    predecessor = Predecessor(peer, listening, others[0] if others else None, memory)
    logger.info(log.event("old server found", pid=peer.pid, version=server.version, offers_memory=server.has_memory))
    return predecessor


def _receive_memory(peer: AdoptionPeer) -> OfferedMemory | None:
    offer = _receive(peer)
    if not isinstance(offer, MemoryOffer):
        raise ChannelClosed(f"{type(offer).__name__} instead of its memory")
    fds = peer.channel.take_fds()
    if len(fds) != 2 + (offer.weights is not None):
        for fd in fds:
            os.close(fd)
        return None
    weights = None if offer.weights is None else msgspec.structs.replace(offer.weights, fd=fds[2])
    return OfferedMemory(offer, fds[0], fds[1], weights)


def _receive(peer: AdoptionPeer) -> FromPredecessor:
    readable, _, _ = select.select([peer.channel.fileno()], [], [], OFFER_TIMEOUT_S)
    if not readable:
        raise ChannelClosed(f"no answer within {OFFER_TIMEOUT_S:g} s")
    message = peer.channel.receive()
    if message is None:
        raise ChannelClosed("no message")
    return message
