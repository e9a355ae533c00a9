"""A decode instance's prompts, computed by prefill instances: whom to ask, what becomes of it, and what else to do.

    WAITING ──ask a peer──> ASKED ──it offers, we have room──> GRANTED ──its KV is here──> RUNNING
                              │ ^                                │
               a failure: next peer, or compute it here <────────┘ (the lease is taken back)

The protocol itself is `pd.handoff.DecodeHandoffProtocol`; blocks are the scheduler's; this joins the two, and keeps a
task for each request that is out. No I/O: `take_messages` returns what is to be sent.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field

from onward.config import EngineConfig
from onward.engine.handoff.handoff_metrics import HandoffMetrics
from onward.engine.handoff.prefill_peers import PrefillPeers
from onward.engine.request import Request, RequestStatus
from onward.engine.scheduling import scheduling_policy
from onward.engine.scheduling.peer_write_leases import PeerWriteLease
from onward.engine.scheduling.request_queue import RequestQueue
from onward.engine.scheduling.scheduler import Scheduler
from onward.engine.token_processor import TokenProcessor
from onward.errors import RETRY_SOON_S, PdError
from onward.log import event as log_event
from onward.pd import handoff_errors
from onward.pd.handoff import (
    DecodeHandoffProtocol,
    GrantedLease,
    HandoffFailed,
    HandoffTimeouts,
    KvArrived,
    OfferReceived,
)
from onward.proto.engine import ErrorInfo
from onward.proto.error_info import to_error_info
from onward.proto.handoff import HandoffHeartbeat, PeerGone, Pong, PrefillDone, PrefillRequest, ToDecode, ToPrefill
from onward.proto.kv_transfer import (
    ExpectingWrites,
    KvCommand,
    KvEndpoint,
    KvReport,
    LeaseQuiesced,
    WriterLost,
    WritesComplete,
)
from onward.proto.step import SlotTokens, WorkerHello
from onward.timers import Timers

log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 0.05
"""How often to look whether those who could ask nobody can now."""

WORKER_CRASH_STAGE = "worker_crash"
"""The stage of an error that says: a worker died over this prompt."""
CANCELLED_BY_DECODE = ErrorInfo(
    "pd_prefill_failed", "PD Error: the decode instance needs this prompt no longer", stage="decode"
)


@dataclass(slots=True, eq=False)
class RemotePrefillTask:
    """One request that is out to have its prompt computed."""

    request: Request
    started_s: float
    peer_address: str | None = None
    handoff_id: int | None = None
    requested_s: float = 0.0
    attempts: Counter[str] = field(default_factory=Counter)
    num_heartbeats: int = 0
    """How often its peer has said that it is still at work, while it was the peer's turn."""
    awaits_blocks: bool = False
    """We have refused blocks for it ourselves: nobody is asked again before there are some."""
    awaited_peers: frozenset[str] | None = None
    """None of these peers can be asked now; one of them is as soon as it can."""
    error: ErrorInfo | None = None


class RemotePrefillClient:
    def __init__(
        self,
        config: EngineConfig,
        incarnation: str,
        worker: WorkerHello,
        scheduler: Scheduler,
        tokens: TokenProcessor,
        metrics: HandoffMetrics,
    ) -> None:
        self._config, self._scheduler, self._tokens, self._metrics = config, scheduler, tokens, metrics
        self._leases = scheduler.leases
        assert worker.kv_layout is not None, "a decode instance's worker has KV memory to share"
        self._layout, self._vocab_size = worker.kv_layout, worker.vocab_size
        self._endpoint: KvEndpoint | None = worker.kv_endpoint
        """None while there is no worker: then nobody is granted anything."""
        self._protocol = DecodeHandoffProtocol(
            incarnation, HandoffTimeouts(config.lease_s, config.offer_hold_s, config.handoff_timeout_s)
        )
        self._peers = PrefillPeers(config.prefill_peers)
        self._tasks: dict[Request, RemotePrefillTask] = {}
        self._num_prompt_tokens_out = 0
        self._by_handoff_id: dict[int, RemotePrefillTask] = {}
        self._by_peer: dict[str, dict[int, RemotePrefillTask]] = {}
        """Tasks under way at each peer, by address and handoff id."""
        self._awaiting_peer: dict[frozenset[str], dict[Request, RemotePrefillTask]] = {}
        """By the peers that they wait for: one look at a peer answers for all of them."""
        self._give_up_timers: Timers[Request] = Timers()
        """Of those: when nobody looks for a peer any longer."""
        self._awaiting_blocks = RequestQueue()
        self._commands: list[KvCommand] = []
        self._pings: list[tuple[str, ToPrefill]] = []
        self._next_retry_s = 0.0

    @property
    def addresses(self) -> frozenset[str]:
        """Of all prefill instances that we have to do with, now."""
        return self._peers.addresses

    @property
    def num_remote_prefills(self) -> int:
        """Requests that wait, here or at a peer, for their prompt to be computed."""
        return len(self._tasks)

    @property
    def num_remote_prompt_tokens(self) -> int:
        return self._num_prompt_tokens_out

    @property
    def idle(self) -> bool:
        return not self._tasks and self._leases.idle and self._protocol.idle

    def count_by_state(self) -> dict[str, int]:
        return self._protocol.count_by_state()

    def route_new_requests(self, now_s: float) -> None:
        """Decides where the prompts of those that are new in the queue are computed."""
        for request in self._scheduler.take_unrouted():
            if scheduling_policy.should_prefill_locally(
                request, self._scheduler.allocator.num_uncached_tokens(request), self._config
            ):
                request.prefill_locally = True
                continue
            if scheduling_policy.should_reschedule(request):
                self._reschedule_preempted(request, now_s)
                continue
            self._scheduler.start_remote_prefill(request)
            if request.scheduled_s is None:
                request.scheduled_s = now_s
            task = self._tasks[request] = RemotePrefillTask(request, now_s)
            self._num_prompt_tokens_out += request.num_prompt
            self._ask_next_peer(task, now_s)

    def receive(self, peer: str, message: ToDecode, now_s: float) -> None:
        if peer not in self._peers:
            return
        self._peers.mark_reachable(peer)
        if isinstance(message, HandoffHeartbeat):
            self._count_heartbeats(message)
        if isinstance(message, PrefillDone) and (task := self._by_handoff_id.get(message.handoff_id)):
            self._leases.on_peer_done(task.request, now_s)
        if not isinstance(message, Pong):
            self._protocol.receive(peer, message, now_s)
        elif previous_incarnation := self._peers.update_incarnation(peer, message.incarnation, now_s):
            # One that has started anew knows nothing of what its predecessor was asked.
            self._protocol.receive(peer, PeerGone(previous_incarnation), now_s)
        self._process_events(now_s)

    def num_peer_heartbeats(self, request: Request) -> int:
        """Grows as long as somebody works for this one, though nothing of it is here yet."""
        task = self._tasks.get(request)
        return task.num_heartbeats if task else 0

    def on_peer_send(self, peer: str, ok: bool, now_s: float) -> None:
        """Whether the last message to this peer could be sent. One that is away for long is not waited for."""
        if peer not in self._peers:
            return
        if ok:
            self._protocol.on_send_succeeded(peer, now_s)
            self._peers.mark_reachable(peer)
        else:
            self._protocol.on_send_failed(peer, now_s)
            self._peers.mark_unreachable(peer, now_s)

    def receive_kv_report(self, report: KvReport, now_s: float) -> None:
        self._cancel_abandoned(now_s)  # their leases have ended, though the worker may not know it yet
        lease = self._leases.on_report(report)
        handoff_id = None if lease is None else self._tasks[lease.request].handoff_id
        match report:
            case LeaseQuiesced():
                pass
            case ExpectingWrites() if lease is not None and handoff_id is not None:
                self._send_grant(handoff_id, lease, now_s)
            case WritesComplete() if handoff_id is not None:
                backend = self._endpoint.backend if self._endpoint else ""
                self._metrics.bytes.inc(backend, "in", by=report.num_bytes)
                self._metrics.seconds.inc(backend, "in", by=report.seconds)
                self._protocol.on_kv_received(handoff_id, report.checksums, now_s)
            case WriterLost() if handoff_id is not None:
                self._protocol.on_sender_lost(handoff_id, report.message, now_s)
            case _:
                self._metrics.unexpected_reports.inc()
        self._process_events(now_s)

    def tick(self, now_s: float) -> None:
        self._protocol.tick(now_s)
        self._process_events(now_s)
        self._cancel_abandoned(now_s)
        self._cancel_at_unreachable_peers(now_s)
        self._retry_waiting(now_s)
        self._commands += self._leases.take_commands(now_s)
        in_use = self._by_peer.keys() | {peer for peers in self._awaiting_peer for peer in peers}
        self._pings += self._peers.due_pings(in_use, now_s)

    def on_worker_lost(self, now_s: float) -> None:
        """Our KV memory is gone, and all leases on it. Those who had one ask again."""
        self._cancel_abandoned(now_s)
        for task in [task for task in self._tasks.values() if task.request.status is RequestStatus.GRANTED]:
            self._cancel_handoff(task, now_s)
            self._leases.revoke(task.request)
            task.request.set_status(RequestStatus.ASKED)
            self._wait_for_blocks(task)
        self._endpoint = None
        self._commands.clear()

    def on_worker_ready(self, worker: WorkerHello) -> None:
        self._endpoint = worker.kv_endpoint

    def take_messages(self) -> tuple[list[tuple[str, ToPrefill]], list[KvCommand]]:
        messages = self._protocol.take_messages() + self._pings
        commands, self._commands, self._pings = self._commands, [], []
        return messages, commands

    def close(self) -> None:
        self._protocol.close()

    def _process_events(self, now_s: float) -> None:
        self._cancel_abandoned(now_s)  # what a peer says of them comes too late
        for event in self._protocol.take_events():
            task = self._by_handoff_id.get(event.handoff_id)
            if task is None:
                continue  # what came before in this turn has ended it
            match event:
                case OfferReceived():
                    self._on_offer(task, event, now_s)
                case KvArrived():
                    self._on_arrived(task, event.ready, now_s)
                case HandoffFailed():
                    self._on_handoff_failed(task, event.error, now_s)

    def _on_offer(self, task: RemotePrefillTask, event: OfferReceived, now_s: float) -> None:
        self._metrics.offers.inc("decode")
        num_needed_blocks = self._scheduler.pool.num_blocks_for(len(task.request.token_ids))
        if event.num_blocks != num_needed_blocks:
            message = f"{event.num_blocks} blocks were asked for where {num_needed_blocks} are needed"
            error = handoff_errors.layout_mismatch(message)
            self._metrics.refusals.inc("decode", error.code)
            self._protocol.refuse(event.handoff_id, error, now_s)
            self._on_handoff_failed(task, error, now_s)
            return
        at_once = self._endpoint is not None and self._scheduler.leaves_room_for_earlier(task.request)
        self._leases.request_blocks(task.request, at_once=at_once)

    def _send_grant(self, handoff_id: int, lease: PeerWriteLease, now_s: float) -> None:
        """The worker expects the writes, so the grant can be sent to the peer."""
        assert self._endpoint is not None, "a worker that opens leases has an endpoint"
        num_cached = lease.first_block * self._scheduler.pool.block_size
        granted = GrantedLease(lease.lease_id, self._endpoint, num_cached, lease.block_ids, self._config.kv_checksums)
        self._protocol.grant(handoff_id, granted, now_s)
        self._metrics.grants.inc()

    def _on_arrived(self, task: RemotePrefillTask, ready: PrefillDone, now_s: float) -> None:
        request, lease = task.request, self._leases.of(task.request)
        if lease is None or not ready.token_ids or not self._in_vocabulary(ready.token_ids):
            error = PdError("pd_transfer_failed", "what the prefill instance sent cannot be used", stage="transfer")
            self._on_handoff_failed(task, to_error_info(error), now_s)
            return
        self._end_handoff(task)
        self._end_task(task)
        self._metrics.ended.inc("decode", "arrived")
        self._metrics.latency.observe(now_s - task.requested_s)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(ready.num_cached_tokens, request.num_prompt)
        self._leases.complete(lease, now_s)
        request.peer_draft_token_ids = ready.draft_token_ids[: request.max_drafts]
        assert request.slot is not None, "it has arrived in one"
        sampled = SlotTokens(
            request.slot,
            request.slot_epoch,
            request.num_generated,
            request.num_computed,
            ready.token_ids,
            ready.logprobs,
            ready.prompt_logprobs,
            ready.grammar_done,
        )
        self._tokens.commit_peer_tokens(request, sampled, now_s)

    def _in_vocabulary(self, token_ids: list[int]) -> bool:
        return min(token_ids) >= 0 and max(token_ids) < self._vocab_size

    def _on_handoff_failed(self, task: RemotePrefillTask, error: ErrorInfo, now_s: float) -> None:
        """A handoff has failed; the request goes on with another peer or locally."""
        request = task.request
        log.info(
            log_event(
                "handoff failed",
                side="decode",
                id=request.request_id,
                peer=task.peer_address,
                code=error.code,
                stage=error.stage or "-",
                error=error.message,
            )
        )
        self._metrics.ended.inc("decode", error.code)
        self._end_handoff(task)
        self._leases.withdraw_request(request)
        if request.status is RequestStatus.GRANTED:
            self._leases.revoke(request)
            request.set_status(RequestStatus.ASKED)
        task.error = error
        if error.code == "pd_no_decode_blocks":
            self._metrics.refusals.inc("decode", error.code)
            self._on_no_local_blocks(task, error, now_s)
            return
        if error.stage == WORKER_CRASH_STAGE and self._tokens.charge_crash(request, now_s):
            self._end_task(task)
            return
        self._peers.pause_after(error, task.peer_address, now_s)
        self._ask_next_peer(task, now_s)

    def _on_no_local_blocks(self, task: RemotePrefillTask, error: ErrorInfo, now_s: float) -> None:
        """No peer's fault: there is no room here. Whoever can go elsewhere does."""
        if task.request.spec.is_routed:
            self._end_task(task)
            self._tokens.reschedule(task.request, error, now_s)
        else:
            self._wait_for_blocks(task)

    def _wait_for_blocks(self, task: RemotePrefillTask) -> None:
        if not task.awaits_blocks:
            task.awaits_blocks = True
            self._awaiting_blocks.add(task.request)
        self._leases.mark_short_of_blocks(task.request)

    def _ask_next_peer(self, task: RemotePrefillTask, now_s: float) -> None:
        candidates = self._peer_candidates(task, now_s)
        may_fall_back = self._config.local_prefill
        peer = scheduling_policy.choose_prefill_peer(candidates, may_fall_back=may_fall_back)
        if peer is not None:
            if task.attempts:
                self._metrics.fallbacks.inc("peer")
            self._ask_peer(task, peer.address, now_s)
        elif may_fall_back:
            self._metrics.fallbacks.inc("local")
            self._end_task(task)
            self._scheduler.fall_back_to_local_prefill(task.request)
        elif now_s >= self._give_up_at_s(task) or not scheduling_policy.can_retry_later(candidates):
            self._give_up(task, now_s)
        else:
            self._wait_for_peer(task, candidates)

    def _wait_for_peer(self, task: RemotePrefillTask, candidates: list[scheduling_policy.PrefillPeerCandidate]) -> None:
        task.awaited_peers = frozenset(
            candidate.address for candidate in candidates if scheduling_policy.can_retry_later([candidate])
        )
        self._awaiting_peer.setdefault(task.awaited_peers, {})[task.request] = task
        self._give_up_timers.set_earliest(task.request, self._give_up_at_s(task))

    def _give_up_at_s(self, task: RemotePrefillTask) -> float:
        return task.started_s + self._config.handoff_timeout_s

    def _peer_candidates(self, task: RemotePrefillTask, now_s: float) -> list[scheduling_policy.PrefillPeerCandidate]:
        """The peers that this one may be sent to, as the choice sees them."""
        addresses = task.request.spec.prefill_peers or self._config.prefill_peers
        for address in addresses:
            self._peers.add(address, now_s)
        return [
            scheduling_policy.PrefillPeerCandidate(
                address,
                len(self._by_peer.get(address, ())),
                task.attempts[address],
                self._peers.is_available(address, now_s),
            )
            for address in addresses
        ]

    def _ask_peer(self, task: RemotePrefillTask, address: str, now_s: float) -> None:
        request = task.request
        task.peer_address, task.handoff_id, task.requested_s = address, self._protocol.next_handoff_id(), now_s
        task.attempts[address] += 1
        self._by_handoff_id[task.handoff_id] = task
        self._by_peer.setdefault(address, {})[task.handoff_id] = task
        prefill = PrefillRequest(
            handoff_id=task.handoff_id,
            kv_layout=self._layout,
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt=request.num_prompt,
            sampling_params=request.spec.sampling_params,
            priority=request.priority,
            waited_s=max(0.0, now_s - request.arrival_s),
            deadline_in_s=None if request.deadline_at_s is None else max(0.0, request.deadline_at_s - now_s),
            cache_salt=request.spec.cache_salt,
            worker_crashes=max(request.worker_crashes, request.engine_crashes),
            rescore_from=request.score_from,
            max_draft_tokens=request.max_drafts,
        )
        self._protocol.request_prefill(address, prefill, now_s)

    def _reschedule_preempted(self, request: Request, now_s: float) -> None:
        message = f"the decode instance had to give the request up after {request.num_generated} tokens"
        self._metrics.fallbacks.inc("none")
        self._tokens.reschedule(request, to_error_info(PdError("pd_preempted", message, stage="decode")), now_s)

    def _give_up(self, task: RemotePrefillTask, now_s: float) -> None:
        """Nobody could compute it, and we may not. The layer above may know someone who can."""
        self._metrics.fallbacks.inc("none")
        self._end_task(task)
        cause = task.error.message.removeprefix("PD Error: ") if task.error else "no prefill instance can be reached"
        code = "pd_preempted" if task.request.num_generated else "pd_prefill_failed"
        error = PdError(
            code, f"no prefill instance could compute the prompt ({cause})", stage="prefill", retry_after_s=RETRY_SOON_S
        )
        self._tokens.reschedule(task.request, to_error_info(error), now_s)

    def _count_heartbeats(self, heartbeat: HandoffHeartbeat) -> None:
        """Of work that the peer is at. Where it waits for our worker its word says nothing of whether that lives."""
        for handoff_id in heartbeat.handoff_ids:
            task = self._by_handoff_id.get(handoff_id)
            lease = None if task is None else self._leases.of(task.request)
            if task is not None and (lease is None or lease.peer_done_s is None):
                task.num_heartbeats += 1

    def _cancel_abandoned(self, now_s: float) -> None:
        for request in self._leases.take_abandoned():
            task = self._tasks.get(request)
            if task is None:
                continue
            self._cancel_handoff(task, now_s)
            if request.status is RequestStatus.FINISHED:
                self._end_task(task)
            else:
                self._wait_for_blocks(task)  # its blocks went to somebody who comes before it

    def _cancel_handoff(self, task: RemotePrefillTask, now_s: float) -> None:
        if task.handoff_id is not None:
            self._protocol.cancel(task.handoff_id, CANCELLED_BY_DECODE, now_s)
            self._metrics.ended.inc("decode", "withdrawn")
        self._end_handoff(task)

    def _end_handoff(self, task: RemotePrefillTask) -> None:
        """Ends the handoff; the task may start another one."""
        if task.handoff_id is not None:
            del self._by_handoff_id[task.handoff_id]
            assert task.peer_address is not None, "a handoff has a peer"
            del self._by_peer[task.peer_address][task.handoff_id]
            if not self._by_peer[task.peer_address]:
                del self._by_peer[task.peer_address]
        task.handoff_id = None

    def _end_task(self, task: RemotePrefillTask) -> None:
        """The request is out no longer: its prompt is here, is computed here, or is wanted no more."""
        self._stop_waiting(task)
        self._num_prompt_tokens_out -= task.request.num_prompt
        del self._tasks[task.request]

    def _stop_waiting(self, task: RemotePrefillTask) -> None:
        if task.awaits_blocks:
            task.awaits_blocks = False
            self._awaiting_blocks.remove(task.request)
        if task.awaited_peers is not None:
            waiting = self._awaiting_peer[task.awaited_peers]
            del waiting[task.request]
            if not waiting:
                del self._awaiting_peer[task.awaited_peers]
            task.awaited_peers = None
            self._give_up_timers.cancel(task.request)

    def _cancel_at_unreachable_peers(self, now_s: float) -> None:
        """What such a peer has only been asked for goes elsewhere. What it may write is under a lease, and ends with it."""
        unavailable_peers = self._peers.unavailable(now_s)
        affected = [task for peer in sorted(unavailable_peers) for task in self._by_peer.get(peer, {}).values()]
        for task in affected:
            if task.request.status is RequestStatus.ASKED and task.handoff_id is not None:
                error = PdError(
                    "pd_prefill_failed", f"{task.peer_address} cannot be reached, or is left alone", stage="prefill"
                )
                self._protocol.cancel(task.handoff_id, to_error_info(error), now_s)
                self._on_handoff_failed(task, to_error_info(error), now_s)

    def _retry_waiting(self, now_s: float) -> None:
        if now_s < self._next_retry_s:
            return
        self._next_retry_s = now_s + RETRY_INTERVAL_S
        overdue = [self._tasks[request] for request in self._give_up_timers.take_due(now_s)]
        available_peer_sets = [
            peers for peers in self._awaiting_peer if any(self._peers.is_available(p, now_s) for p in peers)
        ]
        for task in dict.fromkeys(
            overdue
            + [waiting_task for peers in available_peer_sets for waiting_task in self._awaiting_peer[peers].values()]
        ):
            self._stop_waiting(task)
            self._ask_next_peer(task, now_s)
        self._retry_first_waiting_for_blocks(now_s)

    def _retry_first_waiting_for_blocks(self, now_s: float) -> None:
        """One at a time, in the queue's order: all of them together would find the same few blocks."""
        first_request = self._awaiting_blocks.first()
        if first_request is None or self._endpoint is None or not self._scheduler.allocator.can_allocate(first_request):
            return
        if not self._scheduler.leaves_room_for_earlier(first_request):
            return
        task = self._tasks[first_request]
        self._stop_waiting(task)
        task.attempts.clear()
        self._ask_next_peer(task, now_s)
