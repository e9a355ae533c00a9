"""The engine without its sockets: messages and the time in, messages out.

    drain the inbox; commit a result; plan a step

Everything that an instance knows about a request is here. The I/O code (`engine/main.py`, `onward.LLM`, the simulator)
moves bytes and reads the clock.
"""

import logging
from collections import OrderedDict

from onward.bounded_dict import BoundedDict
from onward.config import EngineConfig
from onward.engine import admission, live_snapshot
from onward.engine.caller_limiter import CallerLimiter
from onward.engine.engine_metrics import CacheConfigLabels, EngineMetrics
from onward.engine.handoff.handoff_manager import HandoffManager, HandoffOutbox
from onward.engine.live_requests import CallerInFlight, LiveRequests
from onward.engine.outbox import ApiOutbox
from onward.engine.request import FinishReason, Request, RequestStatus
from onward.engine.request_phases import PhaseRecorder
from onward.engine.scheduler_stats import SchedulerStatLogger, SchedulerStats
from onward.engine.scheduling import scheduling_policy
from onward.engine.scheduling.block_pool import BlockPool, KvEventLog
from onward.engine.scheduling.persisted_block_hashes import PersistedBlockHashes
from onward.engine.scheduling.scheduler import Scheduler
from onward.engine.step_result_processor import StepResultProcessor
from onward.errors import DeadlineExceeded, OnwardError
from onward.log import event as log_event
from onward.log import request_fields
from onward.obs.metrics import Registry
from onward.obs.step_log import StepLog
from onward.proto.engine import (
    Abort,
    AbortByName,
    AbortReply,
    FromEngine,
    HeldRequest,
    HeldRequestsReport,
    KvEventsReply,
    QueryKvEvents,
    RequestAccepted,
    Submit,
    ToEngine,
    TokenDelta,
    TokenDeltas,
)
from onward.proto.error_info import to_error_info
from onward.proto.handoff import ToDecode, ToPrefill
from onward.proto.kv_transfer import KvReport
from onward.proto.live import LiveEngine
from onward.proto.stats import EngineStats
from onward.proto.step import StepPlan, StepResult, WorkerHello

log = logging.getLogger(__name__)

HOLDING_INTERVAL_S = 1.0
DEADLINE_CHECK_INTERVAL_S = 0.05
MAX_TOMBSTONES = 10_000
MAX_REMEMBERED_LOST_APIS = 1000
"""Lost api processes whose late messages are dropped. Such messages arrive within moments, so few entries are
needed."""


class EngineCore:
    def __init__(
        self,
        config: EngineConfig,
        incarnation: str,
        worker: WorkerHello,
        persisted_hashes: PersistedBlockHashes | None = None,
    ) -> None:
        """`persisted_hashes` is the hash table of the KV memory that the worker has attached, or None if its hashes
        need not outlive this engine."""
        assert config.max_num_batched_tokens >= config.max_num_seqs, "every running request fits into one step"
        self.config = config
        self.incarnation = incarnation
        self.worker: WorkerHello | None = worker
        self.registry = Registry()
        self.step_log = StepLog()
        self._limits = admission.EngineLimits(worker, config.num_draft_tokens)
        self._live = LiveRequests()
        self._outbox = ApiOutbox()
        self._phases = PhaseRecorder()
        self._kv_events = KvEventLog()
        self.scheduler = Scheduler(config, self._new_pool(persisted_hashes), incarnation)
        self.scheduler.draft_cost = worker.draft_cost
        self.scheduler.allocator.attention_window = worker.attention_window
        self._kv_memory = worker.kv_memory
        self.metrics = EngineMetrics(
            self.registry,
            live=lambda: self._live.values(),
            kv_blocks=lambda: self.scheduler.pool.count_by_state(),
            waiting_tokens=lambda: self._waiting_tokens,
            cache_config=CacheConfigLabels(
                str(worker.block_size), str(worker.num_blocks), "true" if config.prefix_caching else "false"
            ),
        )
        self._callers = CallerLimiter()
        self._result_processor = StepResultProcessor(
            self.scheduler, self._live, self._outbox, self.metrics, self._callers
        )
        self._handoffs = HandoffManager(
            config,
            incarnation,
            worker,
            self.scheduler,
            self._result_processor,
            self._outbox,
            self._live,
            self._limits,
            self.registry,
            self._phases,
        )
        self._seq: dict[str, int] = {}
        """The last message read from each api process."""
        self._lost_apis: BoundedDict[str, bool] = BoundedDict(MAX_REMEMBERED_LOST_APIS)
        self._tombstones: OrderedDict[str, float] = OrderedDict()
        self._step = 0
        self._last_progress_s = 0.0
        """When a step was completed last, or none was due."""
        self._worker_due_s = 0.0
        """Since when the worker owes the step it is at, or has been away."""
        self._next_holding_s = 0.0
        self._next_deadline_check_s = 0.0
        self._scheduler_log = SchedulerStatLogger(config.log_interval_s)

    def receive_from_api(self, api_id: str, message: ToEngine, now_s: float) -> None:
        self._phases.now_s = now_s
        if api_id in self._lost_apis:
            self.metrics.stale.inc("owner")
            return
        self._seq[api_id] = message.seq
        match message:
            case Submit():
                self._submit(api_id, message, now_s)
            case Abort():
                self._abort(api_id, message, now_s)
            case AbortByName():
                self._abort_by_name(api_id, message, now_s)
            case QueryKvEvents():
                events = self._kv_events.since(message.next_event, self.scheduler.pool.cached_hashes)
                self._outbox.send(api_id, KvEventsReply(message.query_id, events))

    def receive_from_prefill(self, peer: str, message: ToDecode, now_s: float) -> None:
        """Handles a message of a prefill instance; `peer` is its address."""
        self._phases.now_s = now_s
        self._handoffs.receive_from_prefill(peer, message, now_s)

    def receive_from_decode(self, decode: str, message: ToPrefill, now_s: float) -> None:
        """Handles a message of a decode instance; `decode` is its incarnation."""
        self._phases.now_s = now_s
        self._handoffs.receive_from_decode(decode, message, now_s)

    def on_peer_send(self, peer: str, ok: bool, now_s: float) -> None:
        """Handles the outcome of the last send to the prefill instance at the address `peer`: `ok` is False if the
        message could not be sent."""
        self._phases.now_s = now_s
        self._handoffs.on_peer_send(peer, ok, now_s)

    def receive_kv_report(self, report: KvReport, now_s: float) -> None:
        """Handles a report of the worker's KV transfer thread."""
        self._phases.now_s = now_s
        if self.worker is not None:
            self._handoffs.receive_kv_report(report, now_s)

    def on_api_lost(self, api_id: str, now_s: float) -> None:
        """Handles the death of an api process. Its clients' connections died with it, so its requests are aborted.
        Messages that it sent before and that arrive later are dropped."""
        self._phases.now_s = now_s
        self._lost_apis.put(api_id, True)
        self._seq.pop(api_id, None)
        self._phases.drop(api_id)
        for request in [r for r in self._live.values() if r.api_id == api_id]:
            request.phases = None
            self._finish_now(request, FinishReason.ABORT, now_s)

    def commit(self, result: StepResult, now_s: float) -> None:
        self._phases.now_s = now_s
        self._result_processor.commit(result, now_s)
        self.step_log.record_result(result.step, now_s)
        self._step = result.step
        self._last_progress_s = self._worker_due_s = now_s

    def plan(self, now_s: float) -> StepPlan | None:
        self._phases.now_s = now_s
        if self.worker is None:
            return None
        self._handoffs.route_new_requests(now_s)
        overlapped = bool(self.scheduler.steps_in_flight)
        plan = self.scheduler.plan(now_s)
        if plan is not None:
            self._worker_due_s = self._worker_due_s if overlapped else now_s
            record = self.step_log.record_plan(plan, now_s, overlapped=overlapped)
            self.metrics.steps.inc("true" if overlapped else "false")
            self.metrics.step_tokens.observe(record.num_tokens)
            self.metrics.record_recomputed(self.scheduler.take_recomputed())
        return plan

    @property
    def runs_alone(self) -> bool:
        """A suspect's step is in flight, and nothing else may be done that could kill the engine meanwhile."""
        return self.scheduler.isolated_request is not None

    def next_isolated_id(self) -> str | None:
        """Returns the id of the suspect that runs alone in a step in flight, or that the next plan would run or admit.
        None if there is no such suspect, or no worker. The supervisor charges a death of the engine from then on to
        that request."""
        suspect = self.scheduler.next_to_isolate() if self.worker is not None else None
        return None if suspect is None else suspect.request_id

    def on_worker_lost(self, now_s: float, *, keeps_memory: bool = False) -> None:
        """Handles the death of the worker, which has been reaped already. Charges the death to each request that a step
        in flight runs; a request with too many charges fails or becomes a suspect. If the KV memory is kept, running
        requests continue with the next worker; otherwise they start again from their tokens."""
        self._phases.now_s = now_s
        self.worker, self._worker_due_s = None, now_s
        self.metrics.worker_losses.inc()
        self.step_log.discard_in_flight()
        in_flight = self.scheduler.requests_in_flight()
        self._handoffs.on_worker_lost(now_s)
        if keeps_memory and self._kv_memory:
            self.scheduler.detach_worker()
            log.info(log_event("requests keep their KV", running=len(self.scheduler.running)))
        else:
            self._lose_memory()
            self._kv_memory = ""
        for request in in_flight:
            if request.status is RequestStatus.FINISHED:
                continue  # before, or with the handoff that it was a part of
            if not self._result_processor.charge_crash(request, now_s) and scheduling_policy.must_run_alone(request):
                self.scheduler.suspects.add(request)

    def _lose_memory(self) -> None:
        for request in [*self.scheduler.running, *self.scheduler.preempting]:
            self.metrics.resubmissions.inc("worker_restart")
            fields = request_fields(request.request_id, request.spec.client_request_id)
            log.info(log_event("request restarts", **fields, output=request.num_generated))
        self._kv_events.reset()
        self.scheduler.reset(self._new_pool(None))

    def on_worker_ready(
        self, worker: WorkerHello, now_s: float, persisted_hashes: PersistedBlockHashes | None = None
    ) -> None:
        """Continues with a worker that replaces a lost one. `persisted_hashes` is the hash table of the KV memory that
        it has attached, or None. If it could not attach the memory that was kept, running requests start again from
        their tokens."""
        assert worker.num_blocks == self._limits.worker.num_blocks, "a restarted worker has the same pool"
        if self._kv_memory and worker.kv_memory != self._kv_memory:
            self._lose_memory()  # it was to be kept, and could not be attached
            self._kv_memory = ""
        if not self._kv_memory:
            self.scheduler.pool.use_persisted_hashes(persisted_hashes)  # else it has them: one memory, one table
        self._kv_memory = worker.kv_memory
        self.worker = worker
        self.scheduler.draft_cost = worker.draft_cost
        self.scheduler.allocator.attention_window = worker.attention_window
        self._handoffs.on_worker_ready(worker)
        self._last_progress_s = now_s

    def tick(self, now_s: float) -> None:
        """Handles timeouts and deadlines. The caller has delivered all messages that arrived before `now_s`."""
        self._phases.now_s = now_s
        self._handoffs.tick(now_s, self._worker_silent_s(now_s))
        if not self._is_step_due:
            self._last_progress_s = now_s
        if now_s >= self._next_deadline_check_s:
            self._next_deadline_check_s = now_s + DEADLINE_CHECK_INTERVAL_S
            for request in self._live.take_past_deadline(now_s):
                error = DeadlineExceeded(
                    f"the deadline passed after {request.num_generated} tokens", param="deadline_ms"
                )
                self._result_processor.fail(request, to_error_info(error), now_s)
        if now_s >= self._next_holding_s:
            self._next_holding_s = now_s + HOLDING_INTERVAL_S
            self._send_held_requests()
            self._callers.drop_full_buckets(now_s)
            while self._tombstones and next(iter(self._tombstones.values())) <= now_s:
                self._tombstones.popitem(last=False)
        if self._scheduler_log.is_due(now_s) and (line := self._scheduler_log.line(self._counts(), now_s)):
            log.info(line)

    def take_api_messages(self) -> list[tuple[str, FromEngine]]:
        """Returns the messages to send, each with its api process."""
        messages = self._outbox.take_messages(self._step)
        return self._phases.take_messages() + messages

    def take_handoff_messages(self) -> HandoffOutbox:
        """Returns the messages to other instances and to the worker's KV transfer thread."""
        return self._handoffs.take_messages()

    def worker_replacement_reason(self, now_s: float) -> str | None:
        """Returns why the worker and its KV memory must be given up, or None if they need not be."""
        if self.worker is None:
            return None
        leases, handoffs = self.scheduler.leases, self.scheduler.outgoing_handoffs
        return leases.worker_replacement_reason(now_s) or handoffs.worker_replacement_reason(now_s)

    def close(self) -> None:
        """Tells all peers that this instance leaves. Called once, in the engine's last turn."""
        self._handoffs.close()

    def stats(self, now_s: float) -> EngineStats:
        requests = {s.value: 0 for s in RequestStatus if s is not RequestStatus.FINISHED}
        for request in self._live.values():
            requests[request.status.value] += 1
        return EngineStats(
            step=self._step,
            worker_ready=self.worker is not None,
            stalled_s=self._stalled_s(now_s),
            requests=requests,
            kv_blocks=self.scheduler.pool.count_by_state(),
            free_slots=self.scheduler.slots.num_free,
        )

    def live_engine(self, now_s: float) -> LiveEngine:
        """Returns the state for the live view. The cost does not grow with the pool or the queue."""
        generated, preemptions = self.metrics.tokens.value("generated"), self.metrics.preemptions.value()
        return live_snapshot.live_engine(
            self.scheduler,
            self._live.values(),
            now_s,
            step=self._step,
            worker_ready=self.worker is not None,
            num_generated_tokens=int(generated),
            num_preemptions=int(preemptions),
        )

    @property
    def idle(self) -> bool:
        return not self._live and not self.scheduler.steps_in_flight and self._handoffs.idle

    def audit_idle(self) -> None:
        """Asserts that an idle engine holds no slot, no block and no suspect. The engine must be idle."""
        assert self.idle, "asked while busy"
        self.scheduler.pool.audit_idle()
        slots = self.scheduler.slots
        assert slots.num_free == self.config.max_num_seqs, f"{slots.num_fenced} slots are fenced at idle"
        assert not self.scheduler.suspects, "a suspect is left at idle"

    @property
    def _is_step_due(self) -> bool:
        """Whether our own worker is due. What a peer computes for us, however slowly, is not our illness."""
        scheduler = self.scheduler
        return bool(scheduler.waiting or scheduler.running or scheduler.preempting)

    def _stalled_s(self, now_s: float) -> float:
        """Returns for how long our worker has owed a step, or a report on KV that peers write; 0 if it owes nothing."""
        step_s = now_s - self._last_progress_s if self._is_step_due else 0.0
        since_s = self.scheduler.leases.worker_due_since_s
        return max(0.0, step_s, 0.0 if since_s is None else now_s - since_s)

    def _worker_silent_s(self, now_s: float) -> float:
        """Returns for how long our worker has been busy with one step, or absent; 0 if it is present and no step is in
        flight. Unlike in `_stalled_s`, a lack of blocks does not count."""
        return now_s - self._worker_due_s if self.worker is None or self.scheduler.steps_in_flight else 0.0

    def _new_pool(self, persisted_hashes: PersistedBlockHashes | None) -> BlockPool:
        return BlockPool(
            self._limits.worker.num_blocks, self._limits.worker.block_size, self._kv_events, persisted_hashes
        )

    def _counts(self) -> SchedulerStats:
        scheduler, tokens = self.scheduler, self.metrics.tokens
        blocks = scheduler.pool.count_by_state()
        drafted, accepted, verifications = self.metrics.drafts.totals
        return SchedulerStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + self._handoffs.num_remote_prefills,
            preempting=len(scheduler.preempting),
            used_blocks=scheduler.pool.num_blocks - blocks["free"] - blocks["cached"],
            num_blocks=scheduler.pool.num_blocks,
            prompt_tokens=tokens.value("prompt"),
            cached_tokens=tokens.value("cached"),
            generated_tokens=tokens.value("generated"),
            preemptions=self.metrics.preemptions.value(),
            waiting_tokens=self._waiting_tokens,
            drafted_tokens=drafted,
            accepted_tokens=accepted,
            verifications=verifications,
        )

    @property
    def _waiting_tokens(self) -> int:
        """Prompt tokens of all waiting requests, including those whose prompts peers compute."""
        return self.scheduler.waiting.num_prompt_tokens + self._handoffs.num_remote_prompt_tokens

    def _submit(self, api_id: str, message: Submit, now_s: float) -> None:
        known = self._live.get(message.request_id)
        if known is not None and message.epoch <= known.epoch:
            self.metrics.stale.inc("submit")
            return
        if message.request_id in self._tombstones:
            self._reject(api_id, message, FinishReason.ABORT, None)
            return
        try:
            request = admission.create_request(message, api_id, self._limits, now_s)
            if known is not None:
                admission.check_same_caller(known, request)
            if admission.counts_as_new(message):
                self._admit_new(request, now_s)
        except OnwardError as error:
            self._reject(api_id, message, FinishReason.ERROR, error)
            return
        if known is not None:
            # A newer epoch replaces what we have: the api holds the tokens that count.
            request.arrival_s, request.arrival_number = min(known.arrival_s, request.arrival_s), known.arrival_number
            self.scheduler.remove(known)
            self._live.remove(known)
        if not self._is_step_due:
            self._last_progress_s = now_s
        if message.trace_id:
            request.phases = self._phases.new_log(request.request_id, request.epoch, api_id)
            request.phases.enter("queue", request.num_generated)
        self._live.add(request)
        self.scheduler.enqueue(request)
        if scheduling_policy.must_run_alone(request):
            self.scheduler.suspects.add(request)
        self._outbox.send(api_id, RequestAccepted(request.request_id, request.epoch))
        self._finish_if_ended(request, now_s)

    def _admit_new(self, request: Request, now_s: float) -> None:
        has_limits = request.spec.caller_limits is not None
        in_flight = self._live.in_flight_of_caller(request) if has_limits else CallerInFlight()
        refusal = self._callers.check(request, in_flight, now_s)
        refusal = refusal or admission.check_queue(
            self._backlog(), request.num_prompt, self.config, self._result_processor.rates, now_s
        )
        if refusal is not None:
            self.metrics.refusals.inc(refusal.limit.value)
            raise refusal.error
        self._callers.charge_prompt(request, in_flight, now_s)

    def _backlog(self) -> admission.QueueBacklog:
        waiting, num_free = self.scheduler.waiting, self.scheduler.slots.num_free
        return admission.QueueBacklog(
            num_requests=len(waiting) + self._handoffs.num_remote_prefills - num_free,
            num_tokens=waiting.num_prompt_tokens_after(num_free) + self._handoffs.num_remote_prompt_tokens,
        )

    def _finish_if_ended(self, request: Request, now_s: float) -> None:
        """Finishes the request without a step if its tokens already contain the end of the output. Sends a delta with
        the finish reason only, which is all that the api process lacks."""
        if request.num_generated and (reason := admission.finish_reason_of_given_tokens(request)):
            request.finish_reason = reason
            self._outbox.add_delta(request, [])
            self._result_processor.finish(request, reason, now_s)

    def _reject(self, api_id: str, message: Submit, reason: FinishReason, error: OnwardError | None) -> None:
        self.metrics.finished.inc(reason.value)
        code = error.code if error else "-"
        fields = request_fields(message.request_id, message.client_request_id)
        log.info(log_event("request refused", **fields, reason=reason.value, error=code))
        delta = TokenDelta(
            message.request_id,
            message.epoch,
            len(message.generated_token_ids),
            [],
            len(message.prompt_token_ids),
            message.num_cached_tokens or 0,
            reason.value,
            to_error_info(error) if error else None,
        )
        self._outbox.send(api_id, TokenDeltas(self._step, [delta]))

    def _abort(self, api_id: str, message: Abort, now_s: float) -> None:
        if message.epoch is None:
            self._add_tombstone(message.request_id, now_s)
        request = self._live.get(message.request_id)
        # Two api processes may have given their attempts the same number; each ends its own.
        if request is None or (
            message.epoch is not None and (api_id != request.api_id or message.epoch < request.epoch)
        ):
            self.metrics.stale.inc("abort")
            return
        if message.num_tokens is not None:
            del request.token_ids[request.num_prompt + message.num_tokens :]
        self._finish_now(request, FinishReason(message.reason), now_s)

    def _abort_by_name(self, api_id: str, message: AbortByName, now_s: float) -> None:
        """Aborts the requests whose id or label equals one of the names, or with `abort_all` all requests of the
        caller. Sends an AbortReply after their last deltas. Names must match exactly: an empty name, or the beginning
        of another name, matches nothing. With `received_ago_s`, spares requests that arrived after the abort was
        received, unless a name is their id."""
        caller, ago_s = message.caller, message.received_ago_s
        since_s = None if ago_s is None else now_s - ago_s
        names = sorted({r.external_id for r in self._live.of_caller(caller)}) if message.abort_all else message.names
        by_name = {name: self._live.find_by_name(name, caller) for name in names}
        matching = {
            # An id is never used again; a label may be that of a later request.
            name: [
                r
                for r in requests
                if since_s is None or (r.external_id == name and not message.abort_all) or r.arrival_s <= since_s
            ]
            for name, requests in by_name.items()
        }
        aborted = [name for name, requests in matching.items() if requests]
        unknown = [name for name, requests in matching.items() if not requests and not message.abort_all]
        for request in (request for name in aborted for request in matching[name]):
            if request.status is not RequestStatus.FINISHED:  # it may go by two of the names
                self._add_tombstone(request.request_id, now_s)
                self._finish_now(request, FinishReason.ABORT, now_s)
        self._outbox.send_after_deltas(api_id, AbortReply(message.query_id, aborted, unknown))

    def _add_tombstone(self, request_id: str, now_s: float) -> None:
        self._tombstones[request_id] = now_s + self.config.tombstone_s
        self._tombstones.move_to_end(request_id)
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _finish_now(self, request: Request, reason: FinishReason, now_s: float) -> None:
        """Ends a request on the word of an api process or of a deadline. The api process already knows of a stop string
        that it found; every other reason is sent to it."""
        request.finish_reason = reason
        if reason is not FinishReason.STOP and request.api_id in self._seq:
            self._outbox.add_delta(request, [])
        self._result_processor.finish(request, reason, now_s)

    def _send_held_requests(self) -> None:
        held: dict[str, list[HeldRequest]] = {api_id: [] for api_id in self._seq}
        queue_positions = {request: queue_position for queue_position, request in enumerate(self.scheduler.waiting, 1)}
        for request in self._live.values():
            if request.api_id in held:
                held[request.api_id].append(self._held_entry(request, queue_positions))
        for api_id, entries in held.items():
            self._outbox.send_after_deltas(
                api_id, HeldRequestsReport(self.incarnation, self._seq[api_id], self._step, entries)
            )

    def _held_entry(self, request: Request, queue_positions: dict[Request, int]) -> HeldRequest:
        computed = request.num_computed + self._handoffs.num_peer_heartbeats(request)
        return HeldRequest(
            request.request_id, request.epoch, request.num_generated, computed, queue_positions.get(request, 0)
        )
