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
from onward.kernels.batches import padded
from onward.kernels.ops import HeadShape, Ops, RowTensors
from onward.layers.device.buffers import Buffers
from onward.models.device_decoder import Chunks, DeviceDecoder, rotary_on
from onward.models.device_weights import load
from onward.models.fingerprint import gpu_model
from onward.proto import SCHEMA_VERSION
from onward.proto.model import PreparedModel
from onward.proto.sampling import Sampling
from onward.proto.step import (
    MAX_PROMPT_LOGPROB_ROWS,
    Assign,
    Event,
    Failed,
    Preempt,
    Preempted,
    Run,
    StepPlan,
    StepResult,
    WorkerHello,
)
from onward.proto.thinking import ThinkingRule
from onward.worker.cuda.answer_masks import AnswerMasks
from onward.worker.cuda.drawing import Draw, draw_with_care
from onward.worker.cuda.graph_sizes import sizes_up_to, warm_sizes
from onward.worker.cuda.graphs import Graphs
from onward.worker.cuda.launched import LaunchedStep, events_of
from onward.worker.cuda.logprobs import PendingLogprobs
from onward.worker.cuda.marks import mark_on
from onward.worker.cuda.memory import device_blocks
from onward.worker.cuda.packing import Geometry, Packed, Span, fill_inputs, pack
from onward.worker.cuda.slots import Slot, Slots
from onward.worker.cuda.staging import Stage, sent
from onward.worker.cuda.undrawn import Undrawn, can_draw
from onward.worker.mask_making import MaskMaking
from onward.worker.memory import longest_sequence
from onward.worker.slot_checks import Fault

MAX_STEPS_IN_FLIGHT = 4
MAX_GROUP = 128
"""Query heads of a KV head: a tile of chunk attention holds those of one token."""

_PLAIN, _CUT = Sampling(seed=0), Sampling(seed=0, top_k=5, top_p=0.9, min_p=0.01)
_CAREFUL, _CAREFUL_CUT = Sampling(seed=0, logprobs=0), Sampling(seed=0, top_p=0.9, logprobs=1)
_POOLED = Sampling(seed=0, pooling="mean")
_BUDGETED = Sampling(seed=0, thinking=ThinkingRule((0,), (0,), begins_inside=True, budget=0))


class CudaRunner:
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
        masks: MaskMaking | None = None,
    ) -> None:
        """`weights` as `open_weights` gives them; None: random ones. `before_pool` is called when the weights are loaded,
        before the rest of the device's memory is measured. A rehearsal captures nothing."""
        self._model, self._config, self._ops, self._device = model, config, ops, device
        self.max_model_len = longest_sequence(config, model.config)
        _check_supported(model, config)
        dtype = getattr(torch, model.dtype)
        loaded = load(model, weights, dtype, device)
        max_rows = max(config.max_num_batched_tokens, padded(config.max_num_seqs))
        max_sampled = padded(config.max_num_seqs) + MAX_PROMPT_LOGPROB_ROWS
        buffers = Buffers.allocate(model.config, max_rows, dtype, device)
        logits = torch.zeros((max_sampled, model.config.vocab_size), dtype=dtype, device=device)
        self._decoder = DeviceDecoder(
            model.config, loaded, ops, buffers, logits, rotary_on(model.config, self.max_model_len, device),
            deterministic=config.deterministic,
        )  # fmt: skip
        heads = HeadShape(model.config.num_heads, model.config.num_kv_heads, model.config.head_dim)
        ops.reserve(heads, config.max_num_seqs, max_sampled, model.config.vocab_size, device)
        before_pool()
        self.num_blocks = self._pool_blocks(dtype.itemsize)
        self._decoder.use(self._allocate_pool(dtype))
        self._slots = Slots(
            model, config.max_num_seqs, self.max_model_len, config.block_size, self.num_blocks, device, masks
        )
        max_blocks = self._slots.tensors.tables.shape[1]
        self._rows = RowTensors.allocate(max_sampled, max_blocks, device)
        self._rows.drawn.fill_(1)  # where nothing is launched, every row still draws a token
        self._geometry = Geometry(
            config.block_size, self.max_model_len + 1, max_blocks, model.config.num_heads // model.config.num_kv_heads,
            ops.tile_rows,
        )  # fmt: skip
        self._graphs = Graphs(is_on=device != "cpu" and not is_rehearsal)
        self._in_flight: deque[LaunchedStep] = deque()
        self._stages = [Stage(device) for _ in range(MAX_STEPS_IN_FLIGHT)]
        is_pinned = device != "cpu"
        self._inputs = [torch.zeros((3, max_sampled), dtype=torch.int32, pin_memory=is_pinned) for _ in self._stages]
        self._drawn = [torch.zeros((2, max_sampled), dtype=torch.int32, pin_memory=is_pinned) for _ in self._stages]
        self._turn = 0
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
        most = self._config.max_num_seqs
        for size in warm_sizes(most):
            self._rehearse(min(size, most), _PLAIN)
        self._rehearse(1, _CUT)
        for slot in range(most):
            self._slots.free(slot)

    def rehearse_all(self) -> None:
        """Steps of every size and kind."""
        most = self._config.max_num_seqs
        self._rehearse(1, _PLAIN, self._config.max_num_batched_tokens)
        for size in sizes_up_to(most):
            self._rehearse(min(size, most), _PLAIN)
        self._rehearse(1, _POOLED)
        for sampling in (_CUT, _CAREFUL, _CAREFUL_CUT, _BUDGETED):
            for size in (1, most):
                self._rehearse(size, sampling)

    def _rehearse(self, num_slots: int, sampling: Sampling, length: int = 4) -> None:
        """Prompts, then two steps that decode: the first runs, the second is captured. All write one block."""
        length = min(length, self.max_model_len - 3)
        table = [0] * -(-(length + 3) // self._config.block_size)
        per_step = max(1, self._config.max_num_batched_tokens // length)
        for first in range(0, num_slots, per_step):
            several = range(first, min(first + per_step, num_slots))
            assign = [Assign(slot, 0, "warm-up", [0] * length, length, 0, table, sampling) for slot in several]
            self.step(StepPlan(0, assign=assign, run=[Run(slot, 0, length) for slot in several]))
        for _ in range(2):
            self.step(StepPlan(0, run=[Run(slot, 0, 1) for slot in range(num_slots)]))

    def step(self, plan: StepPlan) -> StepResult:
        """One step alone."""
        assert not self._in_flight, "steps before this one are finished first"
        self.begin(plan)
        result = self.finish()
        assert result is not None
        return result

    @property
    def is_busy(self) -> bool:
        return bool(self._in_flight)

    @property
    def has_result(self) -> bool:
        """Whether `finish` would not have to wait. Who asks for it moves a draw along that is waited for."""
        step = self._in_flight[0] if self._in_flight else None
        if step is not None and (late := step.undrawn) is not None and (late.forward.is_passed() or late.is_ready):
            self._draw_undrawn()
        return step is not None and step.mark is not None and step.mark.is_passed()

    @torch.inference_mode()
    def begin(self, plan: StepPlan) -> None:
        """Launches all of it: preempt, assign, run, in this order."""
        assert len(self._in_flight) < MAX_STEPS_IN_FLIGHT, "buffers of a step are its own until it is done"
        begun_s = time.perf_counter()
        self._draw_undrawn()
        stage = self._stages[self._turn]
        stage.clear()
        events: list[Event] = [self._preempt(preempt) for preempt in plan.preempt]
        for assign in plan.assign:
            try:
                self._slots.assign(assign, stage)
            except Fault as fault:
                self._fail(events, assign, fault)
        spans: list[Span[Slot]] = []
        for run in plan.run:
            try:
                if (span := self._slots.permit(run, stage)) is not None:
                    spans.append(span)
            except Fault as fault:
                self._fail(events, run, fault)
        step = LaunchedStep(plan.step, begun_s, events, pack(spans, self._geometry), self._drawn[self._turn])
        self._compute(step, stage)
        if step.undrawn is None:
            step.mark = mark_on(self._device)
        self._in_flight.append(step)
        self._turn = (self._turn + 1) % MAX_STEPS_IN_FLIGHT

    def finish(self) -> StepResult | None:
        """The result of the oldest step in flight, once the device is done with it; None if there is none."""
        if not self._in_flight:
            return None
        if self._in_flight[0].undrawn is not None:
            self._draw_undrawn()
        step = self._in_flight.popleft()
        assert step.mark is not None, "a step in flight was launched"
        step.mark.wait()
        events = step.events + events_of(step, self._free_failed)
        now_s = time.perf_counter()
        busy_s = now_s - max(step.begun_s, self._last_finish_s)
        self._last_finish_s = now_s
        return StepResult(step.number, events, busy_s)

    @torch.inference_mode()
    def logits_of(self, slot: int, start: int, count: int) -> torch.Tensor:
        """Logits of these tokens of an assigned slot, computed as one chunk: what exactness is asserted on."""
        assert not self._in_flight
        stage = self._stages[0]
        stage.clear()
        span = Span(slot, start, start + count, False, None, reported=range(start, start + count))
        return self._forward(pack([span], self._geometry), stage).clone()

    def _pool_blocks(self, itemsize: int) -> int:
        size = self._model.config.num_layers * self._page_items * itemsize
        if self._device == "cpu":
            return self._config.num_kv_blocks or 2
        free, total = torch.cuda.mem_get_info()
        return device_blocks(self._config, size, self.max_model_len, free, total)

    @property
    def _page_items(self) -> int:
        return 2 * self._model.config.num_kv_heads * self._config.block_size * self._model.config.head_dim

    def _allocate_pool(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """One block more than the engine knows of, for rows that belong to nobody."""
        config = self._model.config
        shape = (self.num_blocks + 1, 2, config.num_kv_heads, self._config.block_size, config.head_dim)
        return [torch.zeros(shape, dtype=dtype, device=self._device) for _ in range(config.num_layers)]

    def _fail(self, events: list[Event], whose: Assign | Run, fault: Fault) -> None:
        self._slots.free(whose.slot)
        events.append(Failed(whose.slot, whose.epoch, fault.code, str(fault)))

    def _preempt(self, preempt: Preempt) -> Preempted:
        """Answered always: also where the slot failed before, nothing more will come from that epoch."""
        slot = self._slots[preempt.slot]
        if slot is None or slot.epoch > preempt.epoch:
            return Preempted(preempt.slot, preempt.epoch, 0)
        self._slots.free(preempt.slot)
        return Preempted(preempt.slot, preempt.epoch, slot.num_tokens)

    def _free_failed(self, span: Span[Slot]) -> None:
        if self._slots[span.slot] is span.owner:
            self._slots.free(span.slot)

    def _compute(self, step: LaunchedStep, stage: Stage) -> None:
        packed = step.packed
        sampling = packed.sampling
        if not sampling and packed.chunks is None:
            self._slots.send(stage)
            return
        with_cuts = any(span.owner.has_cuts for span in sampling)
        needs_care = any(span.position < span.owner.careful_until for span in sampling)
        ruled = [(row, span) for row, span in enumerate(sampling) if span.position >= span.owner.ruled_from]
        if packed.chunks is None and not needs_care and not ruled:
            self._decode_and_draw(packed, stage, with_cuts=with_cuts)
            self._bring_drawn(step)
            return
        logits = self._forward(packed, stage)
        self._pool(step)
        self._report(step, logits[len(sampling) :])
        logits = logits[: len(sampling)]
        if ruled:
            step.undrawn = Undrawn(logits, with_cuts, ruled, mark_on(self._device))
            if step.undrawn.is_ready:
                self._draw_late(step, step.undrawn)
            return
        if sampling:
            self._draw(step, logits, None, with_cuts=with_cuts, needs_care=needs_care)
        self._bring_drawn(step)

    def _bring_drawn(self, step: LaunchedStep) -> None:
        # All of it, whoever sampled: a part would not lie in one piece, and would be waited for.
        step.drawn.copy_(self._rows.drawn, non_blocking=True)

    def _draw_undrawn(self) -> None:
        """Decides what the newest step draws, if that is still open: nothing is launched behind it before."""
        if self._in_flight and (undrawn := self._in_flight[-1].undrawn) is not None:
            undrawn.wait()
            self._draw_late(self._in_flight[-1], undrawn)

    @torch.inference_mode()
    def _draw_late(self, step: LaunchedStep, undrawn: Undrawn) -> None:
        ready: list[tuple[int, Slot]] = []
        for row, span in undrawn.ruled:
            if can_draw(span):
                ready.append((row, span.owner))
            else:
                step.waiting.add(row)
                span.owner.take_back()
        masks = AnswerMasks(ready, self._model.config.vocab_size, self._device)
        step.faults, step.undrawn = masks.faults, None
        self._draw(step, undrawn.logits, masks, with_cuts=undrawn.with_cuts, needs_care=True)
        self._bring_drawn(step)
        step.mark = mark_on(self._device)

    def _decode_and_draw(self, packed: Packed[Slot], stage: Stage, *, with_cuts: bool) -> None:
        """The usual step: one graph from the rows' inputs to their tokens."""
        rows = self._begin_rows(packed, stage, padded(len(packed.sampling)))

        def work() -> None:
            self._ops.begin_rows(self._slots.tensors, rows, self._config.block_size)
            self._ops.sample(self._decoder.decode(rows), rows, with_cuts=with_cuts)
            self._ops.finish_rows(self._slots.tensors, rows)

        self._graphs.run((len(rows.token_ids), with_cuts), work)

    def _forward(self, packed: Packed[Any], stage: Stage) -> torch.Tensor:
        """Logits of the rows that sample, then of those that are reported."""
        count, slots = len(packed.sampling), self._slots.tensors
        if packed.chunks is None:
            rows = self._begin_rows(packed, stage, padded(count))

            def work() -> None:
                self._ops.begin_rows(slots, rows, self._config.block_size)
                self._decoder.decode(rows)

            self._graphs.run((len(rows.token_ids), "logits"), work)
            return self._decoder.logits[:count]
        arrays = packed.chunks
        assert packed.wanted is not None, "a step with chunks says whose logits are needed"
        staged = [
            stage.put(x) for x in (arrays.token_at, arrays.page_at, arrays.positions, arrays.tiles, packed.wanted)
        ]
        rows = self._begin_rows(packed, stage, count)
        if count:
            self._ops.begin_rows(slots, rows, self._config.block_size)
        token_at, page_at, positions, tiles, wanted = (one.tensor() for one in staged)
        return self._decoder.mixed(
            slots, rows, packed.num_decoding, Chunks(token_at, page_at, positions, tiles), wanted
        )

    def _begin_rows(self, packed: Packed[Any], stage: Stage, count: int) -> RowTensors:
        """Brings everything that the host says about this step to the device."""
        here = self._inputs[self._turn]
        fill_inputs(here.numpy()[:, :count], packed.sampling, self._slots.nobody)
        self._slots.send(stage)
        self._rows.inputs.copy_(here, non_blocking=True)
        return self._rows.first(count)

    def _draw(
        self, step: LaunchedStep, logits: torch.Tensor, masks: AnswerMasks | None, *, with_cuts: bool, needs_care: bool
    ) -> None:
        slots, rows = self._slots.tensors, self._rows.first(len(logits))
        if needs_care:
            step.logprobs = draw_with_care(
                self._ops, logits, slots, rows, _careful_draws(step), masks, with_cuts=with_cuts
            )
        else:
            self._ops.sample(logits, rows, with_cuts=with_cuts)
        self._ops.finish_rows(slots, rows)

    def _pool(self, step: LaunchedStep) -> None:
        outputs = self._decoder.outputs()
        for row, span in step.packed.pooled:
            pool = span.owner.pool
            assert pool is not None, "who is pooled has a pool"
            pool.add(outputs[row : row + span.count], self._ops)
            if span.end == span.owner.num_tokens:
                step.vectors[span.slot] = pool.vector()

    def _report(self, step: LaunchedStep, logits: torch.Tensor) -> None:
        """How likely the given tokens were: each row tells of the token behind it, of the prompt or of the output."""
        given: list[int] = []
        num_tops: list[int] = []
        for span in step.packed.reporting:
            slot, sampling = span.owner, span.owner.sampling
            for position in span.reported or ():
                given.append(slot.token_ids[position + 1])
                is_prompt = position + 1 < slot.num_prompt
                num_tops.append((sampling.prompt_logprobs if is_prompt else sampling.logprobs) or 0)
        if given:
            tokens = sent(given, torch.int64, logits.device)
            step.reported = PendingLogprobs(logits.float(), tokens, num_tops, self._ops)


def _careful_draws(step: LaunchedStep) -> Sequence[Draw]:
    voided = step.waiting | step.faults.keys()
    return [
        Draw(row, span.slot, span.owner.sampling, span.end, span.position, span.owner.rules, row in voided)
        for row, span in enumerate(step.packed.sampling)
        if span.position < span.owner.careful_until
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
