"""Applies a worker's `StepResult` to the requests: one ordered list of stages for each slot, for every transport.

    epoch check -> preempt reply -> failure -> progress of the KV -> position check -> append -> stop decision
    -> drafts -> metrics -> caching -> delta -> finish

A fault while one slot is processed ends that request with a typed error; the tokens of the other slots are sent.

This class also ends, fails and charges requests outside of a step (`finish`, `fail`, `reschedule`, `charge_crash`).
"""

import logging
from operator import attrgetter

from onward.engine.caller_limiter import CallerLimiter
from onward.engine.engine_metrics import EngineMetrics
from onward.engine.live_requests import LiveRequests
from onward.engine.outbox import ApiOutbox
from onward.engine.request import FinishReason, Request, RequestStatus
from onward.engine.scheduler_stats import format_request_line
from onward.engine.scheduling import scheduling_policy
from onward.engine.scheduling.scheduler import Scheduler
from onward.engine.service_rates import ServiceRates
from onward.errors import CrashedWorker
from onward.log import event as log_event
from onward.log import request_fields
from onward.proto.engine import ErrorInfo, WorkerCrashReport
from onward.proto.error_info import to_error_info
from onward.proto.step import (
    REQUEST_FAULTS,
    SlotAdvanced,
    SlotEmbedding,
    SlotEvent,
    SlotFailed,
    SlotPreempted,
    SlotTokens,
    StepResult,
)

log = logging.getLogger(__name__)

_slot = attrgetter("slot")


def stop_reason(request: Request, position: int, *, grammar_done: bool = False) -> FinishReason | None:
    """Returns why the output ends with the token at `position`, or None if it goes on. A prompt computed for a peer
    always ends. The engine makes its stop decision nowhere else."""
    if request.handoff is not None:
        return FinishReason.HANDED_OFF  # the decode instance decides the real finish reason
    sampling = request.spec.sampling_params
    token = request.token_ids[request.num_prompt + position]
    if token in sampling.end_token_ids and position >= sampling.min_tokens:
        return FinishReason.STOP
    if grammar_done:  # whatever `min_tokens` says: nothing can follow
        return FinishReason.STOP
    if position + 1 >= request.max_output_tokens:
        return FinishReason.LENGTH
    return None


class StepResultProcessor:
    def __init__(
        self,
        scheduler: Scheduler,
        live: LiveRequests,
        outbox: ApiOutbox,
        metrics: EngineMetrics,
        callers: CallerLimiter,
    ) -> None:
        self.rates = ServiceRates()
        self._callers = callers
        self._scheduler = scheduler
        self._live = live
        self._outbox = outbox
        self._metrics = metrics
        self._generated = 0
        """Tokens of the step that is being committed: added to their counter once, not once for each slot."""

    def commit(self, result: StepResult, now_s: float) -> None:
        self._scheduler.begin_commit(result.step)
        self._metrics.step_time.observe(result.busy_s)
        find = self._scheduler.request_of_slot_epoch
        # By slot: a wire may keep the worker's order or not, and nothing that we say or plan depends on the wire.
        for event in sorted(result.events, key=_slot):
            request = find(event.slot_epoch)
            if request is None:
                self._metrics.stale.inc(type(event).__name__.removeprefix("Slot").lower())
                continue
            self._process_isolated(request, event, now_s)
        self._count_generated()

    def commit_peer_tokens(self, request: Request, tokens: SlotTokens, now_s: float) -> None:
        """Applies tokens that a peer has sampled for a request, by the same stages as tokens of our worker."""
        self._process_isolated(request, tokens, now_s)
        self._count_generated()

    def finish(self, request: Request, reason: FinishReason, now_s: float, error_code: str | None = None) -> None:
        """Ends a live request: releases slot and blocks behind the fence, counts, logs and forgets it. Its last delta
        has been sent before. A prompt that was computed for a peer is counted later by `record_finish`, once it is
        known whether the peer has its KV."""
        if request.slot is not None:
            self.rates.freed_slots.add(1, now_s)
        self._scheduler.remove(request)
        self._live.remove(request)
        if reason is not FinishReason.HANDED_OFF:
            self.record_finish(request, reason, now_s, error_code)

    def record_finish(
        self, request: Request, reason: FinishReason, now_s: float, error_code: str | None = None
    ) -> None:
        self._metrics.finished.inc(reason.value)
        if reason not in (FinishReason.HANDED_OFF, FinishReason.PD_RESCHEDULE):
            self._metrics.ended.record(request)
        log.info(format_request_line(request, reason, now_s, self._scheduler.config.role, error_code))

    def fail(self, request: Request, error: ErrorInfo, now_s: float) -> None:
        """Ends a request with a typed error. What it has generated stays with the layer above."""
        request.finish_reason = FinishReason.ERROR
        self._outbox.add_delta(request, [], error)
        self.finish(request, FinishReason.ERROR, now_s, error.code)

    def charge_crash(self, request: Request, now_s: float) -> bool:
        """Charges the request with the death of a worker, ours or a peer's, in a step that ran it. Fails the request
        and returns True if it now has MAX_CRASH_CHARGES charges. Otherwise returns False and reports the count to the
        api process, which keeps it across a restart of this engine."""
        request.worker_crashes += 1
        request.crash_charge_position = request.num_generated
        if request.worker_crashes >= scheduling_policy.MAX_CRASH_CHARGES:
            error = CrashedWorker(f"workers died {request.worker_crashes} times while they ran this request")
            self.fail(request, to_error_info(error), now_s)
            return True
        report = WorkerCrashReport(request.spec.request_id, request.spec.epoch, request.worker_crashes)
        self._outbox.send(request.api_id, report)
        return False

    def reschedule(self, request: Request, error: ErrorInfo, now_s: float) -> None:
        """Ends a request that cannot continue here with `pd_reschedule`, so that another instance continues it with its
        tokens so far. A request without generated tokens fails with `error` instead."""
        if not request.num_generated:
            self.fail(request, error, now_s)
            return
        request.finish_reason = FinishReason.PD_RESCHEDULE
        self._outbox.add_delta(request, [], error)
        self.finish(request, FinishReason.PD_RESCHEDULE, now_s, error.code)

    def _process_isolated(self, request: Request, event: SlotEvent, now_s: float) -> None:
        try:
            self._process(request, event, now_s)
        except Exception as fault:
            self._fail_isolated(request, fault, now_s)

    def _count_generated(self) -> None:
        if self._generated:
            self._metrics.tokens.inc("generated", by=self._generated)
            self._generated = 0
        self._metrics.drafts.flush_step()

    def _process(self, request: Request, event: SlotEvent, now_s: float) -> None:
        match event:
            case SlotTokens():
                self._on_tokens(request, event, now_s)
            case SlotAdvanced():
                self._collect_prompt_logprobs(request, event)
                self._advance(request, event.num_computed, now_s)
            case SlotPreempted():
                self._on_preempted(request, event)
            case SlotEmbedding():
                self._on_embedding(request, event, now_s)
            case SlotFailed():
                status = 400 if event.code in REQUEST_FAULTS else 500
                self.fail(request, ErrorInfo(event.code, event.message, status), now_s)

    def _on_preempted(self, request: Request, event: SlotPreempted) -> None:
        assert event.num_tokens == len(request.token_ids), "engine and worker agree on the list that goes on"
        self._scheduler.requeue_preempted(request)
        self._metrics.preemptions.inc()

    def _advance(self, request: Request, num_computed: int, now_s: float) -> None:
        """Sets `num_computed`, counts prompt tokens that are computed for the first time, and publishes the computed
        blocks. Only events of a worker move `num_computed`, never the plan, so a block that was not written is never
        cached."""
        assert request.num_computed <= num_computed <= len(request.token_ids), "KV is computed for known tokens only"
        request.num_computed = num_computed
        if request.num_prompt_counted < (seen := min(num_computed, request.num_prompt)):
            self.rates.prompt_tokens.add(seen - request.num_prompt_counted, now_s)
            request.num_prompt_counted = seen
        self._scheduler.publish_computed(request)

    def _on_tokens(self, request: Request, event: SlotTokens, now_s: float) -> None:
        if event.position != request.num_generated:
            # A duplicate is dropped. A gap cannot be: the wire is in order, so it is a fault of this slot.
            assert event.position < request.num_generated, f"token {event.position} after {request.num_generated}"
            self._metrics.stale.inc("position")
            return
        self._collect_prompt_logprobs(request, event)
        accepted = self._append(request, event.token_ids, event.grammar_done)
        # Behind a stop there may be KV of tokens that were cut.
        last = len(request.token_ids) - 1
        self._advance(request, event.num_computed if event.num_computed <= last else last, now_s)
        if request.phases is not None and request.status is RequestStatus.RUNNING and request.handoff is None:
            request.phases.enter("decode", request.num_generated)
        num_drafted = self._record_drafts(request, event.num_draft_tokens, len(accepted))
        self._record_metrics(request, len(accepted), now_s)
        logprobs = event.logprobs[: len(accepted)] if event.logprobs is not None else None
        self._outbox.add_delta(
            request,
            accepted,
            None,
            logprobs,
            request.prompt_logprobs,
            grammar_done=event.grammar_done,
            num_drafted=num_drafted,
            draft_token_ids=event.draft_token_ids,
        )
        request.prompt_logprobs = request.score_from = None
        if request.finish_reason:
            self.finish(request, request.finish_reason, now_s)

    def _on_embedding(self, request: Request, event: SlotEmbedding, now_s: float) -> None:
        assert event.num_computed == len(request.token_ids), "the vector is of the whole prompt"
        self._advance(request, event.num_computed, now_s)
        self._record_metrics(request, 0, now_s)
        request.finish_reason = FinishReason.STOP
        self._outbox.add_delta(request, [], embedding=event.vector)
        self.finish(request, FinishReason.STOP, now_s)

    def _collect_prompt_logprobs(self, request: Request, event: SlotAdvanced | SlotTokens) -> None:
        if event.prompt_logprobs is not None:
            request.prompt_logprobs = (request.prompt_logprobs or []) + event.prompt_logprobs

    def _append(self, request: Request, token_ids: list[int], grammar_done: bool) -> list[int]:
        """Adds tokens up to the one that ends the output; what lies behind it never existed."""
        position, last = request.num_generated, len(token_ids) - 1
        for index, token in enumerate(token_ids):
            request.token_ids.append(token)
            if reason := stop_reason(request, position + index, grammar_done=grammar_done and index == last):
                request.finish_reason = reason
                return token_ids[: index + 1]
        return token_ids

    def _record_drafts(self, request: Request, num_drafted: int, num_tokens: int) -> int:
        """Counts the drafts of a step for the request and for the metrics, and returns `num_drafted`. A step with
        drafts gives the accepted drafts and one more token."""
        if request.max_drafts:
            request.draft_acceptance.record(num_drafted, num_tokens - 1)
        if num_drafted:
            self._metrics.drafts.record(num_drafted, num_tokens - 1)
        return num_drafted

    def _record_metrics(self, request: Request, num_tokens: int, now_s: float) -> None:
        metrics = self._metrics
        self._generated += num_tokens
        if request.spec.caller_limits is not None:
            self._callers.charge(request.caller, request.spec.caller_limits, num_tokens, now_s)
        charged = request.worker_crashes or request.engine_crashes
        if charged and request.num_generated > request.crash_charge_position:
            request.worker_crashes = request.engine_crashes = 0
            self._scheduler.suspects.discard(request)
        if request.last_token_s is not None:
            metrics.inter_token.observe((now_s - request.last_token_s) / num_tokens)
        elif not request.spec.generated_token_ids:
            request.first_token_s = now_s
            scheduled_s = request.scheduled_s if request.scheduled_s is not None else now_s
            metrics.queue_time.observe(scheduled_s - request.submitted_s)
            metrics.prefill_time.observe(now_s - scheduled_s)
            metrics.time_to_first_token.observe(now_s - request.submitted_s)
            metrics.tokens.inc("prompt", by=request.num_prompt)
            metrics.tokens.inc("cached", by=request.num_cached_tokens or 0)
        request.last_token_s = now_s

    def _fail_isolated(self, request: Request, fault: Exception, now_s: float) -> None:
        fields = request_fields(request.request_id, request.spec.client_request_id)
        log.exception(log_event("request failed", **fields, fault=repr(fault)))
        self._metrics.isolated_errors.inc()
        if request.status is RequestStatus.FINISHED:
            return
        if request.finish_reason and request.finish_sent:
            self.finish(request, request.finish_reason, now_s)  # the end went out; a second one must not
            return
        # Tokens that were not sent never existed: the error stands where the layer above expects the next one.
        del request.token_ids[request.num_prompt + request.num_sent_tokens :]
        self.fail(request, ErrorInfo("internal_error", f"the engine failed on this request: {fault!r}"), now_s)
