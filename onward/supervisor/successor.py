"""The new server that replaces this one (`onward serve --adopt`), seen from the supervisor of the old one.

Until `TakeOver` this server serves as before, and the end of the new one changes nothing. Then the supervisor ends all
its processes, releases the memory, and waits until the new server serves. If the new one dies before that, this server
starts again. So there is always a server that works, and there are never two whose engines write the same memory.
"""

import contextlib
import logging
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import msgspec

from onward import log
from onward.proto.adoption import (
    ADOPTION_PROTOCOL,
    AdoptionAborted,
    AdoptionRequest,
    AdoptRefused,
    FromSuccessor,
    MemoryOffer,
    MemoryReleased,
    NowServing,
    ServerOffer,
    TakeOver,
)
from onward.supervisor.adoption_socket import AdoptionPeer, accept_peer, adoption_address, listen_at
from onward.transport.control_channel import ChannelClosed
from onward.version import __version__

START_TIMEOUT_S = 60.0
"""How long the new server may take from `MemoryReleased` until it serves. It has loaded everything before."""

logger = logging.getLogger(__name__)


class SuccessorEvent(Enum):
    TAKE_OVER = "take over"
    GONE = "gone"
    GONE_MEMORY_SUSPECT = "gone, memory suspect"
    """The new server's standby worker has died of a fault, and may have written to the memory that it had mapped."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Sockets and memory that a new server gets before it starts."""

    sockets: tuple[int, ...]
    """The listening socket for clients, and the one for decode instances, if there is one."""
    memory: MemoryOffer | None
    memory_fds: tuple[int, ...] = ()


class SuccessorListener:
    """Accepts new servers and exchanges messages with one at a time; meanwhile others are refused. If it cannot
    listen, that is only logged, and this server cannot be adopted."""

    def __init__(self, host: str, port: int, make_offer: Callable[[], Offer]) -> None:
        self._host, self._port, self._make_offer = host, port, make_offer
        self._listener: socket.socket | None = None
        self._successor: AdoptionPeer | None = None
        self._is_taking_over = False
        """Whether this new server has sent `TakeOver`."""

    def open(self) -> None:
        if self._listener is not None:
            return
        try:
            self._listener = listen_at(adoption_address(self._host, self._port))
        except OSError as fault:
            logger.warning(log.event("this server cannot be adopted", why=fault))

    def poll(self) -> SuccessorEvent | None:
        """Accepts a new server, answers it, and returns what the supervisor has to act on."""
        self._accept()
        if self._successor is None:
            return None
        try:
            message = self._successor.channel.receive()
            match message:
                case AdoptionRequest():
                    self._answer(self._successor, message)
                case TakeOver():
                    self._is_taking_over = True
                    return SuccessorEvent.TAKE_OVER
                case AdoptionAborted():
                    self._drop()
                    return SuccessorEvent.GONE_MEMORY_SUSPECT if message.is_memory_suspect else SuccessorEvent.GONE
                case _:
                    pass
        except (ChannelClosed, msgspec.DecodeError):
            self._drop()
            return SuccessorEvent.GONE
        return None

    def release(self, kv_memory: str) -> bool:
        """Sends `MemoryReleased`, after every other process of this server has died. Returns False if the new server that
        has asked for it is known to be gone. Another one that has connected since stays connected."""
        if self._successor is None or not self._is_taking_over:
            return False
        self._close_listener()  # the new server listens there next
        # If the new server is gone, its unread messages may say that the memory is suspect, so the memory counts as
        # released. `await_serving` finds the end of the connection.
        with contextlib.suppress(ChannelClosed):
            if not self._successor.channel.send(MemoryReleased(kv_memory)):
                self._kill()
                return False
        return True

    def await_serving(self) -> bool:
        """Waits until the new server serves. Returns False if it is dead; one that does not serve in time is killed."""
        assert self._successor is not None, "a released memory has a new owner"
        readable, _, _ = select.select([self._successor.channel.fileno()], [], [], START_TIMEOUT_S)
        with contextlib.suppress(ChannelClosed, msgspec.DecodeError):
            if readable and isinstance(self._successor.channel.receive(), NowServing):
                return True
        self._kill()
        return False

    def close(self) -> None:
        self._drop()
        self._close_listener()

    def _accept(self) -> None:
        if self._listener is None or (peer := accept_peer(self._listener, FromSuccessor)) is None:
            return
        if self._successor is None:
            self._successor = peer
            return
        with contextlib.suppress(ChannelClosed):
            peer.channel.send(AdoptRefused("another server is taking over already"))
        peer.close()

    def _answer(self, successor: AdoptionPeer, request: AdoptionRequest) -> None:
        if request.protocol != ADOPTION_PROTOCOL:
            successor.channel.send(
                AdoptRefused(f"it speaks adoption protocol {ADOPTION_PROTOCOL}, and not {request.protocol}")
            )
            self._drop()
            return
        offer = self._make_offer()
        server = ServerOffer(len(offer.sockets) > 1, offer.memory is not None, __version__)
        logger.info(log.event("new server connected", pid=successor.pid, offers_memory=offer.memory is not None))
        successor.channel.send(server, offer.sockets)
        if offer.memory is not None:
            successor.channel.send(offer.memory, offer.memory_fds)

    def _kill(self) -> None:
        """Kills the new server and waits until it has ended. Its children end with it."""
        assert self._successor is not None, "there is a new server to end"
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._successor.pidfd, signal.SIGKILL)
        select.select([self._successor.pidfd], [], [])
        self._drop()

    def _drop(self) -> None:
        if self._successor is not None:
            self._successor.close()
            self._successor, self._is_taking_over = None, False

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
