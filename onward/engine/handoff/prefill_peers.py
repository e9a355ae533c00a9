"""The prefill instances that a decode instance knows, and which of them are worth asking now.

Some are known from the beginning, others because a request names them. One that cannot be reached, was silent, or cannot
exchange KV with us is left alone for a while. Knows nothing of requests and handoffs.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from onward.log import event as log_event
from onward.pd import handoff_errors
from onward.proto.engine import ErrorInfo
from onward.proto.handoff import Ping, ToPrefill

log = logging.getLogger(__name__)

PING_INTERVAL_S = 0.5
UNREACHABLE_AFTER_S = 1.0
"""How long requests wait for a connection to a peer to be made."""
SILENCE_PAUSE_S = 2.0
"""How long a peer that was silent is not asked."""
MISMATCH_PAUSE_S = 60.0
"""How long a peer that cannot exchange KV with this instance is not asked. It stays incompatible until one of the
two restarts."""
FORGET_AFTER_S = 60.0
"""A peer is forgotten if no request has named it for this time."""


@dataclass(slots=True)
class PrefillPeerState:
    incarnation: str = ""
    unreachable_since_s: float | None = None
    paused_until_s: float = 0.0
    last_named_s: float = 0.0
    """When a request named it last."""
    is_reported_unreachable: bool = False
    """It was said in the log that it cannot be reached."""

    def is_unreachable(self, now_s: float) -> bool:
        return self.unreachable_since_s is not None and now_s - self.unreachable_since_s >= UNREACHABLE_AFTER_S

    def is_available(self, now_s: float) -> bool:
        return self.paused_until_s <= now_s and not self.is_unreachable(now_s)


class PrefillPeers:
    def __init__(self, always_known: Iterable[str]) -> None:
        self._peers = {address: PrefillPeerState() for address in always_known}
        self._always_known = frozenset(self._peers)
        self.addresses = self._always_known
        """Addresses of all peers that are known now."""
        self._next_ping_s = 0.0

    def __contains__(self, address: str) -> bool:
        return address in self._peers

    def add(self, address: str, now_s: float) -> None:
        """Adds a peer that a request names. It stays known for as long as requests name it."""
        if address not in self._peers:
            self._peers[address] = PrefillPeerState()
            self.addresses = frozenset(self._peers)
        self._peers[address].last_named_s = now_s

    def is_available(self, address: str, now_s: float) -> bool:
        return self._peers[address].is_available(now_s)

    def unavailable(self, now_s: float) -> set[str]:
        """Returns the peers that no request should wait for. Logs each unreachable peer once."""
        for address, peer in self._peers.items():
            if peer.is_unreachable(now_s) and not peer.is_reported_unreachable:
                peer.is_reported_unreachable = True
                hint = "is it running, and does it have the same cluster key?"
                log.warning(log_event("prefill peer cannot be reached", peer=address, hint=hint))
        return {address for address, peer in self._peers.items() if not peer.is_available(now_s)}

    def mark_reachable(self, address: str) -> None:
        peer = self._peers[address]
        peer.unreachable_since_s = None
        if peer.is_reported_unreachable:
            peer.is_reported_unreachable = False
            log.info(log_event("prefill peer is back", peer=address))

    def mark_unreachable(self, address: str, now_s: float) -> None:
        if self._peers[address].unreachable_since_s is None:
            self._peers[address].unreachable_since_s = now_s

    def update_incarnation(self, address: str, incarnation: str, now_s: float) -> str | None:
        """Records the incarnation that a peer reports. Returns the previous incarnation if the peer has been
        replaced."""
        peer = self._peers[address]
        before, peer.incarnation = peer.incarnation, incarnation
        if before in ("", incarnation):
            return None
        peer.paused_until_s = now_s  # what was wrong with its predecessor may be right now
        return before

    def pause_after(self, error: ErrorInfo, address: str | None, now_s: float) -> None:
        """Makes the peer unavailable for a while if the error shows a fault of the peer itself: a silent worker, or a
        different KV layout. Ignores any other error, and a peer that is not known."""
        pauses_s = {handoff_errors.SILENCE_STAGE: SILENCE_PAUSE_S, "pd_layout_mismatch": MISMATCH_PAUSE_S}
        pause_s = pauses_s.get(error.stage or "") or pauses_s.get(error.code)
        if pause_s is None or address is None or (peer := self._peers.get(address)) is None:
            return
        if peer.paused_until_s <= now_s:
            log.warning(log_event("prefill peer is left alone", peer=address, seconds=pause_s, because=error.message))
        peer.paused_until_s = now_s + pause_s

    def due_pings(self, in_use: Collection[str | None], now_s: float) -> list[tuple[str, ToPrefill]]:
        """Returns a ping for each peer that is due, which asks whether the peer's incarnation has changed. Forgets
        peers that no request has named for a long time."""
        if now_s < self._next_ping_s:
            return []
        self._next_ping_s = now_s + PING_INTERVAL_S
        kept = self._always_known | set(in_use)
        for address in [a for a, p in self._peers.items() if a not in kept and now_s - p.last_named_s > FORGET_AFTER_S]:
            del self._peers[address]
        if len(self.addresses) != len(self._peers):
            self.addresses = frozenset(self._peers)
        return [(address, Ping()) for address in self._peers]
