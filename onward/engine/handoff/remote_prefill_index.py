"""Index of remote prefills on a decode instance: by request, by handoff, by peer, and by what they wait for.

A remote prefill is at one peer, or waits for one of several peers to become available, or waits for local blocks. This
module only stores them; `RemotePrefillClient` decides.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from onward.engine.request import Request
from onward.engine.scheduling.request_queue import RequestQueue
from onward.proto.engine import ErrorInfo
from onward.timers import Timers


@dataclass(slots=True, eq=False)
class RemotePrefill:
    """A request whose prompt a prefill instance computes or will compute."""

    request: Request
    started_s: float
    peer_address: str | None = None
    handoff_id: int | None = None
    requested_s: float = 0.0
    attempts: Counter[str] = field(default_factory=Counter)
    num_heartbeats: int = 0
    """How often its peer has said that it is still at work, while it was the peer's turn."""
    awaited_peers: frozenset[str] | None = None
    """None of these peers can be asked now; one of them is as soon as it can."""
    error: ErrorInfo | None = None


class RemotePrefillIndex:
    def __init__(self) -> None:
        self._by_request: dict[Request, RemotePrefill] = {}
        self._by_handoff_id: dict[int, RemotePrefill] = {}
        self._by_peer: dict[str, dict[int, RemotePrefill]] = {}
        self._awaiting_peers: dict[frozenset[str], dict[Request, RemotePrefill]] = {}
        """By the peers that they wait for: one look at a peer answers for all of them."""
        self._give_up_timers: Timers[Request] = Timers()
        """When to stop waiting for a peer, for each of these requests."""
        self.awaiting_blocks = RequestQueue()
        """We have refused blocks for these ourselves: no peer is asked again before there are some."""
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[RemotePrefill]:
        return iter(self._by_request.values())

    def __getitem__(self, request: Request) -> RemotePrefill:
        return self._by_request[request]

    def get(self, request: Request) -> RemotePrefill | None:
        return self._by_request.get(request)

    def of_handoff(self, handoff_id: int) -> RemotePrefill | None:
        return self._by_handoff_id.get(handoff_id)

    def at_peer(self, address: str) -> list[RemotePrefill]:
        return list(self._by_peer.get(address, {}).values())

    def num_at_peer(self, address: str) -> int:
        return len(self._by_peer.get(address, ()))

    @property
    def peers_in_use(self) -> set[str]:
        return self._by_peer.keys() | {peer for peers in self._awaiting_peers for peer in peers}

    def add(self, request: Request, now_s: float) -> RemotePrefill:
        task = self._by_request[request] = RemotePrefill(request, now_s)
        self.num_prompt_tokens += request.num_prompt
        return task

    def remove(self, task: RemotePrefill) -> None:
        """Removes the task of a request that needs no peer any more: its KV has arrived, its prompt is computed here,
        or it has ended. The task's handoff must have ended before."""
        self.stop_waiting(task)
        self.num_prompt_tokens -= task.request.num_prompt
        del self._by_request[task.request]

    def start_handoff(self, task: RemotePrefill, address: str, handoff_id: int, now_s: float) -> None:
        task.peer_address, task.handoff_id, task.requested_s = address, handoff_id, now_s
        task.attempts[address] += 1
        self._by_handoff_id[handoff_id] = self._by_peer.setdefault(address, {})[handoff_id] = task

    def end_handoff(self, task: RemotePrefill) -> None:
        """Removes the task's handoff, if it has one. The task may start another one afterwards."""
        if task.handoff_id is None:
            return
        assert task.peer_address is not None, "a handoff has a peer"
        del self._by_handoff_id[task.handoff_id]
        del self._by_peer[task.peer_address][task.handoff_id]
        if not self._by_peer[task.peer_address]:
            del self._by_peer[task.peer_address]
        task.handoff_id = None

    def wait_for_blocks(self, task: RemotePrefill) -> None:
        if task.request not in self.awaiting_blocks:
            self.awaiting_blocks.add(task.request)

    def wait_for_peers(self, task: RemotePrefill, peers: frozenset[str], give_up_at_s: float) -> None:
        task.awaited_peers = peers
        self._awaiting_peers.setdefault(peers, {})[task.request] = task
        self._give_up_timers.set_earliest(task.request, give_up_at_s)

    def stop_waiting(self, task: RemotePrefill) -> None:
        self.awaiting_blocks.discard(task.request)
        if task.awaited_peers is not None:
            waiting = self._awaiting_peers[task.awaited_peers]
            del waiting[task.request]
            if not waiting:
                del self._awaiting_peers[task.awaited_peers]
            task.awaited_peers = None
            self._give_up_timers.cancel(task.request)

    def take_askable(self, is_available: Callable[[str], bool], now_s: float) -> list[RemotePrefill]:
        """Tasks that wait for peers no longer: they have waited for too long, or one of their peers can be asked."""
        overdue = [self._by_request[request] for request in self._give_up_timers.take_due(now_s)]
        available = [waiting for peers, waiting in self._awaiting_peers.items() if any(map(is_available, peers))]
        tasks = list(dict.fromkeys(overdue + [task for waiting in available for task in waiting.values()]))
        for task in tasks:
            self.stop_waiting(task)
        return tasks
