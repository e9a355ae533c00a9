"""Executes step plans on a CUDA device: `begin` launches a step, `finish` hands out the result of the oldest one.

Nothing in `begin` waits for the device: tokens stay there, as the next step's input, and come to the host when their step
is done. So the next step is launched before the last one's tokens are known. Only a step with grammars draws later, when
they have seen these tokens: its logits are computed meanwhile. What concerns one request fails that request and nobody
else; what breaks a step brings the worker down, and the engine charges and resubmits.

With `device="cpu"` and plain operations the same code runs without a device, for tests.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from onward.config import WorkerConfig
from onward.errors import StartupError
from onward.kernels.batch_sizes import padded_batch_size
from onward.kernels.ops import HeadShape, Ops, RowTensors
from onward.models.device_decoder import DeviceDecoder, PrefillChunks, build_device_rotary
from onward.models.fingerprint import gpu_model
from onward.models.layers.device.forward_layers import ActivationBuffers
from onward.models.loader.device_weights import load_device_weights
from onward.proto import SCHEMA_VERSION
from onward.proto.model import PreparedModel
from onward.proto.reasoning_params import ReasoningParams
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import (
    MAX_PROMPT_LOGPROB_ROWS,
    AssignSlot,
    PreemptSlot,
    RunSlot,
    SlotEvent,
    SlotFailed,
    SlotPreempted,
    StepPlan,
    StepResult,
    WorkerHello,
)
from onward.worker.cuda.cuda_graphs import CudaGraphs, batch_sizes_up_to, warmup_batch_sizes
from onward.worker.cuda.device_events import record_event
from onward.worker.cuda.device_logprobs import PendingLogprobs
from onward.worker.cuda.device_sampler import DeviceSamplingRow, sample_with_processors
from onward.worker.cuda.device_slots import DeviceSlots, DeviceSlotState
from onward.worker.cuda.launched_step import LaunchedStep, build_events
from onward.worker.cuda.mask_deferred_sampling import MaskDeferredSampling, can_sample
from onward.worker.cuda.staging_buffer import StagingBuffer, to_device
from onward.worker.cuda.step_bitmasks import StepBitmasks
from onward.worker.cuda.step_packing import DeviceTokenSpan, PackedStep, PackingSizes, fill_inputs, pack
from onward.worker.kv_memory_budget import choose_num_device_blocks, resolve_max_model_len
from onward.worker.logits_processors.mask_executor import MaskExecutor
from onward.worker.slot_checks import SlotError

MAX_STEPS_IN_FLIGHT = 4
MAX_GROUP = 128
"""Query heads of a KV head: a tile of chunk attention holds those of one token."""

_PLAIN, _CUT = SamplingParams(seed=0), SamplingParams(seed=0, top_k=5, top_p=0.9, min_p=0.01)
_CAREFUL, _CAREFUL_CUT = SamplingParams(seed=0, logprobs=0), SamplingParams(seed=0, top_p=0.9, logprobs=1)
_POOLED = SamplingParams(seed=0, pooling="mean")
_BUDGETED = SamplingParams(seed=0, reasoning=ReasoningParams((0,), (0,), starts_in_reasoning=True, budget=0))


class CudaModelRunner:
    def __init__(
        self,
        model: PreparedModel,
        config: WorkerConfig,
        weights: Mapping[str, Any] | None,
        *,
        ops: Ops,
        device: str = "cuda",
        is_rehearsal: bool = False,
        before_pool: Callable[[], None] = lambda: None,
        masks: MaskExecutor | None = None,
    ) -> None:
        """`weights` as `open_weights` gives them; None: random ones. `before_pool` is called when the weights are loaded,
        before the rest of the device's memory is measured. A rehearsal captures nothing."""
        self._model, self._config, self._ops, self._device = model, config, ops, device
        self.max_model_len = resolve_max_model_len(config, model.config)
        _check_supported(model, config)
        dtype = getattr(torch, model.dtype)
        device_weights = load_device_weights(model, weights, dtype, device)
        max_rows = max(config.max_num_batched_tokens, padded_batch_size(config.max_num_seqs))
        max_sampled = padded_batch_size(config.max_num_seqs) + MAX_PROMPT_LOGPROB_ROWS
        buffers = ActivationBuffers.allocate(model.config, max_rows, dtype, device)
        logits = torch.zeros((max_sampled, model.config.vocab_size), dtype=dtype, device=device)
        self._decoder = DeviceDecoder(
            model.config, device_weights, ops, buffers, logits,
            build_device_rotary(model.config, self.max_model_len, device), deterministic=config.deterministic,
        )  # fmt: skip
        heads = HeadShape(model.config.num_heads, model.config.num_kv_heads, model.config.head_dim)
        ops.reserve(heads, config.max_num_seqs, max_sampled, model.config.vocab_size, device)
        before_pool()
        self.num_blocks = self._pool_blocks(dtype.itemsize)
        self._decoder.set_kv_cache(self._allocate_pool(dtype))
        self._slots = DeviceSlots(
            model, config.max_num_seqs, self.max_model_len, config.block_size, self.num_blocks, device, masks
        )
        max_blocks = self._slots.tensors.tables.shape[1]
        self._row_tensors = RowTensors.allocate(max_sampled, max_blocks, device)
        self._row_tensors.sampled.fill_(1)  # where nothing is launched, every row still draws a token
        self._packing_sizes = PackingSizes(
            config.block_size, self.max_model_len + 1, max_blocks, model.config.num_heads // model.config.num_kv_heads,
            ops.tile_rows,
        )  # fmt: skip
        self._graphs = CudaGraphs(is_on=device != "cpu" and not is_rehearsal)
        self._in_flight: deque[LaunchedStep] = deque()
        self._staging_buffers = [StagingBuffer(device) for _ in range(MAX_STEPS_IN_FLIGHT)]
        is_pinned = device != "cpu"
        self._host_inputs = [
            torch.zeros((3, max_sampled), dtype=torch.int32, pin_memory=is_pinned) for _ in self._staging_buffers
        ]
        self._host_sampled = [
            torch.zeros((2, max_sampled), dtype=torch.int32, pin_memory=is_pinned) for _ in self._staging_buffers
        ]
        self._buffer_index = 0
        self._last_finish_s = 0.0

    def hello(self, worker_incarnation: str, engine_incarnation: str) -> WorkerHello:
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
            kernels=f"Triton kernels ({gpu_model()})",
        )

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Loads the usual kernels (or compiles them) and captures the usual graphs, through the door of real requests."""
        progress("warming up")
        max_num_seqs = self._config.max_num_seqs
        for size in warmup_batch_sizes(max_num_seqs):
            self._run_dummy_steps(min(size, max_num_seqs), _PLAIN)
        self._run_dummy_steps(1, _CUT)
        for slot in range(max_num_seqs):
            self._slots.free(slot)

    def run_all_dummy_steps(self) -> None:
        """Steps of every size and kind."""
        max_num_seqs = self._config.max_num_seqs
        self._run_dummy_steps(1, _PLAIN, self._config.max_num_batched_tokens)
        for size in batch_sizes_up_to(max_num_seqs):
            self._run_dummy_steps(min(size, max_num_seqs), _PLAIN)
        self._run_dummy_steps(1, _POOLED)
        for sampling in (_CUT, _CAREFUL, _CAREFUL_CUT, _BUDGETED):
            for size in (1, max_num_seqs):
                self._run_dummy_steps(size, sampling)

    def _run_dummy_steps(self, num_slots: int, sampling: SamplingParams, length: int = 4) -> None:
        """Prompts, then two steps that decode: the first runs, the second is captured. All write one block."""
        length = min(length, self.max_model_len - 3)
        table = [0] * -(-(length + 3) // self._config.block_size)
        per_step = max(1, self._config.max_num_batched_tokens // length)
        for first in range(0, num_slots, per_step):
            slots = range(first, min(first + per_step, num_slots))
            assign = [AssignSlot(slot, 0, "warm-up", [0] * length, length, 0, table, sampling) for slot in slots]
            self.step(StepPlan(0, assign=assign, run=[RunSlot(slot, 0, length) for slot in slots]))
        for _ in range(2):
            self.step(StepPlan(0, run=[RunSlot(slot, 0, 1) for slot in range(num_slots)]))

    def step(self, plan: StepPlan) -> StepResult:
        """One step alone."""
        assert not self._in_flight, "steps before this one are finished first"
        self.begin(plan)
        result = self.finish()
        assert result is not None, "a step that has begun has a result"
        return result

    @property
    def is_busy(self) -> bool:
        return bool(self._in_flight)

    @property
    def has_result(self) -> bool:
        """Whether `finish` would not have to wait. Has a side effect: launches deferred sampling."""
        step = self._in_flight[0] if self._in_flight else None
        if (
            step is not None
            and (deferred := step.mask_deferred_sampling) is not None
            and (deferred.forward_event.is_done() or deferred.is_ready)
        ):
            self._finish_deferred_sampling()
        return step is not None and step.done_event is not None and step.done_event.is_done()

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> None:
        """Launches all of it: preempt, assign, run, in this order."""
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "a step keeps its buffers until it is done"
        started_s = time.perf_counter()
        self._finish_deferred_sampling()
        stage = self._staging_buffers[self._buffer_index]
        stage.clear()
        events: list[SlotEvent] = [self._preempt(preempt) for preempt in plan.preempt]
        for assign in plan.assign:
            try:
                self._slots.assign(assign, stage)
            except SlotError as fault:
                self._fail_slot(events, assign, fault)
        spans: list[DeviceTokenSpan[DeviceSlotState]] = []
        for run in plan.run:
            try:
                if (span := self._slots.add_span(run, stage)) is not None:
                    spans.append(span)
            except SlotError as fault:
                self._fail_slot(events, run, fault)
        step = LaunchedStep(
            plan.step, started_s, events, pack(spans, self._packing_sizes), self._host_sampled[self._buffer_index]
        )
        self._compute(step, stage)
        if step.mask_deferred_sampling is None:
            step.done_event = record_event(self._device)
        self._in_flight.append(step)
        self._buffer_index = (self._buffer_index + 1) % MAX_STEPS_IN_FLIGHT

    def finish(self) -> StepResult | None:
        """The result of the oldest step in flight, once the device is done with it; None if there is none."""
        if not self._in_flight:
            return None
        if self._in_flight[0].mask_deferred_sampling is not None:
            assert len(self._in_flight) == 1, "only the newest step defers its sampling"
            self._finish_deferred_sampling()
        step = self._in_flight.popleft()
        assert step.done_event is not None, "a step has its done event before its result is built"
        step.done_event.wait()
        events = step.events + build_events(step, self._free_failed)
        now_s = time.perf_counter()
        busy_s = now_s - max(step.begun_s, self._last_finish_s)
        self._last_finish_s = now_s
        return StepResult(step.number, events, busy_s)

    @torch.inference_mode()
    def compute_logits(self, slot: int, start: int, count: int) -> torch.Tensor:
        """Logits of these tokens of an assigned slot, computed as one chunk: what exactness is asserted on."""
        assert not self._in_flight, "no step in flight uses the buffers"
        stage = self._staging_buffers[0]
        stage.clear()
        span = DeviceTokenSpan(slot, start, start + count, False, None, logprob_positions=range(start, start + count))
        return self._forward(pack([span], self._packing_sizes), stage).clone()

    def _pool_blocks(self, itemsize: int) -> int:
        size = self._model.config.num_layers * self._page_items * itemsize
        if self._device == "cpu":
            return self._config.num_kv_blocks or 2
        free, total = torch.cuda.mem_get_info()
        return choose_num_device_blocks(self._config, size, self.max_model_len, free, total)

    @property
    def _page_items(self) -> int:
        return 2 * self._model.config.num_kv_heads * self._config.block_size * self._model.config.head_dim

    def _allocate_pool(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """One block more than the engine knows of, for rows that belong to nobody."""
        config = self._model.config
        shape = (self.num_blocks + 1, 2, config.num_kv_heads, self._config.block_size, config.head_dim)
        return [torch.zeros(shape, dtype=dtype, device=self._device) for _ in range(config.num_layers)]

    def _fail_slot(self, events: list[SlotEvent], target: AssignSlot | RunSlot, fault: SlotError) -> None:
        self._slots.free(target.slot)
        events.append(SlotFailed(target.slot, target.slot_epoch, fault.code, str(fault)))

    def _preempt(self, preempt: PreemptSlot) -> SlotPreempted:
        """Answered always: also where the slot failed before, nothing more will come from that epoch."""
        slot = self._slots[preempt.slot]
        if slot is None or slot.slot_epoch > preempt.slot_epoch:
            return SlotPreempted(preempt.slot, preempt.slot_epoch, 0)
        self._slots.free(preempt.slot)
        return SlotPreempted(preempt.slot, preempt.slot_epoch, slot.num_tokens)

    def _free_failed(self, span: DeviceTokenSpan[DeviceSlotState]) -> None:
        if self._slots[span.slot] is span.slot_state:
            self._slots.free(span.slot)

    def _compute(self, step: LaunchedStep, stage: StagingBuffer) -> None:
        packed = step.packed
        sampling = packed.sampling
        if not sampling and packed.chunks is None:
            self._slots.upload(stage)
            return
        with_cuts = any(span.slot_state.uses_filtering for span in sampling)
        needs_care = any(span.position < span.slot_state.processed_until for span in sampling)
        constrained = [
            (row, span) for row, span in enumerate(sampling) if span.position >= span.slot_state.constrained_from
        ]
        if packed.chunks is None and not needs_care and not constrained:
            self._decode_and_sample(packed, stage, with_cuts=with_cuts)
            self._copy_sampled_to_host(step)
            return
        logits = self._forward(packed, stage)
        self._add_to_poolers(step)
        self._compute_given_logprobs(step, logits[len(sampling) :])
        logits = logits[: len(sampling)]
        if constrained:
            step.mask_deferred_sampling = MaskDeferredSampling(
                logits, with_cuts, constrained, record_event(self._device)
            )
            if step.mask_deferred_sampling.is_ready:
                self._sample_deferred(step, step.mask_deferred_sampling)
            return
        if sampling:
            self._sample(step, logits, None, with_cuts=with_cuts, needs_care=needs_care)
        self._copy_sampled_to_host(step)

    def _copy_sampled_to_host(self, step: LaunchedStep) -> None:
        # All of it, whoever sampled: a part would not lie in one piece, and would be waited for.
        step.sampled.copy_(self._row_tensors.sampled, non_blocking=True)

    def _finish_deferred_sampling(self) -> None:
        """Samples the newest step if its sampling is deferred; no later step is launched before."""
        if self._in_flight and (deferred := self._in_flight[-1].mask_deferred_sampling) is not None:
            deferred.wait()
            self._sample_deferred(self._in_flight[-1], deferred)

    @torch.inference_mode()
    def _sample_deferred(self, step: LaunchedStep, deferred: MaskDeferredSampling) -> None:
        assert step.done_event is None, "a step is sampled once"
        ready: list[tuple[int, DeviceSlotState]] = []
        for row, span in deferred.constrained:
            if can_sample(span):
                ready.append((row, span.slot_state))
            else:
                step.rows_without_mask.add(row)
                span.slot_state.undo_sample()
        masks = StepBitmasks(ready, self._model.config.vocab_size, self._device)
        step.faults, step.mask_deferred_sampling = masks.faults, None
        self._sample(step, deferred.logits, masks, with_cuts=deferred.with_cuts, needs_care=True)
        self._copy_sampled_to_host(step)
        step.done_event = record_event(self._device)

    def _decode_and_sample(self, packed: PackedStep[DeviceSlotState], stage: StagingBuffer, *, with_cuts: bool) -> None:
        """The usual step: one graph from the rows' inputs to their tokens."""
        assert packed.num_decoding == len(packed.sampling), "every row of a step without chunks decodes"
        rows = self._upload_rows(packed, stage, padded_batch_size(len(packed.sampling)))

        def work() -> None:
            self._ops.load_rows(self._slots.tensors, rows, self._config.block_size)
            self._ops.sample(self._decoder.forward_decode(rows), rows, with_cuts=with_cuts)
            self._ops.append_sampled_tokens(self._slots.tensors, rows)

        self._graphs.run((len(rows.token_ids), with_cuts), work)

    def _forward(self, packed: PackedStep[Any], stage: StagingBuffer) -> torch.Tensor:
        """Logits of the rows that sample, then of those that are reported."""
        count, slots = len(packed.sampling), self._slots.tensors
        if packed.chunks is None:
            rows = self._upload_rows(packed, stage, padded_batch_size(count))

            def work() -> None:
                self._ops.load_rows(slots, rows, self._config.block_size)
                self._decoder.forward_decode(rows)

            self._graphs.run((len(rows.token_ids), "logits"), work)
            return self._decoder.logits[:count]
        chunks = packed.chunks
        assert packed.logits_indices is not None, "a step with chunks names the rows whose logits it needs"
        staged = [
            stage.put(array)
            for array in (
                chunks.token_indices,
                chunks.table_indices,
                chunks.positions,
                chunks.tiles,
                packed.logits_indices,
            )
        ]
        rows = self._upload_rows(packed, stage, count)
        if count:
            self._ops.load_rows(slots, rows, self._config.block_size)
        token_indices, table_indices, positions, tiles, logits_indices = (array.tensor() for array in staged)
        return self._decoder.forward_mixed(
            slots,
            rows,
            packed.num_decoding,
            PrefillChunks(token_indices, table_indices, positions, tiles),
            logits_indices,
        )

    def _upload_rows(self, packed: PackedStep[Any], stage: StagingBuffer, count: int) -> RowTensors:
        """Brings everything that the host says about this step to the device."""
        host_inputs = self._host_inputs[self._buffer_index]
        fill_inputs(host_inputs.numpy()[:, :count], packed.sampling, self._slots.padding_slot)
        self._slots.upload(stage)
        self._row_tensors.inputs.copy_(host_inputs, non_blocking=True)
        return self._row_tensors.first(count)

    def _sample(
        self, step: LaunchedStep, logits: torch.Tensor, masks: StepBitmasks | None, *, with_cuts: bool, needs_care: bool
    ) -> None:
        assert len(logits) == len(step.packed.sampling), "every span that samples has one row of logits"
        slots, rows = self._slots.tensors, self._row_tensors.first(len(logits))
        if needs_care:
            step.logprobs = sample_with_processors(
                self._ops, logits, slots, rows, _rows_to_process(step), masks, with_cuts=with_cuts
            )
        else:
            self._ops.sample(logits, rows, with_cuts=with_cuts)
        self._ops.append_sampled_tokens(slots, rows)

    def _add_to_poolers(self, step: LaunchedStep) -> None:
        outputs = self._decoder.last_hidden_states()
        for row, span in step.packed.pooled:
            pooler = span.slot_state.pooler
            assert pooler is not None, "a pooled span belongs to a slot with a pooler"
            pooler.add(outputs[row : row + span.count], self._ops)
            if span.end == span.slot_state.num_tokens:
                step.vectors[span.slot] = pooler.vector()

    def _compute_given_logprobs(self, step: LaunchedStep, logits: torch.Tensor) -> None:
        """How likely the given tokens were: each row tells of the token behind it, of the prompt or of the output."""
        given: list[int] = []
        num_tops: list[int] = []
        for span in step.packed.reporting:
            slot, sampling = span.slot_state, span.slot_state.sampling
            for position in span.logprob_positions or ():
                given.append(slot.token_ids[position + 1])
                is_prompt = position + 1 < slot.num_prompt
                num_tops.append((sampling.prompt_logprobs if is_prompt else sampling.logprobs) or 0)
        if given:
            tokens = to_device(given, torch.int64, logits.device)
            step.reported = PendingLogprobs(logits.float(), tokens, num_tops, self._ops)


def _rows_to_process(step: LaunchedStep) -> Sequence[DeviceSamplingRow]:
    discarded = step.rows_without_mask | step.faults.keys()
    return [
        DeviceSamplingRow(
            row,
            span.slot,
            span.slot_state.sampling,
            span.end,
            span.position,
            span.slot_state.logits_processor,
            row in discarded,
        )
        for row, span in enumerate(step.packed.sampling)
        if span.position < span.slot_state.processed_until
    ]


def _check_supported(model: PreparedModel, config: WorkerConfig) -> None:
    """What the kernels can compute with."""
    if config.block_size & (config.block_size - 1) or config.block_size < 16:
        raise StartupError(f"--block-size {config.block_size} is not a power of two of at least 16, as CUDA needs it")
    if model.config.num_heads // model.config.num_kv_heads > MAX_GROUP:
        raise StartupError(
            f"the model has {model.config.num_heads} heads for {model.config.num_kv_heads} KV heads; on CUDA at most "
            f"{MAX_GROUP} may share one"
        )
    if model.config.head_dim % 16 or not 16 <= model.config.head_dim <= 256:
        raise StartupError(
            f"the model's head_dim is {model.config.head_dim}; on CUDA it must be a multiple of 16 between 16 and 256"
        )
