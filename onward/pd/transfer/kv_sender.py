"""The prefill worker's side of all transfers: opens, feeds and stops pushes, and keeps the connections to peers.

There is one connection for each worker incarnation that pushes go to. It is kept for later pushes, and closed when it
was idle for long.
"""

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from onward import log
from onward.pd.transfer.authenticated_link import SenderLink
from onward.pd.transfer.backend import TransferFailed
from onward.pd.transfer.framed_channel import LinkClosed
from onward.pd.transfer.handshake import ClusterSecret
from onward.pd.transfer.page_geometry import PageGeometry
from onward.pd.transfer.push_job import ComputedBlocks, PushJob
from onward.pd.transfer.push_session import PushSession
from onward.pd.transfer.socket_reactor import SocketReactor
from onward.proto.kv_transfer import KvEndpoint, KvLayout, KvPush, KvReport, PushFailed, PushQuiesced

IDLE_TIMEOUT_S = 60.0
MAX_SESSIONS = 128
_MAX_STOPPED = 4096
"""Leases of stopped pushes that are remembered, because the command to stop a push may overtake the step that opens
it."""

logger = logging.getLogger(__name__)


class KvSender:
    def __init__(
        self,
        memory: np.ndarray,
        geometry: PageGeometry,
        layout: KvLayout,
        reactor: SocketReactor,
        *,
        secret: ClusterSecret,
        has_key: bool,
        layers_done: Callable[[], int],
        report: Callable[[KvReport], None],
        now_s: Callable[[], float],
    ) -> None:
        self._memory, self._geometry, self._layout, self._reactor = memory, geometry, layout, reactor
        self._secret, self._has_key = secret, has_key
        self._layers_done, self._report_up, self._now_s = layers_done, report, now_s
        self._peers: dict[KvEndpoint, PushSession] = {}
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

    def open_push(self, push: KvPush) -> None:
        if push.lease_id in self._stopped:
            return
        if push.lease_id in self._jobs:
            self._jobs[push.lease_id].stop("the lease was pushed to a second time")
            return
        try:
            peer = self._session_for(push.endpoint)
        except LinkClosed as lost:
            self._report(PushFailed(push.lease_id, str(lost)))
            return
        job = PushJob(push, self._geometry)
        self._jobs[push.lease_id] = job
        peer.open_push(job)

    def send_computed(self, computed: ComputedBlocks) -> None:
        """Adds computed blocks to their push. Blocks of a push that is over are ignored."""
        if computed.lease_id in self._jobs:
            self._jobs[computed.lease_id].add_blocks(computed)

    def stop_push(self, lease_id: str) -> None:
        """Stops a push. The reply is `PushQuiesced`, at once or when none of its batches is in flight any more."""
        self._stopped[lease_id] = None
        while len(self._stopped) > _MAX_STOPPED:
            self._stopped.popitem(last=False)
        if lease_id in self._jobs:
            self._jobs[lease_id].stop(None)
        else:
            self._report_up(PushQuiesced(lease_id))

    def run_once(self) -> None:
        now_s = self._now_s()
        layers_done: int | None = None
        for peer in list(self._peers.values()):
            if peer.is_computing:
                layers_done = self._layers_done() if layers_done is None else layers_done
                peer.on_layers_done(layers_done)
            self._run_isolated(peer, lambda p=peer: p.run_once(now_s))
            if peer.is_idle and now_s - peer.idle_since_s > IDLE_TIMEOUT_S:
                self._end(peer, "it was idle")

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self._end(peer, "the worker is leaving")

    def _session_for(self, endpoint: KvEndpoint) -> PushSession:
        if endpoint in self._peers:
            return self._peers[endpoint]
        if len(self._peers) >= MAX_SESSIONS:
            self._close_idle_session()
            assert len(self._peers) < MAX_SESSIONS, "closing an idle session makes room for another"
        link = SenderLink(endpoint, self._layout, self._secret, self._has_key)
        peer = PushSession(endpoint, link, self._memory, self._geometry, report=self._report, now_s=self._now_s())
        try:
            link.connect()
        except LinkClosed:
            link.close()
            raise
        self._peers[endpoint] = peer
        self._watch(peer)
        return peer

    def _close_idle_session(self) -> None:
        idle = [peer for peer in self._peers.values() if peer.is_idle]
        if not idle:
            raise LinkClosed(f"there are connections to {MAX_SESSIONS} workers already")
        self._end(min(idle, key=lambda peer: peer.idle_since_s), "another one is needed")

    def _watch(self, peer: PushSession) -> None:
        action = functools.partial(self._run_isolated, peer, peer.on_socket_ready)
        self._reactor.watch(peer.link.channel, action, for_writing=peer.link.wants_to_write)

    def _run_isolated(self, peer: PushSession, action: Callable[[], None]) -> None:
        """Runs an action for one peer. A failure ends the connection to this peer and nothing else."""
        if peer.is_closed:
            return
        try:
            action()
        except (LinkClosed, TransferFailed) as lost:
            logger.warning(log.event("kv connection lost", to=peer.endpoint.incarnation, because=str(lost)))
            self._end(peer, str(lost))
            return
        self._watch(peer)

    def _end(self, peer: PushSession, reason: str) -> None:
        if self._peers.pop(peer.endpoint, None) is None:
            return
        self._reactor.forget(peer.link.channel)
        peer.close(reason)

    def _report(self, report: KvReport) -> None:
        """Reports the end of a push: every report of a push is its last."""
        self._jobs.pop(report.lease_id, None)
        self._report_up(report)
