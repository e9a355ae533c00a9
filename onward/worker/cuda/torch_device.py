"""A device over torch tensors: a CUDA device with Triton's kernels, or the host with plain operations, for tests.

`launch` and `sample` do not wait for the device: tokens stay there, as the next step's input, and come to the host when
their step is done.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import torch

from onward.config import WorkerConfig
from onward.errors import StartupError
from onward.kernels.batch_sizes import padded_batch_size
from onward.kernels.ops import HeadShape, Ops, RowTensors
from onward.models.device_decoder import DeviceDecoder, DeviceVocabulary, PrefillChunks, build_attention_layers
from onward.models.device_support import check_supported
from onward.models.fingerprint import gpu_model
from onward.models.head_padding import PaddedTensors, padded_config
from onward.models.layers.device.forward_layers import ActivationBuffers
from onward.models.layers.device.model_weights import ModelWeights
from onward.models.layers.device.weights_layout import WeightsLayout
from onward.models.loader.device_weights import copy_device_weights, fill_device_weights, load_device_weights
from onward.models.sharding.parallel_device_weights import add_up_products
from onward.models.sharding.parallel_layers import VocabularyParallel
from onward.models.sharding.rank_exchange import RankExchange
from onward.models.sharding.shard_plan import rank_model
from onward.models.sharding.sharded_tensors import ShardedTensors
from onward.proto.model import ModelConfig, PreparedModel
from onward.proto.reasoning_params import ReasoningParams
from onward.proto.sampling_params import Pooling, SamplingParams
from onward.proto.step import MAX_PROMPT_LOGPROB_ROWS, AssignSlot
from onward.worker.cuda.cuda_graphs import CudaGraphs, batch_sizes_up_to, warmup_batch_sizes
from onward.worker.cuda.device_embedding_pooler import DeviceEmbeddingPooler
from onward.worker.cuda.device_events import DeviceEvent, record_event
from onward.worker.cuda.device_logprobs import PendingLogprobs
from onward.worker.cuda.device_penalties import DeviceLogitsProcessor
from onward.worker.cuda.device_sampler import sample_with_processors
from onward.worker.cuda.kept_device_memory import KeptDeviceMemory
from onward.worker.cuda.slot_uploads import SlotUploads
from onward.worker.cuda.staging_buffer import StagingBuffer, to_device
from onward.worker.cuda.step_packing import PackedStep, PackingSizes, fill_inputs, pack
from onward.worker.device import MAX_STEPS_IN_FLIGHT, DummySteps, LaunchHandle, SampledRow, StepOutput
from onward.worker.kv_memory_budget import (
    DevicePoolSize,
    choose_device_pool,
    choose_num_device_blocks,
    resolve_max_model_len,
)
from onward.worker.logits_processors.slot_grammar import NUM_MASK_THREADS
from onward.worker.slot_state import SlotState, given_tokens
from onward.worker.token_bitmasks import TokenBitmasks
from onward.worker.token_span import NO_BLOCK, TokenSpan

MAX_GROUP = 128
"""Query heads of a KV head, at most: a tile of chunk attention has all of one token."""
MAX_HEAD_DIM = 256
_HEAD_UNIT = 16
"""Heads are padded to a multiple of this (`models.head_padding`)."""
_ROW_UNIT = 8
"""Rows of a product's operands begin at multiples of 16 bytes."""
_MOST_MASK_THREADS = 8

_PLAIN, _CUT = SamplingParams(seed=0), SamplingParams(seed=0, top_k=5, top_p=0.9, min_p=0.01)
_CAREFUL, _CAREFUL_CUT = SamplingParams(seed=0, logprobs=0), SamplingParams(seed=0, top_p=0.9, logprobs=1)
_POOLED = SamplingParams(seed=0, pooling="mean")
_BUDGETED = SamplingParams(seed=0, reasoning=ReasoningParams((0,), (0,), starts_in_reasoning=True, budget=0))


@dataclass(slots=True)
class _LaunchedWork:
    packed: PackedStep[SlotState]
    sampled: torch.Tensor
    """In pinned memory: the token of each span that samples, and whether it is valid."""
    with_cuts: bool = False
    needs_care: bool = False
    """Some rows have logits processors or logprobs."""
    logits: torch.Tensor | None = None
    """Logits of the rows that sample."""
    bits: torch.Tensor | None = None
    logprobs: PendingLogprobs | None = None
    reported: PendingLogprobs | None = None
    vectors: dict[int, torch.Tensor] = field(default_factory=dict)
    """Vectors of complete prompts, by slot."""
    event: DeviceEvent | None = None
    """Recorded after everything that was launched for the step."""


class TorchDevice:
    is_synchronous = False
    num_threads = 0
    kv_memory = None
    draft_manager = None

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
        memory: KeptDeviceMemory | None = None,
        exchange: RankExchange | None = None,
    ) -> None:
        """`weights` are as `open_weights` returns them; None: random ones. `before_pool` is called when the weights are
        loaded, before the rest of the device's memory is measured. A rehearsal captures no graphs. `memory` is for
        weights and KV that outlive this worker; None: they end with it. `exchange` connects the ranks of a model, each of
        which has such a device with its part; None: there is one rank."""
        check_supported(model.config, ops.device_kind)
        model, weights = _pad_heads(model, weights)
        self._model, self._config, self._ops, self._device = model, config, ops, device
        self._exchange = exchange
        part = model
        if exchange is not None:  # random weights are made in the sizes of the part
            part = rank_model(model, exchange.shard)
            weights = None if weights is None else ShardedTensors(weights, model.config, exchange.shard)
        self._part = part.config
        _check_sizes(part.config, config)
        self.max_model_len = resolve_max_model_len(config, model.config)
        dtype = getattr(torch, model.dtype)
        device_weights = _load_weights(part, weights, dtype, device, memory)
        max_rows = max(config.max_num_batched_tokens, padded_batch_size(config.max_num_seqs))
        max_sampled = padded_batch_size(config.max_num_seqs) + MAX_PROMPT_LOGPROB_ROWS
        vocab_size = model.config.vocab_size
        logits = torch.zeros((max_sampled, vocab_size), dtype=dtype, device=device)
        vocabulary = None
        if exchange is not None:
            add_up_products(device_weights, exchange)
            part_of_logits = logits.new_zeros((max_sampled, part.config.vocab_size))
            vocabulary = DeviceVocabulary(VocabularyParallel(vocab_size, exchange), part_of_logits)
        self._decoder = DeviceDecoder(
            part.config, device_weights, ops, ActivationBuffers.allocate(part.config, max_rows, dtype, device), logits,
            build_attention_layers(part.config, device_weights, self.max_model_len, device),
            deterministic=config.deterministic, vocabulary=vocabulary,
        )  # fmt: skip
        heads = HeadShape(part.config.num_heads, part.config.num_kv_heads, part.config.head_dim)
        ops.reserve(heads, config.max_num_seqs, max_sampled, vocab_size, device)
        before_pool()
        self.num_blocks, pool = self._open_pool(dtype, memory)
        self._decoder.set_kv_cache(pool)
        self._slots = SlotUploads(
            config.max_num_seqs, self.max_model_len, config.block_size, self.num_blocks, vocab_size, device
        )
        max_blocks = self._slots.tensors.tables.shape[1]
        self._row_tensors = RowTensors.allocate(max_sampled, max_blocks, device)
        self._row_tensors.sampled.fill_(1)  # in a rehearsal, which launches nothing, every row has a valid token
        self._packing_sizes = PackingSizes(
            config.block_size, self.max_model_len + 1, max_blocks, part.config.num_heads // part.config.num_kv_heads,
            ops.tile_rows,
        )  # fmt: skip
        # A graph cannot contain an exchange, which waits for the host.
        self._graphs = CudaGraphs(is_on=device != "cpu" and not is_rehearsal and exchange is None)
        self._staging_buffers = [StagingBuffer(device) for _ in range(MAX_STEPS_IN_FLIGHT)]
        is_pinned = device != "cpu"
        self._host_inputs = [
            torch.zeros((3, max_sampled), dtype=torch.int32, pin_memory=is_pinned) for _ in self._staging_buffers
        ]
        self._host_sampled = [
            torch.zeros((2, max_sampled), dtype=torch.int32, pin_memory=is_pinned) for _ in self._staging_buffers
        ]
        self._buffer_index = 0
        # A CUDA device serves more streams than a CPU, and needs fewer of the host's cores.
        cores = len(os.sched_getaffinity(0))
        self.num_mask_threads = max(NUM_MASK_THREADS, min(_MOST_MASK_THREADS, cores // 2))

    @property
    def scratch_block(self) -> int:
        """The block after the pool. Padding rows of a batch write it too."""
        return self.num_blocks

    @property
    def attention_window(self) -> int | None:
        """The model's attention window: attention begins to read at its first position (`kernels.ops.Scoring`)."""
        return self._model.config.attention_window

    @property
    def kernels(self) -> str:
        num_ranks = self._config.tensor_parallel
        return f"Triton kernels ({gpu_model()}{'' if num_ranks == 1 else f', {num_ranks} ranks'})"

    def warm_up_steps(self) -> Iterator[DummySteps]:
        """Yields steps with the usual kernels and graphs. The first decode step of each size runs, and the second one
        is captured."""
        max_num_seqs = self._config.max_num_seqs
        for size in warmup_batch_sizes(max_num_seqs):
            yield _dummy(min(size, max_num_seqs), _PLAIN)
        yield _dummy(1, _CUT)

    def rehearsal_steps(self) -> Iterator[DummySteps]:
        """Yields steps of every size and kind."""
        max_num_seqs = self._config.max_num_seqs
        yield _dummy(1, _PLAIN, self._config.max_num_batched_tokens)
        for size in batch_sizes_up_to(max_num_seqs):
            yield _dummy(min(size, max_num_seqs), _PLAIN)
        yield _dummy(1, _POOLED)
        for sampling in (_CUT, _CAREFUL, _CAREFUL_CUT, _BUDGETED):
            for size in (1, max_num_seqs):
                yield _dummy(size, sampling)

    def assign(self, assign: AssignSlot) -> None:
        self._slots.assign(assign, self._stage)

    def extend(self, slot: int, first: int, block_ids: Sequence[int], decoding_at: int | None) -> int:
        """Returns a single block for the token of a decoding row, because the row carries it. Uploads other blocks."""
        if decoding_at is not None and len(block_ids) == 1 and first == decoding_at // self._config.block_size:
            return block_ids[0]
        self._slots.extend(slot, first, block_ids, self._stage)
        return NO_BLOCK

    def set_blocks(self, slot: int, first: int, block_ids: Sequence[int]) -> None:
        """Writes a slot's table from index `first` on, at a rank that only computes."""
        if block_ids:
            self._slots.extend(slot, first, block_ids, self._stage)

    @torch.inference_mode()
    def forward(self, spans: Sequence[TokenSpan[Any]]) -> None:
        """Computes the tokens of these spans, at a rank that only computes. Each step ends with an exchange, so its
        buffers are free when it returns."""
        self._forward(pack(spans, self._packing_sizes))
        self._stage.clear()

    def new_logits_processor(
        self, sampling: SamplingParams, prompt: np.ndarray, output: np.ndarray
    ) -> DeviceLogitsProcessor:
        return DeviceLogitsProcessor(sampling, prompt, output, self._model.config.vocab_size, self._device)

    def new_pooler(self, pooling: Pooling) -> DeviceEmbeddingPooler:
        return DeviceEmbeddingPooler(pooling, self._model.config.hidden_size, self._device)

    @torch.inference_mode()
    def launch(self, spans: Sequence[TokenSpan[SlotState]], *, is_deferred: bool) -> LaunchHandle:
        packed = pack(spans, self._packing_sizes)
        work = _LaunchedWork(packed, self._host_sampled[self._buffer_index])
        self._compute(work, is_deferred=is_deferred)
        work.event = record_event(self._device)
        self._buffer_index = (self._buffer_index + 1) % MAX_STEPS_IN_FLIGHT
        self._stage.clear()
        return LaunchHandle(packed.sampling, packed.not_sampling, packed.reporting, work)

    def new_bitmask(self, handle: LaunchHandle, num_rows: int) -> np.ndarray:
        num_bytes = -(-self._model.config.vocab_size // 8)
        bits = torch.empty((num_rows, num_bytes), dtype=torch.uint8, pin_memory=self._device != "cpu")
        handle.work.bits = bits
        return bits.numpy()

    @torch.inference_mode()
    def sample(
        self, handle: LaunchHandle, masks: TokenBitmasks | None = None, rows: Sequence[SampledRow] | None = None
    ) -> None:
        assert rows is None, "this device has no drafts, so every span has one row"
        if handle.sampling:
            self._sample(handle.work, masks)
        self._copy_sampled_to_host(handle.work)
        handle.work.event = record_event(self._device)

    def is_done(self, handle: LaunchHandle) -> bool:
        return handle.work.event.is_done()

    def collect(self, handle: LaunchHandle) -> StepOutput:
        work: _LaunchedWork = handle.work
        assert work.event is not None, "a step that was launched has an event behind it"
        work.event.wait()
        token_ids, are_valid = work.sampled[:, : len(handle.sampling)].tolist()
        output = StepOutput(token_ids, are_valid)
        if work.logprobs is not None:
            asking = [row for row, one in enumerate(handle.sampling) if one.slot_state.sampling.logprobs is not None]
            output.logprobs = dict(zip(asking, work.logprobs.read(), strict=True))
        if work.reported is not None:
            output.given_logprobs = work.reported.read()
        for slot, vector in work.vectors.items():
            output.vectors[slot] = vector.numpy().astype("<f4").tobytes()
        return output

    @torch.inference_mode()
    def logits_of(self, spans: Sequence[TokenSpan[Any]]) -> np.ndarray:
        """Returns the logits of every row. Each span is computed as one chunk."""
        chunks = [replace(one, is_sampled=False, logprob_positions=range(one.start, one.end)) for one in spans]
        # Copied, because without a CUDA device the array is a view of the logits buffer.
        logits = self._forward(pack(chunks, self._packing_sizes)).float().cpu().numpy().copy()
        self._stage.clear()
        return logits

    @property
    def _stage(self) -> StagingBuffer:
        return self._staging_buffers[self._buffer_index]

    def _open_pool(self, dtype: torch.dtype, memory: KeptDeviceMemory | None) -> tuple[int, list[torch.Tensor]]:
        """Returns the number of blocks, and the pages of each layer. These have one block more than the engine uses,
        for the padding rows of a batch."""
        config = self._part
        block_bytes = config.num_layers * self._page_items * dtype.itemsize
        if memory is not None and memory.num_kv_bytes:
            num_blocks, data = memory.num_kv_bytes // block_bytes - 1, memory.attach_kv()
        else:
            num_blocks, has_standby_room = self._choose_pool(
                block_bytes * self._ranks_per_device(), may_have_standby=memory is not None
            )
            if self._exchange is not None:  # all ranks have measured their devices before any of them allocates
                num_blocks = self._exchange.smallest(num_blocks)
            num_bytes = (num_blocks + 1) * block_bytes
            if memory is not None:
                data = memory.create_kv(num_bytes, has_standby_room=has_standby_room)
            else:
                data = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        assert len(data) == (num_blocks + 1) * block_bytes, "the memory is of a worker of the same model"
        shape = (config.num_layers, num_blocks + 1, 2, config.num_kv_heads, self._config.block_size, config.head_dim)
        return num_blocks, list(data.view(dtype).view(shape).unbind())

    def _choose_pool(self, block_bytes: int, *, may_have_standby: bool) -> DevicePoolSize:
        if self._device == "cpu":
            return DevicePoolSize(self._config.num_kv_blocks or 2, has_standby_room=True)
        free, total = torch.cuda.mem_get_info()
        if not may_have_standby:
            num_blocks = choose_num_device_blocks(self._config, block_bytes, self.max_model_len, free, total)
            return DevicePoolSize(num_blocks, has_standby_room=False)
        buffers = torch.cuda.memory_reserved()  # without the weights, which are in shared memory
        return choose_device_pool(self._config, block_bytes, self.max_model_len, free, total, buffers)

    @property
    def _page_items(self) -> int:
        return 2 * self._part.num_kv_heads * self._config.block_size * self._part.head_dim

    def _ranks_per_device(self) -> int:
        if self._exchange is None or self._device == "cpu":
            return 1
        return self._exchange.shard.ranks_per_device(torch.cuda.device_count())

    def _compute(self, work: _LaunchedWork, *, is_deferred: bool) -> None:
        packed, sampling = work.packed, work.packed.sampling
        if not sampling and packed.chunks is None:
            self._slots.upload(self._stage)
            return
        work.with_cuts = any(span.slot_state.uses_filtering for span in sampling)
        work.needs_care = any(span.position < span.slot_state.processed_until for span in sampling)
        if packed.chunks is None and not work.needs_care and not is_deferred:
            self._decode_and_sample(packed, with_cuts=work.with_cuts)
            self._copy_sampled_to_host(work)
            return
        logits = self._forward(packed)
        self._add_to_poolers(work)
        self._compute_given_logprobs(work, logits[len(sampling) :])
        work.logits = logits[: len(sampling)]
        if is_deferred:
            return
        if sampling:
            self._sample(work, None)
        self._copy_sampled_to_host(work)

    def _copy_sampled_to_host(self, work: _LaunchedWork) -> None:
        # All rows, whichever sampled: a part is not contiguous, and its copy would wait for the device.
        work.sampled.copy_(self._row_tensors.sampled, non_blocking=True)

    def _decode_and_sample(self, packed: PackedStep[SlotState], *, with_cuts: bool) -> None:
        """Runs the usual step: one graph from the rows' inputs to their tokens."""
        assert packed.num_decoding == len(packed.sampling), "every row of a step without chunks decodes"
        rows = self._upload_rows(packed, padded_batch_size(len(packed.sampling)))

        def work() -> None:
            self._ops.load_rows(self._slots.tensors, rows, self._config.block_size)
            self._ops.sample(self._decoder.forward_decode(rows), rows, with_cuts=with_cuts)
            self._ops.append_sampled_tokens(self._slots.tensors, rows)

        self._graphs.run((len(rows.token_ids), with_cuts), work)

    def _forward(self, packed: PackedStep[Any]) -> torch.Tensor:
        """Returns the logits of the rows that sample, then of the rows whose given tokens' logprobs are requested."""
        count, slots = len(packed.sampling), self._slots.tensors
        if packed.chunks is None:
            rows = self._upload_rows(packed, padded_batch_size(count))

            def work() -> None:
                self._ops.load_rows(slots, rows, self._config.block_size)
                self._decoder.forward_decode(rows)

            self._graphs.run((len(rows.token_ids), "logits"), work)
            return self._decoder.logits[:count]
        chunks = packed.chunks
        assert packed.logits_indices is not None, "a step with chunks names the rows whose logits it needs"
        staged = [
            self._stage.put(array)
            for array in (
                chunks.token_indices,
                chunks.table_indices,
                chunks.positions,
                chunks.tiles,
                packed.logits_indices,
            )
        ]
        rows = self._upload_rows(packed, count)
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

    def _upload_rows(self, packed: PackedStep[Any], count: int) -> RowTensors:
        """Copies all inputs of this step to the device."""
        host_inputs = self._host_inputs[self._buffer_index]
        fill_inputs(host_inputs.numpy()[:, :count], packed.sampling, self._slots.padding_slot)
        self._slots.upload(self._stage)
        self._row_tensors.inputs.copy_(host_inputs, non_blocking=True)
        return self._row_tensors.first(count)

    def _sample(self, work: _LaunchedWork, masks: TokenBitmasks | None) -> None:
        logits, sampling = work.logits, work.packed.sampling
        assert logits is not None and len(logits) == len(sampling), "every span that samples has one row of logits"
        slots, rows = self._slots.tensors, self._row_tensors.first(len(logits))
        if work.needs_care or masks is not None:
            work.logprobs = sample_with_processors(
                self._ops, logits, slots, rows, sampling, masks, work.bits, with_cuts=work.with_cuts
            )
        else:
            self._ops.sample(logits, rows, with_cuts=work.with_cuts)
        self._ops.append_sampled_tokens(slots, rows)

    def _add_to_poolers(self, work: _LaunchedWork) -> None:
        outputs = self._decoder.last_hidden_states()
        for row, span in work.packed.pooled:
            span.slot_state.pooler.add(outputs[row : row + span.count], self._ops)
            if span.end == span.slot_state.num_tokens:
                work.vectors[span.slot] = span.slot_state.pooler.vector()

    def _compute_given_logprobs(self, work: _LaunchedWork, logits: torch.Tensor) -> None:
        tokens, num_tops = given_tokens(work.packed.reporting)
        if tokens:
            on_device = to_device(tokens, torch.int64, logits.device)
            work.reported = PendingLogprobs(logits.float(), on_device, num_tops, self._ops)


def _load_weights(
    model: PreparedModel,
    weights: Mapping[str, Any] | None,
    dtype: torch.dtype,
    device: str,
    memory: KeptDeviceMemory | None,
) -> ModelWeights:
    """Returns the weights that an earlier worker has left, or else loads them. With `memory`, they outlive this
    worker."""
    if memory is None:
        return load_device_weights(model, weights, dtype, device)
    layout = WeightsLayout(model, dtype)
    if (kept := memory.attach_weights(layout.num_bytes, layout.digest)) is not None:
        return layout.weights_in(kept)
    # Weights are quantized from wide ones, which are freed before the shared memory is allocated.
    quantized = load_device_weights(model, weights, dtype, device) if model.quantization == "fp8" else None
    region = memory.create_weights(layout.num_bytes)
    device_weights = layout.weights_in(region.memory)
    if quantized is None:
        fill_device_weights(device_weights, model, weights, device)
    else:
        copy_device_weights(quantized, device_weights)
    memory.keep_weights(region, layout.digest)
    return device_weights


def _dummy(num_slots: int, sampling: SamplingParams, length: int = 4) -> DummySteps:
    return DummySteps(num_slots, sampling, length, num_decodes=2)


def _pad_heads(
    model: PreparedModel, weights: Mapping[str, Any] | None
) -> tuple[PreparedModel, Mapping[str, Any] | None]:
    """Returns the same model with heads padded to a size that the kernels support."""
    config = padded_config(model.config, _HEAD_UNIT)
    if config == model.config:
        return model, weights
    padded = None if weights is None else PaddedTensors(weights, model.config, config.head_dim)
    return msgspec.structs.replace(model, config=config), padded


def _check_sizes(model: ModelConfig, config: WorkerConfig) -> None:
    """Raises `StartupError` for sizes that the kernels do not support."""
    if config.block_size & (config.block_size - 1) or config.block_size < 16:
        raise StartupError(f"--block-size {config.block_size} is not a power of two of at least 16, as CUDA needs it")
    if model.num_heads % model.num_kv_heads or model.num_heads // model.num_kv_heads > MAX_GROUP:
        raise StartupError(
            f"the model has {model.num_heads} heads for {model.num_kv_heads} KV heads; on CUDA they must share them "
            f"evenly, at most {MAX_GROUP} each"
        )
    if model.head_dim > MAX_HEAD_DIM:
        raise StartupError(f"the model's head_dim is {model.head_dim}; on CUDA it may be at most {MAX_HEAD_DIM}")
    for name in ("hidden_size", "intermediate_size"):
        if (size := getattr(model, name)) % _ROW_UNIT:
            raise StartupError(f"the model's {name} is {size}; on CUDA it must be a multiple of {_ROW_UNIT}")
