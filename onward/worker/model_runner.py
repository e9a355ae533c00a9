"""Executes step plans on any device: `begin` launches a step, `finish` returns the result of the oldest one.

A slot has everything that decides its request's next token. So a plan, which is made before the last token is known,
only permits what may be computed. `begin` does not wait for sampled tokens: they stay on the device as the next step's
input, and come to the host when their step is done. Only a step with constraints samples later, after these have seen
the tokens. On a synchronous device, `finish` computes the step, so that no result waits for the next step.

An error of one request (a token that does not exist, logits that are not numbers) fails that request only. An error of
a whole step ends the worker, and the engine charges the crash to the step's requests and resubmits them.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from onward.config import WorkerConfig
from onward.proto import SCHEMA_VERSION
from onward.proto.kv_transfer import KvEndpoint
from onward.proto.model import PreparedModel
from onward.proto.step import (
    AssignSlot,
    PreemptSlot,
    RunSlot,
    SlotEvent,
    SlotFailed,
    SlotPreempted,
    SlotTokens,
    StepPlan,
    StepResult,
    WorkerHello,
)
from onward.worker.device import MAX_STEPS_IN_FLIGHT, Device, DummySteps, StepOutput
from onward.worker.draft_verifier import DraftVerifier, verify_drafts
from onward.worker.kv_memory_budget import resolve_max_model_len
from onward.worker.launched_step import LaunchedStep, build_events
from onward.worker.logits_processors.constraint_factory import (
    create_grammar_compiler,
    create_slot_grammar,
    create_thinking,
)
from onward.worker.logits_processors.mask_executor import MaskExecutor, ThreadedMaskExecutor
from onward.worker.logits_processors.penalties import LogitsProcessor
from onward.worker.mask_deferred_sampling import MaskDeferredSampling, can_sample, wait_for_masks
from onward.worker.slot_checks import SlotError, check_assignment, check_blocks, check_slot_blocks, logprob_positions
from onward.worker.slot_state import SlotState
from onward.worker.speculation.draft_manager import DraftManager
from onward.worker.speculation.proposer import DraftRequest
from onward.worker.token_bitmasks import TokenBitmasks
from onward.worker.token_span import NO_BLOCK, TokenSpan

if TYPE_CHECKING:
    from onward.pd.transfer.kv_transfer_thread import KvTransferThread
    from onward.worker.slot_push import SlotPush


class ModelRunner:
    """Turns step plans into launches, and their results into events. It holds slots and steps in flight, but no tensors, KV
    or graphs: the Device does."""

    def __init__(
        self, model: PreparedModel, config: WorkerConfig, device: Device, masks: MaskExecutor | None = None
    ) -> None:
        self._model, self._config, self.device = model, config, device
        self.max_model_len = resolve_max_model_len(config, model.config)
        self.num_blocks, self._block_size = device.num_blocks, config.block_size
        self._num_addressable_blocks = self.num_blocks
        self._max_blocks = -(-self.max_model_len // config.block_size)
        self._grammar_compiler = create_grammar_compiler(model)
        self._mask_executor = masks or ThreadedMaskExecutor(device.num_mask_threads)
        self._slots: list[SlotState | None] = [None] * config.max_num_seqs
        self._waiting: deque[StepPlan] = deque()
        """Plans for a synchronous device, which `finish` computes."""
        self._in_flight: deque[LaunchedStep] = deque()
        self._last_finish_s = 0.0
        self.kv_pusher: KvTransferThread | None = None
        """Sends KV to peers; None in a worker that cannot push."""

    def hello(
        self,
        worker_incarnation: str,
        engine_incarnation: str,
        kv_endpoint: KvEndpoint | None = None,
        kv_memory: str = "",
    ) -> WorkerHello:
        return WorkerHello(
            schema_version=SCHEMA_VERSION,
            worker_incarnation=worker_incarnation,
            engine_incarnation=engine_incarnation,
            pid=os.getpid(),
            fingerprint=self._model.fingerprint,
            num_blocks=self.num_blocks,
            block_size=self._block_size,
            max_model_len=self.max_model_len,
            vocab_size=self._model.config.vocab_size,
            kv_layout=None if self.device.kv_memory is None else self.device.kv_memory.layout,
            kv_endpoint=kv_endpoint,
            kernels=self.device.kernels,
            threads=self.device.num_threads,
            draft_cost=0.0 if self.device.draft_manager is None else self.device.draft_manager.draft_cost,
            attention_window=self.device.attention_window,
            kv_memory=kv_memory,
        )

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Loads or compiles the usual kernels and touches every weight, by the same steps as real requests."""
        progress("warming up")
        self.run_dummy_steps(self.device.warm_up_steps())

    def run_dummy_steps(self, dummies: Iterable[DummySteps]) -> None:
        """Runs dummy steps. All of them write the scratch block only, and the slots are empty afterwards."""
        self._num_addressable_blocks = max(self.num_blocks, self.device.scratch_block + 1)
        for dummy in dummies:
            length = min(dummy.length, self.max_model_len - 1 - dummy.num_decodes)
            table = [self.device.scratch_block] * -(-(length + 1 + dummy.num_decodes) // self._block_size)
            per_step = max(1, self._config.max_num_batched_tokens // length)
            for first in range(0, dummy.num_slots, per_step):
                slots = range(first, min(first + per_step, dummy.num_slots))
                assign = [AssignSlot(i, 0, "warm-up", [0] * length, length, 0, table, dummy.sampling) for i in slots]
                self.step(StepPlan(0, assign=assign, run=[RunSlot(slot, 0, length) for slot in slots]))
            for _ in range(dummy.num_decodes):
                self.step(StepPlan(0, run=[RunSlot(slot, 0, 1) for slot in range(dummy.num_slots)]))
        self._slots = [None] * len(self._slots)
        self._num_addressable_blocks = self.num_blocks

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one step, with no other in flight."""
        assert not self.is_busy, "steps before this one are finished first"
        return self._complete(self._launch(plan))

    @property
    def is_busy(self) -> bool:
        """Whether a step has begun whose result was not returned yet."""
        return bool(self._in_flight or self._waiting)

    @property
    def has_result(self) -> bool:
        """Whether `finish` would return a result without waiting for the device. Has a side effect: launches deferred
        sampling."""
        if not self._in_flight:
            return bool(self._waiting)
        step = self._in_flight[0]
        if (deferred := step.mask_deferred_sampling) is not None:
            if not (deferred.is_computed() or deferred.is_ready):
                return False
            self._sample_deferred(step, deferred)
        return self.device.is_done(step.handle)

    def begin(self, plan: StepPlan) -> None:
        """Executes the plan: preempt, assign, run, in this order. With a synchronous device, `finish` executes it."""
        assert len(self._in_flight) + len(self._waiting) < MAX_STEPS_IN_FLIGHT, "steps in flight are bounded"
        if self.device.is_synchronous:
            self._waiting.append(plan)
        else:
            self._in_flight.append(self._launch(plan))

    def finish(self) -> StepResult | None:
        """Waits for the oldest step that has begun and returns its result; None if no step has begun."""
        if self._waiting:
            return self._complete(self._launch(self._waiting.popleft()))
        return self._complete(self._in_flight.popleft()) if self._in_flight else None

    def compute_logits(self, spans: Sequence[TokenSpan[Any]]) -> np.ndarray:
        """Returns the logits of every row of these spans of assigned slots, without sampling. Evaluations and tests of
        exactness read them."""
        assert not self.is_busy, "no step in flight uses the buffers"
        return self.device.logits_of(spans)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        started_s = time.perf_counter()
        # A step reads the tokens that the step before it samples, so that one's deferred sampling is launched first.
        if self._in_flight and (deferred := self._in_flight[-1].mask_deferred_sampling) is not None:
            self._sample_deferred(self._in_flight[-1], deferred)
        events: list[SlotEvent] = [self._preempt(preempt) for preempt in plan.preempt]
        for assign in plan.assign:
            try:
                self._assign(assign)
            except SlotError as fault:
                self._fail_slot(events, assign, fault)
        spans: list[TokenSpan[SlotState]] = []
        for run in plan.run:
            try:
                if (span := self._span(run)) is not None:
                    spans.append(span)
            except SlotError as fault:
                self._fail_slot(events, run, fault)
        has_drafts = self.device.draft_manager is not None and self._add_drafts(spans, plan)
        is_constrained = any(span.position >= span.slot_state.constrained_from for span in spans)
        is_pushing = self.kv_pusher is not None and self._send_pushes(spans)
        handle = self.device.launch(spans, is_deferred=has_drafts or is_constrained)
        step = LaunchedStep(plan, started_s, events, spans, handle)
        if is_pushing and self.kv_pusher is not None:
            self.kv_pusher.wake()  # for the last layers
        if has_drafts:
            self._verify_drafts(step)
        elif is_constrained:
            self._defer_sampling(step)
        return step

    def _complete(self, step: LaunchedStep) -> StepResult:
        if step.mask_deferred_sampling is not None:
            assert not self._in_flight, "only the newest step defers its sampling"
            self._sample_deferred(step, step.mask_deferred_sampling)
        output = self.device.collect(step.handle)
        events = step.events + build_events(step, output, self._free_failed)
        if self.device.draft_manager is not None:
            events = self._after_drafts(step, events)
        now_s = time.perf_counter()
        busy_s = now_s - max(step.begun_s, self._last_finish_s)
        self._last_finish_s = now_s
        return StepResult(step.plan.step, events, busy_s)

    def _fail_slot(self, events: list[SlotEvent], target: AssignSlot | RunSlot, fault: SlotError) -> None:
        self._slots[target.slot] = None
        events.append(SlotFailed(target.slot, target.slot_epoch, fault.code, str(fault)))

    def _free_failed(self, span: TokenSpan[SlotState]) -> None:
        if self._slots[span.slot] is span.slot_state:
            self._slots[span.slot] = None

    def _preempt(self, preempt: PreemptSlot) -> SlotPreempted:
        """Clears the slot and returns the event. There is an event even if the slot has failed before: it confirms that
        nothing more will come from that epoch."""
        slot = self._slots[preempt.slot]
        if slot is None or slot.slot_epoch > preempt.slot_epoch:
            return SlotPreempted(preempt.slot, preempt.slot_epoch, 0)
        self._slots[preempt.slot] = None
        return SlotPreempted(preempt.slot, preempt.slot_epoch, slot.num_tokens)

    def _assign(self, assign: AssignSlot) -> None:
        """Assigns a slot to a request. Grammar, reasoning tracker and logits processor are rebuilt from the whole token
        list, so they continue where the last slot of this request ended."""
        check_assignment(assign, self.max_model_len, self._model.config.vocab_size)
        self._check_table(assign.block_ids, 0)
        sampling = assign.sampling_params
        if sampling.pooling == "mean" and assign.num_computed:
            raise SlotError("internal_error", "a mean needs every row, and a part of them came from the cache")
        thinking = create_thinking(assign)
        grammar = create_slot_grammar(assign, thinking, self._model, self._grammar_compiler, self._mask_executor)
        has_processor = LogitsProcessor.is_needed(sampling)
        slot = SlotState.of(assign, self._room(len(assign.block_ids)), grammar, thinking, has_processor=has_processor)
        slot.push = self._open_push(assign)
        self.device.assign(assign)
        if has_processor:
            tokens = np.array(assign.token_ids, np.int64)
            prompt, output = tokens[: assign.num_prompt], tokens[assign.num_prompt :]
            slot.logits_processor = self.device.new_logits_processor(sampling, prompt, output)
        if sampling.pooling is not None:
            slot.pooler = self.device.new_pooler(sampling.pooling)
        self._slots[assign.slot] = slot
        if self.device.draft_manager is not None:
            self.device.draft_manager.on_assign(assign)

    def _span(self, run: RunSlot) -> TokenSpan[SlotState] | None:
        """Returns the span that the slot computes in this step, and counts its tokens as computed. Returns None if the
        slot belongs to another epoch or has nothing to compute."""
        slot = self._slots[run.slot]
        if slot is None or slot.slot_epoch != run.slot_epoch:
            return None
        start, num_tokens = slot.num_computed, slot.num_tokens
        assert start <= num_tokens, "only known tokens are computed"
        end = start + run.num_tokens
        if end > num_tokens:  # runs for each row, and `min` takes four times as long
            end = num_tokens
        decodes = start + 1 == num_tokens and not slot.wants_given_logprobs and slot.pooler is None
        new_block = self._take_blocks(run, slot, start if decodes else None) if run.new_block_ids else NO_BLOCK
        if end <= start:
            return None
        if end > slot.max_tokens:
            check_slot_blocks(end, len(slot.block_ids), self._block_size, self.max_model_len)
        positions = logprob_positions(slot, start, end) if slot.wants_given_logprobs else None
        slot.num_computed = end
        if slot.pooler is not None:
            return TokenSpan(run.slot, start, end, False, slot, -1, is_pooled=True)
        slot.num_tokens = num_tokens + (end == num_tokens)
        return TokenSpan(
            run.slot, start, end, end == num_tokens, slot, num_tokens - slot.num_prompt, new_block, positions
        )

    def _take_blocks(self, run: RunSlot, slot: SlotState, decoding_at: int | None) -> int:
        first = len(slot.block_ids)
        self._check_table(run.new_block_ids, first)
        slot.block_ids += run.new_block_ids
        slot.max_tokens = self._room(len(slot.block_ids))
        return self.device.extend(run.slot, first, run.new_block_ids, decoding_at)

    def _room(self, num_blocks: int) -> int:
        return min(num_blocks * self._block_size, self.max_model_len)

    def _check_table(self, block_ids: Sequence[int], first: int) -> None:
        check_blocks(block_ids, self._num_addressable_blocks)
        if first + len(block_ids) > self._max_blocks:
            raise SlotError(
                "internal_error",
                f"{first + len(block_ids)} blocks are more than the {self._max_blocks} that the longest request needs",
            )

    def _defer_sampling(self, step: LaunchedStep) -> None:
        handle = step.handle
        constrained = [
            (row, span) for row, span in enumerate(handle.sampling) if span.position >= span.slot_state.constrained_from
        ]
        if not constrained:
            self.device.sample(handle)
            return
        is_computed = partial(self.device.is_done, handle)
        step.mask_deferred_sampling = MaskDeferredSampling(constrained, handle.sampling, is_computed)
        if step.mask_deferred_sampling.is_ready:
            self._sample_deferred(step, step.mask_deferred_sampling)

    def _sample_deferred(self, step: LaunchedStep, deferred: MaskDeferredSampling) -> None:
        deferred.wait()
        ready: list[tuple[int, SlotState]] = []
        for row, span in deferred.constrained:
            if can_sample(span):
                ready.append((row, span.slot_state))
            else:
                step.rows_without_mask.add(row)
                span.slot_state.undo_sample()
        masks = TokenBitmasks(ready, self.device.new_bitmask(step.handle, len(ready)), step.rows_without_mask)
        step.faults, step.mask_deferred_sampling = masks.faults, None
        self.device.sample(step.handle, masks)

    def _add_drafts(self, spans: Sequence[TokenSpan[SlotState]], plan: StepPlan) -> bool:
        """Adds drafts after the newest tokens of slots whose KV does not go to a peer. Returns whether there are
        any."""
        permitted = {run.slot: run.max_draft_tokens for run in plan.run if run.max_draft_tokens}
        assert self.device.draft_manager is not None, "only a device with a proposer has drafts"
        draft_requests = {
            span.slot: self._draft_request(span.slot, span.slot_state, span.end, permitted[span.slot])
            for span in spans
            if span.slot in permitted
            and span.is_sampled
            and span.logprob_positions is None
            and span.slot_state.push is None
        }
        return bool(draft_requests) and self.device.draft_manager.add_drafts(spans, draft_requests)

    def _draft_request(self, index: int, slot: SlotState, num_tokens: int, wanted: int) -> DraftRequest:
        """Returns a request for at most as many drafts as the slot has room for."""
        return DraftRequest(
            index, min(wanted, slot.max_tokens - num_tokens), num_tokens, slot.num_prompt, slot.sampling
        )

    def _verify_drafts(self, step: LaunchedStep) -> None:
        """Samples a step with drafts. The number of tokens of a slot is known only afterwards, so no other step may be
        in flight, and none is launched until this one is done."""
        assert not self._in_flight, "drafts are verified while no other step is in flight"
        step.verifiers, row = [], 0
        for span in step.handle.sampling:
            step.verifiers.append(DraftVerifier(span, row))
            row += 1 + len(span.drafts)
        wait_for_masks(step.handle.sampling)
        ready: list[DraftVerifier] = []
        for row, verifier in enumerate(step.verifiers):
            if verifier.pending_grammar is None:  # read once: a mask may become ready during the loop
                ready.append(verifier)
            else:
                step.rows_without_mask.add(row)
                verifier.slot.undo_sample()
        verify_drafts(ready, partial(self._sample_verifiers, step))

    def _sample_verifiers(self, step: LaunchedStep, rows: Sequence[tuple[DraftVerifier, int]]) -> StepOutput:
        constrained = [(row, verifier.slot) for row, (verifier, _) in enumerate(rows) if verifier.slot.is_constrained]
        masks = TokenBitmasks(constrained, self.device.new_bitmask(step.handle, len(constrained)))
        for row, fault in masks.faults.items():
            rows[row][0].fail(fault)
        self.device.sample(step.handle, masks, [verifier.sampled_row(depth) for verifier, depth in rows])
        return self.device.collect(step.handle)

    def _after_drafts(self, step: LaunchedStep, events: list[SlotEvent]) -> list[SlotEvent]:
        """Passes the computed spans to the proposer, and adds drafts to events of slots whose KV goes to a peer."""
        draft_manager = self.device.draft_manager
        assert draft_manager is not None, "only a device with a proposer has drafts"
        slots = [self._slots[span.slot] for span in step.spans]
        lengths = [None if slot is None else (slot.num_computed, slot.num_tokens) for slot in slots]
        draft_manager.on_computed(step.spans, lengths)
        permitted = {run.slot: run.max_draft_tokens for run in step.plan.run}
        return [self._with_drafts_for_peer(event, permitted, draft_manager) for event in events]

    def _with_drafts_for_peer(
        self, event: SlotEvent, permitted: Mapping[int, int], draft_manager: DraftManager
    ) -> SlotEvent:
        slot = self._slots[event.slot]
        if not isinstance(event, SlotTokens) or slot is None or slot.push is None:
            return event
        draft_request = self._draft_request(event.slot, slot, slot.num_tokens, permitted[event.slot])
        drafts = draft_manager.propose_for_peer(draft_request)
        return msgspec.structs.replace(event, draft_token_ids=drafts) if drafts else event

    def _open_push(self, assign: AssignSlot) -> "SlotPush | None":
        """Opens the push of an assignment, if there is one. Blocks from the prefix cache are sent first."""
        if assign.push is None:
            return None
        if self.kv_pusher is None:
            raise SlotError("internal_error", "this worker cannot push KV to a peer")
        from onward.worker.slot_push import SlotPush  # imports the KV transfer, which other workers do not need

        push = SlotPush.begin(assign.push, len(assign.token_ids), self._block_size)
        if not push.names_every_block:
            raise SlotError("internal_error", f"the push is not of the list's {push.num_blocks} blocks")
        self.kv_pusher.open_push(assign.push)
        if computed_blocks := push.advance(assign.num_computed, assign.block_ids, None):
            self.kv_pusher.send_computed(computed_blocks)
        self.kv_pusher.wake()
        return push

    def _send_pushes(self, spans: Sequence[TokenSpan[SlotState]]) -> bool:
        """Announces the blocks that this step completes, before they are computed; each layer is sent when it is
        written. Returns whether there are any."""
        assert self.kv_pusher is not None and self.device.kv_memory is not None, "only a worker that can push does"
        layers_before, any_sent = self.device.kv_memory.layers_done(), False
        for span in spans:
            push = span.slot_state.push
            if push is None:
                continue
            if computed_blocks := push.advance(span.end, span.slot_state.block_ids, layers_before):
                self.kv_pusher.send_computed(computed_blocks)
                any_sent = True
        if any_sent:
            self.kv_pusher.wake()
        return any_sent
