"""The engine's sockets to other instances: one to each prefill peer, and one where decode instances ask us.

Sending never waits: what a peer does not take counts as lost, and the protocol repeats it.
"""

import logging
from collections.abc import Iterator

import msgspec

from onward import log
from onward.engine.handoff.handoff_manager import HandoffOutbox
from onward.errors import OnwardError
from onward.proto.control import StartEngine
from onward.proto.handoff import ToDecode, ToPrefill
from onward.transport.handoff_sockets import HandoffClientSocket, HandoffServerSocket
from onward.transport.zmq_sockets import SocketPoller

logger = logging.getLogger(__name__)


class PeerLinks:
    def __init__(self, wires: SocketPoller, start: StartEngine) -> None:
        self._wires, self._start = wires, start
        self._known: frozenset[str] = frozenset()
        self._prefill: dict[str, HandoffClientSocket] = {}
        self._decode: HandoffServerSocket | None = None
        if not start.awaits_turn:
            self.listen()

    def listen(self) -> None:
        """Accepts connections of decode instances, if this instance serves them."""
        fd = self._start.handoff_fd
        if fd >= 0 and self._decode is None:
            self._decode = self._wires.handoff_server(fd, self._start.cluster_key)

    def send(self, outgoing: HandoffOutbox) -> list[tuple[str, bool]]:
        """Sends all messages, and first opens and closes connections to match `outgoing.prefill_peers`. Returns, for
        each message to a prefill peer, the peer's address and whether the message could be sent."""
        if outgoing.prefill_peers != self._known:
            self._update_peers(outgoing.prefill_peers)
        reached = [(address, self._send_to_prefill(address, message)) for address, message in outgoing.to_prefill]
        if self._decode is not None:
            for decode, message in outgoing.to_decode:
                self._decode.send(decode, message)
        return reached

    def _update_peers(self, addresses: frozenset[str]) -> None:
        for address in self._known - addresses:
            if (peer := self._prefill.pop(address, None)) is not None:
                self._wires.drop(peer)
        for address in addresses - self._known:
            self._open(address)
        self._known = addresses

    def _open(self, address: str) -> None:
        """Opens a connection to a peer. Requests name peers, so an invalid address, or one that may not be used without
        a key, is treated as an unreachable peer."""
        try:
            peer = self._wires.handoff_client(address, self._start.cluster_key, self._start.incarnation)
        except OnwardError as fault:
            logger.warning(log.event("prefill peer refused", peer=address, because=fault.message))
            return
        self._prefill[address] = peer

    def _send_to_prefill(self, address: str, message: ToPrefill) -> bool:
        peer = self._prefill.get(address)
        return peer is not None and peer.send(message)

    def receive_from_prefill(self, limit: int) -> Iterator[tuple[str, ToDecode]]:
        for address, peer in list(self._prefill.items()):
            for _ in range(limit):
                try:
                    message = peer.receive()
                except msgspec.DecodeError as fault:
                    logger.warning(log.event("message dropped", peer=address, fault=str(fault)))
                    continue
                if message is None:
                    break
                yield address, message

    def receive_from_decode(self, limit: int) -> Iterator[tuple[str, ToPrefill]]:
        if self._decode is None:
            return
        for _ in range(limit):
            try:
                received = self._decode.receive()
            except msgspec.DecodeError as fault:
                logger.warning(log.event("message dropped", fault=str(fault)))
                continue
            if received is None:
                return
            yield received
