"""Executes step plans: the worker without its process and its wire.

A slot holds everything that decides its request's next token, so a plan, made before the last token was known, only
permits. What concerns one request (a token that does not exist, logits that are not numbers) fails that request and
nobody else; what breaks the forward pass itself brings the worker down, and the engine charges and resubmits.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from onward.config import WorkerConfig
from onward.errors import StartupError
from onward.kernels.cpu.dot_instruction import best_level
from onward.kernels.cpu.target import kernel_target
from onward.kernels.cpu.threads import ThreadPool
from onward.models.decoder import build_decoder
from onward.models.layers.paged_kv import kv_dtype
from onward.proto import SCHEMA_VERSION
from onward.proto.kv_transfer import KvEndpoint, KvLayout
from onward.proto.model import PreparedModel
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import (
    MAX_PROMPT_LOGPROB_ROWS,
    AssignSlot,
    PreemptSlot,
    RunSlot,
    SlotAdvanced,
    SlotEmbedding,
    SlotEvent,
    SlotFailed,
    SlotPreempted,
    SlotTokens,
    StepPlan,
    StepResult,
    WorkerHello,
)
from onward.text.reasoning.reasoning_tracker import ReasoningTracker
from onward.worker import kv_pool
from onward.worker.batch_builder import BatchBuilder, TokenSpan
from onward.worker.embedding_pooler import EmbeddingPooler
from onward.worker.kv_memory_budget import choose_num_blocks, free_memory_bytes, resolve_max_model_len
from onward.worker.logits_processors import constraints
from onward.worker.logits_processors.constraint_factory import (
    create_grammar_compiler,
    create_slot_grammar,
    create_thinking,
)
from onward.worker.logits_processors.mask_executor import MaskExecutor, ThreadedMaskExecutor
from onward.worker.logits_processors.penalties import LogitsProcessor
from onward.worker.logits_processors.slot_grammar import NUM_MASK_THREADS, SlotGrammar
from onward.worker.slot_checks import SlotError, check_assignment, check_blocks, check_slot_blocks, logprob_positions
from onward.worker.slot_push import SlotPush
from onward.worker.speculation.draft_manager import DraftManager
from onward.worker.speculation.proposer import DraftRequest, ProposerContext, ProposerFactory
from onward.worker.step_sampler import SamplerOutput, StepSampler

if TYPE_CHECKING:
    from onward.pd.transfer.kv_transfer_thread import KvTransferThread


@dataclass(slots=True)
class SlotState:
    """One request's state. Its tokens are a row of the runner's token table.

    tokens   |---- prompt ----|---- generated ----|
             0           num_prompt           num_tokens
    KV       |------------------------>| num_computed
    """

    slot_epoch: int
    num_prompt: int
    num_tokens: int
    num_computed: int
    sampling: SamplingParams
    logits_processor: LogitsProcessor | None
    grammar: SlotGrammar | None = None
    thinking: ReasoningTracker | None = None
    push: SlotPush | None = None
    score_from: int | None = None
    pooler: EmbeddingPooler | None = None
    """Where a vector is wanted, and no tokens."""
    error: str | None = None
    """Its grammar failed behind the last token that it gave: it can give no more."""

    def __post_init__(self) -> None:
        assert self.num_prompt <= self.num_tokens, "the prompt is the beginning of the slot's tokens"
        assert self.num_computed < self.num_tokens, "a new slot has at least one token to compute"


class CpuModelRunner:
    def __init__(
        self,
        model: PreparedModel,
        config: WorkerConfig,
        weights: Mapping[str, Any],
        masks: MaskExecutor | None = None,
        drafter: ProposerFactory | None = None,
    ) -> None:
        """`drafter` creates the proposer of draft tokens; None: no drafts."""
        self._model, self._config = model, config
        self._grammar_compiler = create_grammar_compiler(model)
        self._mask_executor = masks or ThreadedMaskExecutor(NUM_MASK_THREADS)
        self.max_model_len = resolve_max_model_len(config, model.config)
        dtype = kv_dtype(model.config, model.quantization)
        bytes_per_block = kv_pool.block_bytes(model.config, dtype, config.block_size)
        bytes_per_block += 0 if drafter is None else drafter.bytes_per_block
        self.num_blocks = choose_num_blocks(config, bytes_per_block, self.max_model_len, free_memory_bytes)
        self._num_threads = _num_threads(config.threads)
        threads = ThreadPool(self._num_threads)
        max_blocks = -(-self.max_model_len // config.block_size)
        self._slots: list[SlotState | None] = [None] * config.max_num_seqs
        self._tokens = np.zeros((config.max_num_seqs, self.max_model_len + 1), np.int32)
        self._tables = kv_pool.BlockTables(config.max_num_seqs, max_blocks)
        self.kv_pool = kv_pool.allocate_kv_pool(
            model.config, dtype, self.num_blocks, config.block_size, is_shared=config.kv_backend is not None
        )
        self.kv_pusher: KvTransferThread | None = None
        """Where pushes go, in a worker that can push."""
        max_rows = max(config.max_num_batched_tokens, config.max_num_seqs)
        self._batch = BatchBuilder(model.config, self._tokens, self._tables, config.block_size, max_rows)
        self._max_rows = max_rows
        max_sampled = config.max_num_seqs if drafter is None else max_rows
        self._step_sampler = StepSampler(model.config.vocab_size, max_sampled, threads)
        self._decoder = build_decoder(
            model,
            weights,
            self.kv_pool.kv,
            max_model_len=self.max_model_len,
            max_rows=max_rows,
            max_sampled=max_sampled + MAX_PROMPT_LOGPROB_ROWS,
            threads=threads,
        )
        self._draft_manager = None
        self._draft_cost = 0.0
        if drafter is not None:
            buffers = (self._tokens, self._tables, self.num_blocks, self.max_model_len, threads)
            proposer = drafter.create(ProposerContext(model, config, *buffers))
            self._draft_cost = drafter.draft_cost
            vocab_size = model.config.vocab_size
            self._draft_manager = DraftManager(proposer, self._tokens, vocab_size=vocab_size, max_rows=max_rows)

    @property
    def layout(self) -> KvLayout:
        config = self._model.config
        return KvLayout(
            fingerprint=self._model.fingerprint,
            dtype=self.kv_pool.kv.data.dtype.name,
            block_size=self._config.block_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )

    def layers_done(self) -> int:
        """Of the model, since its beginning; any thread may ask."""
        return self._decoder.layers_done()

    def hello(
        self, worker_incarnation: str, engine_incarnation: str, kv_endpoint: KvEndpoint | None = None
    ) -> WorkerHello:
        return WorkerHello(
            schema_version=SCHEMA_VERSION,
            worker_incarnation=worker_incarnation,
            engine_incarnation=engine_incarnation,
            pid=os.getpid(),
            fingerprint=self._model.fingerprint,
            num_blocks=self.num_blocks,
            block_size=self._config.block_size,
            max_model_len=self.max_model_len,
            vocab_size=self._model.config.vocab_size,
            kv_layout=self.layout,
            kv_endpoint=kv_endpoint,
            kernels=self._kernels,
            threads=self._num_threads,
            draft_cost=self._draft_cost,
        )

    @property
    def _kernels(self) -> str:
        family = "int8 kernels" if self._model.quantization == "int8" else "torch and our attention"
        return f"{family} ({best_level()} SIMD, {kernel_target().cpu})"

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Compiles (or loads) every kernel and touches every weight, through the same door as real requests."""
        progress("warming up")
        greedy = SamplingParams(seed=0, temperature=0.0)
        sampled = SamplingParams(seed=0, top_k=5, top_p=0.9, min_p=0.01, logprobs=0)
        length = min(8, self.max_model_len - 1, self._max_rows)
        for sampling in (greedy, sampled):
            assign = AssignSlot(0, 0, "warm-up", [0] * length, length, 0, [0], sampling)
            self.step(StepPlan(0, assign=[assign], run=[RunSlot(0, 0, length)]))
        self._slots[0] = None

    def step(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        events: list[SlotEvent] = [self._preempt(preempt) for preempt in plan.preempt]
        for assign in plan.assign:
            self._run_isolated(
                events, assign.slot, assign.slot_epoch, lambda assignment=assign: self._assign(assignment)
            )
        spans: list[TokenSpan] = []
        for run in plan.run:
            self._run_isolated(events, run.slot, run.slot_epoch, lambda run_slot=run: self._add_span(run_slot, spans))
        if spans:
            permitted = {run.slot: run.max_draft_tokens for run in plan.run}
            events += self._run_forward(self._with_drafts(spans, permitted), permitted)
        return StepResult(plan.step, events, time.perf_counter() - started)

    def compute_logits(self, spans: Sequence[TokenSpan]) -> np.ndarray:
        """Logits of every row of these spans (at most `max_num_seqs` rows) of assigned slots, without sampling: what
        evaluations read and what exactness is asserted on."""
        rows = self._batch.build(spans)
        assert rows.num_rows <= self._config.max_num_seqs, "the logits buffer has room for every row"
        rows.logits_indices = np.arange(rows.num_rows)
        return self._decoder.forward(rows)[:, : self._model.config.vocab_size].copy()

    def phase_cycles(self) -> dict[str, int]:
        """What the last forward pass spent its time on, for those who measure."""
        return self._decoder.phase_cycles()

    def _run_isolated(self, events: list[SlotEvent], slot: int, epoch: int, act: Callable[[], None]) -> None:
        try:
            act()
        except SlotError as fault:
            self._slots[slot] = None
            events.append(SlotFailed(slot, epoch, fault.code, str(fault)))

    def _preempt(self, preempt: PreemptSlot) -> SlotPreempted:
        """Answered always: also where the slot failed before, nothing more will come from that epoch."""
        slot = self._slots[preempt.slot]
        if slot is None or slot.slot_epoch > preempt.slot_epoch:
            return SlotPreempted(preempt.slot, preempt.slot_epoch, 0)
        self._slots[preempt.slot] = None
        return SlotPreempted(preempt.slot, preempt.slot_epoch, slot.num_tokens)

    def _assign(self, assign: AssignSlot) -> None:
        check_assignment(assign, self.max_model_len, self._model.config.vocab_size)
        count = len(assign.token_ids)
        thinking = create_thinking(assign)
        self._tokens[assign.slot, :count] = assign.token_ids
        self._take_blocks(assign.slot, assign.block_ids, self._tables.replace)
        self._slots[assign.slot] = SlotState(
            slot_epoch=assign.slot_epoch,
            num_prompt=assign.num_prompt,
            num_tokens=count,
            num_computed=assign.num_computed,
            sampling=assign.sampling_params,
            logits_processor=self._create_logits_processor(assign),
            grammar=create_slot_grammar(assign, thinking, self._model, self._grammar_compiler, self._mask_executor),
            thinking=thinking,
            push=self._open_push(assign),
            score_from=assign.rescore_from,
            pooler=self._create_pooler(assign),
        )
        if self._draft_manager is not None:
            self._draft_manager.on_assign(assign)

    def _create_pooler(self, assign: AssignSlot) -> EmbeddingPooler | None:
        kind = assign.sampling_params.pooling
        if kind is None:
            return None
        if kind == "mean" and assign.num_computed:
            raise SlotError("internal_error", "a mean needs every row, and a part of them came from the cache")
        return EmbeddingPooler(kind, self._model.config.hidden_size)

    def _open_push(self, assign: AssignSlot) -> SlotPush | None:
        """What was cached before goes over first."""
        if assign.push is None:
            return None
        if self.kv_pusher is None:
            raise SlotError("internal_error", "this worker cannot push KV to a peer")
        push = SlotPush.begin(assign.push, len(assign.token_ids), self._config.block_size)
        if not push.names_every_block:
            raise SlotError("internal_error", f"the push is not of the list's {push.num_blocks} blocks")
        self.kv_pusher.open_push(assign.push)
        if computed_blocks := push.advance(assign.num_computed, self._table(assign.slot), None):
            self.kv_pusher.send_computed(computed_blocks)
        self.kv_pusher.wake()
        return push

    def _table(self, slot: int) -> list[int]:
        return self._tables.ids[slot, : self._tables.lengths[slot]].tolist()

    def _create_logits_processor(self, assign: AssignSlot) -> LogitsProcessor | None:
        """Rebuilt from the whole list, so it is where the last slot of this request left off."""
        if not LogitsProcessor.is_needed(assign.sampling_params):
            return None
        tokens = self._tokens[assign.slot, : len(assign.token_ids)]
        prompt, output = tokens[: assign.num_prompt], tokens[assign.num_prompt :]
        return LogitsProcessor(assign.sampling_params, prompt, output, self._model.config.vocab_size)

    def _add_span(self, run: RunSlot, spans: list[TokenSpan]) -> None:
        """Adds what the slot may compute; nothing if it belongs to another epoch or has nothing to compute."""
        slot = self._slots[run.slot]
        if slot is None or slot.slot_epoch != run.slot_epoch:
            return
        if slot.error is not None:
            raise _grammar_failed(slot.error)
        self._take_blocks(run.slot, run.new_block_ids, self._tables.extend)
        count = min(run.num_tokens, slot.num_tokens - slot.num_computed)
        if count <= 0:
            return
        end = slot.num_computed + count
        check_slot_blocks(end, self._tables.lengths[run.slot], self._config.block_size, self.max_model_len)
        positions = logprob_positions(slot, slot.num_computed, end)
        is_sampled = slot.pooler is None and end == slot.num_tokens
        spans.append(TokenSpan(run.slot, slot.num_computed, count, is_sampled, positions))

    def _with_drafts(self, spans: list[TokenSpan], permitted: Mapping[int, int]) -> list[TokenSpan]:
        if self._draft_manager is None or not any(permitted.values()):
            return spans
        draft_requests = {}
        for span in spans:
            slot = self._slot(span)
            if (
                span.is_sampled
                and span.logprob_positions is None
                and slot.push is None
                and (wanted := permitted[span.slot])
            ):
                draft_requests[span.slot] = self._draft_request(span.slot, slot, wanted)
        return self._draft_manager.add_drafts(spans, draft_requests)

    def _draft_request(self, index: int, slot: SlotState, wanted: int) -> DraftRequest:
        """As many as there is room for."""
        max_drafts = min(self._tables.lengths[index] * self._config.block_size, self.max_model_len) - slot.num_tokens
        return DraftRequest(index, min(wanted, max_drafts), slot.num_tokens, slot.num_prompt, slot.sampling)

    def _take_blocks(self, slot: int, block_ids: list[int], take: Callable[[int, list[int]], None]) -> None:
        check_blocks(block_ids, self.num_blocks)
        try:
            take(slot, block_ids)
        except ValueError as error:
            raise SlotError("internal_error", str(error)) from None

    def _run_forward(self, spans: list[TokenSpan], permitted: Mapping[int, int]) -> list[SlotEvent]:
        """`permitted`: for each slot, how many tokens may be drafted."""
        rows = self._batch.build(spans)
        pushes = self._send_pushes(spans)
        logits = self._decoder.forward(rows)
        if pushes and self.kv_pusher is not None:
            self.kv_pusher.wake()  # for the last layers
        self._wait_for_masks(spans)
        sampled = self._step_sampler.sample(logits, spans, [self._slot(span) for span in spans], self._tokens)
        self._add_to_poolers(spans)
        events = [self._advance(span, output) for span, output in zip(spans, sampled, strict=True)]
        if self._draft_manager is None:
            return events
        self._draft_manager.on_computed(spans, self._slot_lengths(spans), self._decoder.last_hidden_states)
        return [self._with_drafts_for_peer(event, permitted) for event in events]

    def _slot_lengths(self, spans: list[TokenSpan]) -> list[tuple[int, int] | None]:
        """Of each span's slot, if it is still there: how much is computed, and how long its list is."""
        slots = [self._slots[span.slot] for span in spans]
        return [None if slot is None else (slot.num_computed, slot.num_tokens) for slot in slots]

    def _with_drafts_for_peer(self, event: SlotEvent, permitted: Mapping[int, int]) -> SlotEvent:
        """Adds draft tokens to the event of a slot whose KV goes to a peer."""
        slot = self._slots[event.slot]
        if not isinstance(event, SlotTokens) or slot is None or slot.push is None or self._draft_manager is None:
            return event
        drafts = self._draft_manager.propose_for_peer(self._draft_request(event.slot, slot, permitted[event.slot]))
        return msgspec.structs.replace(event, draft_token_ids=drafts) if drafts else event

    def _add_to_poolers(self, spans: list[TokenSpan]) -> None:
        if all(self._slot(span).pooler is None for span in spans):
            return
        outputs, row = self._decoder.last_hidden_states(), 0
        for span in spans:
            if (pool := self._slot(span).pooler) is not None:
                pool.add(outputs[row : row + span.count])
            row += span.num_rows

    def _send_pushes(self, spans: list[TokenSpan]) -> bool:
        """Announces the blocks that this step completes before they are computed; each layer is sent when it is written."""
        layers_before, any_sent = self.layers_done(), False
        for span in spans:
            push = self._slot(span).push
            if push is None or self.kv_pusher is None:
                continue
            if computed_blocks := push.advance(span.start + span.count, self._table(span.slot), layers_before):
                self.kv_pusher.send_computed(computed_blocks)
                any_sent = True
        if any_sent and self.kv_pusher is not None:
            self.kv_pusher.wake()
        return any_sent

    def _wait_for_masks(self, spans: list[TokenSpan]) -> None:
        """A slot whose mask is not ready skips the step, and nobody waits for it. But blocks that are on their way to a
        peer are not computed twice; and a step of which nobody would get a token gives one mask a little time."""
        slots = [self._slot(span) for span in spans if span.is_sampled]
        needed = [(slot, constraints.active_grammar(slot)) for slot in slots]
        pending = [(slot, grammar) for slot, grammar in needed if grammar is not None and not grammar.is_ready]
        for slot, grammar in pending:
            if slot.push is not None:
                grammar.wait()
        if pending and len(pending) == len(slots):
            SlotGrammar.wait_for_one([grammar for _, grammar in pending])

    def _slot(self, span: TokenSpan) -> SlotState:
        slot = self._slots[span.slot]
        assert slot is not None, "a span belongs to an assigned slot"
        return slot

    def _advance(self, span: TokenSpan, sampled: SamplerOutput) -> SlotEvent:
        slot = self._slot(span)
        assert slot.num_computed == span.start, "a span starts where the slot's computed tokens end"
        assert len(sampled.token_ids) <= 1 + len(span.drafts), (
            "a step samples at most one token more than it has drafts"
        )
        # A slot whose mask was pending needs its last logits again, so its last token counts as not computed. Accepted
        # drafts count as computed; the KV of rejected ones is overwritten later.
        slot.num_computed += span.count - sampled.mask_pending + max(0, len(sampled.token_ids) - 1)
        if slot.pooler is not None and slot.num_computed == slot.num_tokens:
            return self._embedding_event(span, slot, slot.pooler)
        if not span.is_sampled or sampled.mask_pending:
            return SlotAdvanced(span.slot, slot.slot_epoch, slot.num_computed, sampled.prompt_logprobs)
        if not sampled.token_ids:
            if sampled.error is None:
                return self._invalid_logits(span, slot)
            self._slots[span.slot] = None
            fault = _grammar_failed(sampled.error)
            return SlotFailed(span.slot, slot.slot_epoch, fault.code, str(fault))
        slot.error = sampled.error
        position, end = slot.num_tokens - slot.num_prompt, slot.num_tokens + len(sampled.token_ids)
        assert end <= self.max_model_len + 1, "the token table has room for one token behind the context"
        self._tokens[span.slot, slot.num_tokens : end] = sampled.token_ids
        slot.num_tokens = end
        assert slot.num_computed == end - 1, "all tokens but the newest are computed after sampling"
        return SlotTokens(
            span.slot,
            slot.slot_epoch,
            position,
            slot.num_computed,
            sampled.token_ids,
            sampled.logprobs,
            sampled.prompt_logprobs,
            sampled.grammar_done,
            len(span.drafts),
        )

    def _embedding_event(self, span: TokenSpan, slot: SlotState, pool: EmbeddingPooler) -> SlotEvent:
        vector = pool.vector()
        if not np.isfinite(np.frombuffer(vector, "<f4")).all():
            return self._invalid_logits(span, slot)
        return SlotEmbedding(span.slot, slot.slot_epoch, slot.num_computed, vector)

    def _invalid_logits(self, span: TokenSpan, slot: SlotState) -> SlotFailed:
        self._slots[span.slot] = None
        return SlotFailed(
            span.slot, slot.slot_epoch, "invalid_logits", "the model's output for this request is not a number"
        )


def _grammar_failed(fault: str) -> SlotError:
    return SlotError("grammar_failed", f"the request's grammar failed: {fault}")


def _num_threads(wanted: int | None) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if wanted is None:
        return cores
    if not 1 <= wanted <= cores:
        raise StartupError(f"--threads {wanted} is not within the 1 to {cores} cores that this process may use")
    return wanted
