"""Receives changes for a cluster from commands on this machine (`onward upgrade`, `onward scale`).

It knows neither what the changes mean nor how they are carried out.
"""

import contextlib
import logging
import socket
from dataclasses import dataclass, field

import msgspec

from onward import log
from onward.proto.cluster_control import ScaleEnded, ToCluster, UpgradeEnded, UpgradeInstances
from onward.supervisor.adoption_socket import AdoptionPeer, accept_peer, cluster_address, listen_at
from onward.transport.control_channel import ChannelClosed

MAX_SILENT_REQUESTERS = 8
"""Commands that are connected and have not said yet what they want."""
SILENT_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ChangeRequest:
    requester: AdoptionPeer
    change: ToCluster


@dataclass(slots=True)
class ClusterControl:
    _listener: socket.socket | None
    _silent: list[tuple[AdoptionPeer, float]] = field(default_factory=list)
    """Connected commands, and until when they may say what they want."""

    def receive(self, now_s: float) -> ChangeRequest | None:
        """Returns a change that a command has requested, or None. The caller must close the requester."""
        if self._listener is not None and len(self._silent) < MAX_SILENT_REQUESTERS:
            peer = accept_peer(self._listener, ToCluster)
            if peer is not None:
                self._silent.append((peer, now_s + SILENT_S))
        for entry in list(self._silent):
            peer, until_s = entry
            try:
                change = peer.channel.receive()
            except (ChannelClosed, msgspec.DecodeError):
                change, until_s = None, now_s
            if change is not None:
                self._silent.remove(entry)
                return ChangeRequest(peer, change)
            if until_s <= now_s:
                self._silent.remove(entry)
                peer.close()
        return None

    def close(self) -> None:
        for peer, _ in self._silent:
            peer.close()
        self._silent.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def listen_for_changes(port: int) -> ClusterControl:
    """Returns the control of the cluster that serves its clients on `port`. It receives nothing if its name is taken."""
    try:
        return ClusterControl(listen_at(cluster_address(port)))
    except OSError as fault:
        logger.warning(log.event("this cluster cannot be changed while it runs", why=fault))
        return ClusterControl(None)


def refuse_change(request: ChangeRequest, error: str) -> None:
    ended = UpgradeEnded(error) if isinstance(request.change, UpgradeInstances) else ScaleEnded(error)
    with contextlib.suppress(ChannelClosed):
        request.requester.channel.send(ended)
    request.requester.close()
