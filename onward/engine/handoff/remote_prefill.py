"""Remote prefill on a decode instance: chooses the prefill peer for a prompt, and handles offers, failures and
fallbacks.

    WAITING ──ask a peer──> ASKED ──it offers, blocks are leased──> GRANTED ──KV is here──> RUNNING
                              │ ^                                     │
               a failure: next peer, or compute it here <─────────────┘ (the lease is revoked)

`DecodeHandoffProtocol` has the protocol, and the scheduler has the blocks; this module joins the two. It keeps a task
for each request that a peer works on. It does no I/O: `take_messages` returns what is to be sent.
"""

from onward.config import EngineConfig
from onward.engine.handoff.handoff_metrics import HandoffMetrics, log_failed_handoff
from onward.engine.handoff.prefill_peers import PrefillPeers
from onward.engine.handoff.remote_prefill_index import RemotePrefill, RemotePrefillIndex
from onward.engine.request import RequestStatus
from onward.engine.request_phases import PhaseRecorder
from onward.engine.scheduling import scheduling_policy
from onward.engine.scheduling.peer_write_leases import PeerWriteLease
from onward.engine.scheduling.scheduler import Scheduler
from onward.engine.step_result_processor import StepResultProcessor
from onward.errors import RETRY_SOON_S, PdError
from onward.pd import handoff_errors
from onward.pd.decode_handoff_protocol import DecodeHandoffProtocol
from onward.pd.handoff_events import HandoffFailed, KvArrived, OfferReceived
from onward.pd.handoff_timeouts import HandoffTimeouts
from onward.proto.engine import ErrorInfo
from onward.proto.error_info import to_error_info
from onward.proto.handoff import (
    HandoffHeartbeat,
    LeaseGrant,
    PeerGone,
    Pong,
    PrefillDone,
    PrefillPhases,
    PrefillRequest,
    ToDecode,
    ToPrefill,
)
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

RETRY_INTERVAL_S = 0.05
"""How often to check whether a peer has become available to requests that wait for one."""

CANCELLED_BY_DECODE = ErrorInfo(
    "pd_prefill_failed", "PD Error: the decode instance needs this prompt no longer", stage="decode"
)


class RemotePrefillClient:
    def __init__(
        self,
        config: EngineConfig,
        incarnation: str,
        worker: WorkerHello,
        scheduler: Scheduler,
        result_processor: StepResultProcessor,
        metrics: HandoffMetrics,
        phases: PhaseRecorder,
    ) -> None:
        self._config, self._scheduler, self._result_processor, self._metrics, self._phases = (
            config,
            scheduler,
            result_processor,
            metrics,
            phases,
        )
        self._leases = scheduler.leases
        assert worker.kv_layout is not None, "a decode instance's worker has KV memory to share"
        self._layout, self._vocab_size = worker.kv_layout, worker.vocab_size
        self._endpoint: KvEndpoint | None = worker.kv_endpoint
        """None while there is no worker; no peer gets a grant then."""
        self._protocol = DecodeHandoffProtocol(
            incarnation, HandoffTimeouts(config.lease_s, config.offer_hold_s, config.handoff_timeout_s)
        )
        self.peers = PrefillPeers(config.prefill_peers)
        self.tasks = RemotePrefillIndex()
        self._commands: list[KvCommand] = []
        self._pings: list[tuple[str, ToPrefill]] = []
        self._next_retry_s = 0.0

    @property
    def idle(self) -> bool:
        return not self.tasks and self._leases.idle and self._protocol.idle

    def count_by_state(self) -> dict[str, int]:
        return self._protocol.count_by_state()

    def route_new_requests(self, now_s: float) -> None:
        """Decides for each new request in the queue whether its prompt is computed here or by a peer."""
        for request in self._scheduler.take_unrouted():
            if scheduling_policy.should_prefill_locally(
                request, self._scheduler.allocator.num_uncached_tokens(request), self._config
            ):
                request.prefill_locally = True
                continue
            if scheduling_policy.should_reschedule(request):
                message = f"the decode instance had to give the request up after {request.num_generated} tokens"
                self._metrics.fallbacks.inc("none")
                self._result_processor.reschedule(
                    request, to_error_info(PdError("pd_preempted", message, stage="decode")), now_s
                )
                continue
            self._scheduler.start_remote_prefill(request)
            if request.scheduled_s is None:
                request.scheduled_s = now_s
            self._ask_next_peer(self.tasks.add(request, now_s), now_s)

    def receive(self, peer: str, message: ToDecode, now_s: float) -> None:
        if peer not in self.peers:
            return
        self.peers.mark_reachable(peer)
        if isinstance(message, HandoffHeartbeat):
            self._count_heartbeats(message)
        if isinstance(message, PrefillPhases):
            self._add_phases(peer, message)
            return
        if isinstance(message, PrefillDone) and (task := self.tasks.of_handoff(message.handoff_id)):
            self._leases.on_peer_done(task.request, now_s)
        if not isinstance(message, Pong):
            self._protocol.receive(peer, message, now_s)
        elif previous_incarnation := self.peers.update_incarnation(peer, message.incarnation, now_s):
            # A restarted peer knows nothing of the requests that its previous incarnation was asked for.
            self._protocol.receive(peer, PeerGone(previous_incarnation), now_s)
        self._process_events(now_s)

    def _add_phases(self, peer: str, message: PrefillPhases) -> None:
        task = self.tasks.of_handoff(message.handoff_id)
        if task is not None and task.peer_address == peer and task.request.phases is not None:
            request = task.request
            self._phases.add_of_peer(request.api_id, request.request_id, request.epoch, peer, message.changes)

    def on_peer_send(self, peer: str, ok: bool, now_s: float) -> None:
        """Records whether the last message to this peer could be sent. Requests stop waiting for a peer that stays
        unreachable."""
        if peer not in self.peers:
            return
        if ok:
            self._protocol.on_send_succeeded(peer, now_s)
            self.peers.mark_reachable(peer)
        else:
            self._protocol.on_send_failed(peer, now_s)
            self.peers.mark_unreachable(peer, now_s)

    def receive_kv_report(self, report: KvReport, now_s: float) -> None:
        self._cancel_abandoned(now_s)  # their leases have ended, though the worker may not know it yet
        lease = self._leases.on_report(report)
        handoff_id = None if lease is None else self.tasks[lease.request].handoff_id
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
        self._pings += self.peers.due_pings(self.tasks.peers_in_use, now_s)

    def on_worker_lost(self, now_s: float) -> None:
        """Ends all leases on our KV memory, also if the memory is kept. The requests that had a lease wait for blocks
        and then ask a peer again."""
        self._cancel_abandoned(now_s)
        for task in [task for task in self.tasks if task.request.status is RequestStatus.GRANTED]:
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
            task = self.tasks.of_handoff(event.handoff_id)
            if task is None:
                continue  # what came before in this turn has ended it
            match event:
                case OfferReceived():
                    self._on_offer(task, event, now_s)
                case KvArrived():
                    self._on_arrived(task, event.ready, now_s)
                case HandoffFailed():
                    self._on_handoff_failed(task, event.error, now_s)

    def _on_offer(self, task: RemotePrefill, event: OfferReceived, now_s: float) -> None:
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
        """Sends the peer the grant for this lease. The worker must have reported that it expects the writes."""
        assert self._endpoint is not None, "a worker that opens leases has an endpoint"
        num_cached = lease.first_block * self._scheduler.pool.block_size
        lease_s, checksums = self._config.lease_s, self._config.kv_checksums
        grant = LeaseGrant(
            handoff_id, "", lease.lease_id, self._endpoint, num_cached, lease.block_ids, lease_s, checksums
        )
        self._protocol.grant(grant, now_s)
        self._metrics.grants.inc()

    def _on_arrived(self, task: RemotePrefill, ready: PrefillDone, now_s: float) -> None:
        request, lease = task.request, self._leases.of(task.request)
        if lease is None or not ready.token_ids or not self._in_vocabulary(ready.token_ids):
            error = handoff_errors.transfer_failed("what the prefill instance sent cannot be used")
            self._on_handoff_failed(task, error, now_s)
            return
        self.tasks.end_handoff(task)
        self.tasks.remove(task)
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
        self._result_processor.commit_peer_tokens(request, sampled, now_s)

    def _in_vocabulary(self, token_ids: list[int]) -> bool:
        return min(token_ids) >= 0 and max(token_ids) < self._vocab_size

    def _on_handoff_failed(self, task: RemotePrefill, error: ErrorInfo, now_s: float) -> None:
        """Ends a failed handoff and continues the request: with another peer, locally, or on another instance. If this
        instance had no blocks for it, the request waits for some, or is rescheduled if it is routed. A crash of the
        peer's worker is charged to the request, which may fail it."""
        request = task.request
        log_failed_handoff("decode", request.request_id, task.peer_address, error, label=request.spec.client_request_id)
        self._metrics.ended.inc("decode", error.code)
        self.tasks.end_handoff(task)
        self._leases.withdraw_request(request)
        if request.status is RequestStatus.GRANTED:
            self._leases.revoke(request)
            request.set_status(RequestStatus.ASKED)
        task.error = error
        if error.code == "pd_no_decode_blocks":
            self._metrics.refusals.inc("decode", error.code)
            if not request.spec.is_routed:
                self._wait_for_blocks(task)
                return
            self.tasks.remove(task)  # no peer's fault: there is no room here, and elsewhere there may be
            self._result_processor.reschedule(request, error, now_s)
            return
        if error.stage == handoff_errors.WORKER_CRASH_STAGE and self._result_processor.charge_crash(request, now_s):
            self.tasks.remove(task)
            return
        self.peers.pause_after(error, task.peer_address, now_s)
        self._ask_next_peer(task, now_s)

    def _wait_for_blocks(self, task: RemotePrefill) -> None:
        self.tasks.wait_for_blocks(task)
        self._leases.mark_short_of_blocks(task.request)

    def _ask_next_peer(self, task: RemotePrefill, now_s: float) -> None:
        candidates = self._peer_candidates(task, now_s)
        may_fall_back = self._config.local_prefill
        peer = scheduling_policy.choose_prefill_peer(candidates, may_fall_back=may_fall_back)
        if peer is not None:
            if task.attempts:
                self._metrics.fallbacks.inc("peer")
            self._ask_peer(task, peer.address, now_s)
        elif may_fall_back:
            self._metrics.fallbacks.inc("local")
            self.tasks.remove(task)
            self._scheduler.fall_back_to_local_prefill(task.request)
        elif now_s >= self._give_up_at_s(task) or not scheduling_policy.can_retry_later(candidates):
            self._give_up(task, now_s)
        else:
            retryable = (peer.address for peer in candidates if scheduling_policy.can_retry_later([peer]))
            self.tasks.wait_for_peers(task, frozenset(retryable), self._give_up_at_s(task))

    def _give_up_at_s(self, task: RemotePrefill) -> float:
        return task.started_s + self._config.handoff_timeout_s

    def _peer_candidates(self, task: RemotePrefill, now_s: float) -> list[scheduling_policy.PrefillPeerCandidate]:
        """Returns the peers that may compute this prompt, with the load, attempts and availability from which
        `choose_prefill_peer` chooses. These are the peers that the request names, or else the configured ones. Adds
        them to the known peers."""
        addresses = task.request.spec.prefill_peers or self._config.prefill_peers
        for address in addresses:
            self.peers.add(address, now_s)
        return [
            scheduling_policy.PrefillPeerCandidate(
                address,
                self.tasks.num_at_peer(address),
                task.attempts[address],
                self.peers.is_available(address, now_s),
            )
            for address in addresses
        ]

    def _ask_peer(self, task: RemotePrefill, address: str, now_s: float) -> None:
        request, handoff_id = task.request, self._protocol.next_handoff_id()
        self.tasks.start_handoff(task, address, handoff_id, now_s)
        prefill = PrefillRequest(
            handoff_id=handoff_id,
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
            client_request_id=request.spec.client_request_id,
            is_traced=request.phases is not None,
        )
        self._protocol.request_prefill(address, prefill, now_s)

    def _give_up(self, task: RemotePrefill, now_s: float) -> None:
        """Ends a request whose prompt no peer could compute and this instance may not compute. The router may move it
        to an instance that can."""
        self._metrics.fallbacks.inc("none")
        self.tasks.remove(task)
        cause = task.error.message.removeprefix("PD Error: ") if task.error else "no prefill instance can be reached"
        code = "pd_preempted" if task.request.num_generated else "pd_prefill_failed"
        error = PdError(
            code, f"no prefill instance could compute the prompt ({cause})", stage="prefill", retry_after_s=RETRY_SOON_S
        )
        self._result_processor.reschedule(task.request, to_error_info(error), now_s)

    def _count_heartbeats(self, heartbeat: HandoffHeartbeat) -> None:
        """Counts heartbeats of a peer's work in progress. A peer that waits for our worker sends heartbeats too, but
        they do not show that our worker is alive, so they are not counted."""
        for handoff_id in heartbeat.handoff_ids:
            task = self.tasks.of_handoff(handoff_id)
            lease = None if task is None else self._leases.of(task.request)
            if task is not None and (lease is None or lease.peer_done_s is None):
                task.num_heartbeats += 1

    def _cancel_abandoned(self, now_s: float) -> None:
        for request in self._leases.take_abandoned():
            task = self.tasks.get(request)
            if task is None:
                continue
            self._cancel_handoff(task, now_s)
            if request.status is RequestStatus.FINISHED:
                self.tasks.remove(task)
            else:
                self._wait_for_blocks(task)  # its blocks went to an earlier request

    def _cancel_handoff(self, task: RemotePrefill, now_s: float) -> None:
        if task.handoff_id is not None:
            self._protocol.cancel(task.handoff_id, CANCELLED_BY_DECODE, now_s)
            self._metrics.ended.inc("decode", "withdrawn")
        self.tasks.end_handoff(task)

    def _cancel_at_unreachable_peers(self, now_s: float) -> None:
        """Moves requests that such a peer has only been asked for to other peers. A granted request ends with its lease
        instead."""
        unavailable_peers = self.peers.unavailable(now_s)
        affected = [task for peer in sorted(unavailable_peers) for task in self.tasks.at_peer(peer)]
        for task in affected:
            if task.request.status is RequestStatus.ASKED and task.handoff_id is not None:
                error = handoff_errors.prefill_failed(f"{task.peer_address} cannot be reached, or is left alone")
                self._protocol.cancel(task.handoff_id, error, now_s)
                self._on_handoff_failed(task, error, now_s)

    def _retry_waiting(self, now_s: float) -> None:
        if now_s < self._next_retry_s:
            return
        self._next_retry_s = now_s + RETRY_INTERVAL_S
        for task in self.tasks.take_askable(lambda peer: self.peers.is_available(peer, now_s), now_s):
            self._ask_next_peer(task, now_s)
        self._retry_first_waiting_for_blocks(now_s)

    def _retry_first_waiting_for_blocks(self, now_s: float) -> None:
        """Retries one request at a time, in the order of the queue: several at once would compete for the same free
        blocks."""
        first_request = self.tasks.awaiting_blocks.first()
        if first_request is None or self._endpoint is None or not self._scheduler.allocator.can_allocate(first_request):
            return
        if not self._scheduler.leaves_room_for_earlier(first_request):
            return
        task = self.tasks[first_request]
        self.tasks.stop_waiting(task)
        task.attempts.clear()
        self._ask_next_peer(task, now_s)
