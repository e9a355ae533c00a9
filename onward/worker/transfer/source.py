"""The prefill worker's side of all transfers: pushes as they are opened, fed and stopped, and the peers they go to.

One connection for each worker incarnation that pushes go to. It is kept for later ones, and closed when it was idle.
"""

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from onward import log
from onward.proto.kv_transfer import Endpoint, KvReport, Layout, Push, PushFailed, PushQuiet
from onward.worker.transfer.backend import TransferFailed
from onward.worker.transfer.channel import LinkLost
from onward.worker.transfer.geometry import Geometry
from onward.worker.transfer.handshake import Secret
from onward.worker.transfer.link import WriterLink
from onward.worker.transfer.peer import Peer
from onward.worker.transfer.poller import Poller
from onward.worker.transfer.push_job import Fed, PushJob

IDLE_S = 60.0
MAX_PEERS = 128
_MAX_STOPPED = 4096
"""Leases of stopped pushes that are remembered: the command to stop one may overtake the step that opens it."""

logger = logging.getLogger(__name__)


class Source:
    def __init__(
        self,
        memory: np.ndarray,
        geometry: Geometry,
        layout: Layout,
        poller: Poller,
        *,
        secret: Secret,
        has_key: bool,
        layers_done: Callable[[], int],
        report: Callable[[KvReport], None],
        now_s: Callable[[], float],
    ) -> None:
        self._memory, self._geometry, self._layout, self._poller = memory, geometry, layout, poller
        self._secret, self._has_key = secret, has_key
        self._layers_done, self._report_up, self._now_s = layers_done, report, now_s
        self._peers: dict[Endpoint, Peer] = {}
        self._jobs: dict[str, PushJob] = {}
        self._stopped: OrderedDict[str, None] = OrderedDict()

    @property
    def num_connections(self) -> int:
        return len(self._peers)

    @property
    def num_pushes(self) -> int:
        return len(self._jobs)

    @property
    def can_start(self) -> bool:
        return any(peer.can_start for peer in self._peers.values())

    @property
    def must_be_polled(self) -> bool:
        return any(peer.must_be_polled or peer.is_computing for peer in self._peers.values())

    def open(self, push: Push) -> None:
        if push.lease_id in self._stopped:
            return
        if push.lease_id in self._jobs:
            self._jobs[push.lease_id].give_up("the lease was pushed to a second time")
            return
        try:
            peer = self._peer(push.endpoint)
        except LinkLost as lost:
            self._report(PushFailed(push.lease_id, str(lost)))
            return
        job = PushJob(push, self._geometry)
        self._jobs[push.lease_id] = job
        peer.open(job)

    def feed(self, fed: Fed) -> None:
        """One that is over takes nothing more."""
        if fed.lease_id in self._jobs:
            self._jobs[fed.lease_id].feed(fed)

    def stop(self, lease_id: str) -> None:
        """Answered by `PushQuiet`: at once, or when nothing of it is under way."""
        self._stopped[lease_id] = None
        while len(self._stopped) > _MAX_STOPPED:
            self._stopped.popitem(last=False)
        if lease_id in self._jobs:
            self._jobs[lease_id].give_up(None)
        else:
            self._report_up(PushQuiet(lease_id))

    def turn(self) -> None:
        now_s = self._now_s()
        layers_done: int | None = None
        for peer in list(self._peers.values()):
            if peer.is_computing:
                layers_done = self._layers_done() if layers_done is None else layers_done
                peer.see_layers(layers_done)
            self._guard(peer, lambda p=peer: p.turn(now_s))
            if peer.is_idle and now_s - peer.idle_since_s > IDLE_S:
                self._end(peer, "it was idle")

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._end(peer, "the worker is leaving")

    def _peer(self, endpoint: Endpoint) -> Peer:
        if endpoint in self._peers:
            return self._peers[endpoint]
        if len(self._peers) >= MAX_PEERS:
            self._make_room()
        link = WriterLink(endpoint, self._layout, self._secret, self._has_key)
        peer = Peer(endpoint, link, self._memory, self._geometry, report=self._report, now_s=self._now_s())
        try:
            link.connect()
        except LinkLost:
            link.close()
            raise
        self._peers[endpoint] = peer
        self._watch(peer)
        return peer

    def _make_room(self) -> None:
        idle = [peer for peer in self._peers.values() if peer.is_idle]
        if not idle:
            raise LinkLost(f"there are connections to {MAX_PEERS} workers already")
        self._end(min(idle, key=lambda peer: peer.idle_since_s), "another one is needed")

    def _watch(self, peer: Peer) -> None:
        act = functools.partial(self._guard, peer, peer.listen)
        self._poller.watch(peer.link.channel, act, for_writing=peer.link.wants_to_write)

    def _guard(self, peer: Peer, act: Callable[[], None]) -> None:
        """What goes wrong with one peer ends that connection and nothing else."""
        if peer.is_over:
            return
        try:
            act()
        except (LinkLost, TransferFailed) as lost:
            logger.warning(log.event("kv connection lost", to=peer.endpoint.incarnation, because=str(lost)))
            self._end(peer, str(lost))
            return
        self._watch(peer)

    def _end(self, peer: Peer, reason: str) -> None:
        if self._peers.pop(peer.endpoint, None) is None:
            return
        self._poller.forget(peer.link.channel)
        peer.end(reason)

    def _report(self, report: KvReport) -> None:
        """Every report of a push is its last."""
        self._jobs.pop(report.lease_id, None)
        self._report_up(report)
