"""The CPU device: int8 layers without torch, or float layers on torch. It computes each step in the call of
`launch`."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.config import WorkerConfig
from onward.errors import StartupError
from onward.kernels.cpu.dot_instruction import best_level
from onward.kernels.cpu.target import kernel_target
from onward.kernels.cpu.threads import ThreadPool
from onward.models.decoder import build_decoder
from onward.models.head_padding import pad_for_cpu
from onward.models.layers.paged_kv import kv_dtype
from onward.models.rope_scaling import length_choice
from onward.models.sharding.shard_plan import rank_config, rank_model
from onward.models.sharding.sharded_tensors import ShardedTensors
from onward.proto.kv_transfer import KvLayout
from onward.proto.model import ModelConfig, PreparedModel
from onward.proto.sampling_params import Pooling, SamplingParams
from onward.proto.step import MAX_PROMPT_LOGPROB_ROWS, AssignSlot, TokenLogprobs
from onward.worker import kv_pool
from onward.worker.batch_builder import BatchBuilder
from onward.worker.device import DummySteps, KvTransferMemory, LaunchHandle, SampledRow, StepOutput
from onward.worker.embedding_pooler import EmbeddingPooler
from onward.worker.kv_memory_budget import choose_num_blocks, free_memory_bytes, resolve_max_model_len
from onward.worker.logits_processors.penalties import LogitsProcessor
from onward.worker.logits_processors.slot_grammar import NUM_MASK_THREADS
from onward.worker.slot_state import SlotState, given_tokens
from onward.worker.speculation.draft_manager import DraftManager
from onward.worker.speculation.proposer import ProposerContext, ProposerFactory
from onward.worker.step_sampler import StepSampler
from onward.worker.tensor_parallel.rank_group import BLOCK_TABLES_ARRAY, RankGroup
from onward.worker.token_bitmasks import TokenBitmasks
from onward.worker.token_logprobs import token_logprobs
from onward.worker.token_span import NO_BLOCK, TokenSpan

if TYPE_CHECKING:
    from onward.models.sharding.rank_exchange import RankExchange


@dataclass(slots=True)
class _ComputedStep:
    logits: np.ndarray
    """Logits of the rows that sample. This is the model's buffer, which sampling overwrites."""
    given_logprobs: list[TokenLogprobs]
    vectors: dict[int, bytes]
    output: StepOutput


class CpuDevice:
    is_synchronous = True
    num_mask_threads = NUM_MASK_THREADS

    def __init__(
        self, model: PreparedModel, config: WorkerConfig, weights: Mapping[str, Any],
        drafter: ProposerFactory | None = None, kv_memory_fd: int | None = None, ranks: RankGroup | None = None,
        exchange: "RankExchange | None" = None, on_kv_pool: Callable[[kv_pool.KvPool], None] = lambda pool: None,
    ) -> None:  # fmt: skip
        """`drafter` creates the proposer of draft tokens; None: no drafts. `kv_memory_fd` is the file descriptor of KV
        memory that outlives this worker, and that an earlier worker may have used; None: the device allocates its
        own. `ranks` are the other processes that compute an int8 model's forward passes, and `exchange` connects the
        ranks of a float model, each of which has such a device; None: there are none. `on_kv_pool` is called when the
        pool is allocated, before the weights are loaded."""
        given_model = model
        model, weights = pad_for_cpu(model, weights)
        self._model, self._config = model, config
        max_model_len = resolve_max_model_len(config, model.config)
        part = model
        if exchange is not None:
            part, weights = rank_model(model, exchange.shard), ShardedTensors(weights, model.config, exchange.shard)
        dtype = kv_dtype(model.config, model.quantization)
        bytes_per_block = kv_pool.block_bytes(model.config, dtype, config.block_size)
        self._drafts_use_blocks = drafter is not None and drafter.bytes_per_block > 0
        bytes_per_block += 0 if drafter is None else drafter.bytes_per_block
        num_kept = 0
        if kv_memory_fd is not None:
            num_kept = kv_pool.num_blocks_in(kv_memory_fd, model.config, dtype, config.block_size)
        # Kept memory is allocated already, so free memory does not limit its number of blocks.
        self.num_blocks = (
            num_kept - 1 if num_kept else choose_num_blocks(config, bytes_per_block, max_model_len, free_memory_bytes)
        )
        # Rank 0 alone samples and drafts, so these use its own threads.
        threads = ThreadPool(_num_threads(config.threads, config.tensor_parallel))
        all_threads = threads if ranks is None else ranks.lead(threads)
        self.num_threads = all_threads.size * (1 if exchange is None else exchange.shard.num_ranks)
        self._tokens = np.zeros((config.max_num_seqs, max_model_len + 1), np.int32)
        table_shape = config.max_num_seqs, -(-max_model_len // config.block_size)
        table_ids = None if ranks is None else ranks.arrays.zeros(BLOCK_TABLES_ARRAY, table_shape, np.int32)
        self._tables = kv_pool.BlockTables(*table_shape, table_ids)
        pool = self._open_pool(model.config, dtype, kv_memory_fd, exchange, is_shared=ranks is not None)
        on_kv_pool(pool)
        self._max_rows = max(config.max_num_batched_tokens, config.max_num_seqs)
        self._batch = BatchBuilder(model.config, self._tokens, self._tables, config.block_size, self._max_rows)
        max_sampled = config.max_num_seqs if drafter is None else self._max_rows
        self._step_sampler = StepSampler(model.config.vocab_size, max_sampled, threads)
        limits = {
            "max_model_len": max_model_len,
            "max_rows": self._max_rows,
            "max_sampled": max_sampled + MAX_PROMPT_LOGPROB_ROWS,
        }
        shared = None if ranks is None else ranks.arrays
        self._decoder = build_decoder(
            part, weights, pool.kv, **limits, threads=all_threads, shared=shared, exchange=exchange,
            vocab_size=model.config.vocab_size,
        )  # fmt: skip
        if ranks is not None:
            ranks.start(given_model, config, pool, **limits)
        self.kv_memory = (
            KvTransferMemory(pool, _kv_layout(model, pool, config.block_size, max_model_len), self.layers_done)
            if exchange is None
            else None  # peers cannot write pools that are divided among ranks
        )
        self.draft_manager: DraftManager | None = None
        if drafter is not None:
            buffers = (self._tokens, self._tables, self.num_blocks + 1, max_model_len, threads)
            proposer = drafter.create(ProposerContext(model, config, *buffers))
            self.draft_manager = DraftManager(
                proposer, self._tokens, self._decoder.last_hidden_states, vocab_size=model.config.vocab_size,
                max_rows=self._max_rows, draft_cost=drafter.draft_cost,
            )  # fmt: skip

    @property
    def scratch_block(self) -> int:
        return self.num_blocks

    @property
    def attention_window(self) -> int | None:
        """The model's attention window. None with drafts of a model, whose layers have KV in the same blocks."""
        return None if self._drafts_use_blocks else self._model.config.attention_window

    @property
    def kernels(self) -> str:
        family = "int8 kernels" if self._model.quantization == "int8" else "torch and our attention"
        num_ranks = self._config.tensor_parallel
        ranks = "" if num_ranks == 1 else f", {num_ranks} ranks"
        return f"{family} ({best_level()} SIMD, {kernel_target().cpu}{ranks})"

    def warm_up_steps(self) -> Iterator[DummySteps]:
        """Yields steps that together run every kernel and read every weight."""
        greedy = SamplingParams(seed=0, temperature=0.0)
        sampled = SamplingParams(seed=0, top_k=5, top_p=0.9, min_p=0.01, logprobs=0)
        for sampling in (greedy, sampled):
            yield DummySteps(1, sampling, min(8, self._max_rows), num_decodes=0)

    def layers_done(self) -> int:
        return self._decoder.layers_done()

    def phase_cycles(self) -> dict[str, int]:
        """Returns the cycles that the last forward pass spent in each kind of phase, for benchmarks."""
        return self._decoder.phase_cycles()

    def assign(self, assign: AssignSlot) -> None:
        self._tokens[assign.slot, : len(assign.token_ids)] = assign.token_ids
        self._tables.replace(assign.slot, assign.block_ids)

    def extend(self, slot: int, first: int, block_ids: Sequence[int], decoding_at: int | None) -> int:
        assert first == self._tables.lengths[slot], "a table grows at its end"
        self._tables.extend(slot, block_ids)
        return NO_BLOCK

    def set_blocks(self, slot: int, first: int, block_ids: Sequence[int]) -> None:
        """Writes a slot's table from index `first` on, at a rank that only computes."""
        if first == 0:
            self._tables.replace(slot, block_ids)
        else:
            self.extend(slot, first, block_ids, None)

    def forward(self, spans: Sequence[TokenSpan[Any]]) -> None:
        """Computes the tokens of these spans, at a rank that only computes."""
        self._decoder.forward(self._batch.build(spans))

    def new_logits_processor(self, sampling: SamplingParams, prompt: np.ndarray, output: np.ndarray) -> LogitsProcessor:
        return LogitsProcessor(sampling, prompt, output, self._model.config.vocab_size)

    def new_pooler(self, pooling: Pooling) -> EmbeddingPooler:
        return EmbeddingPooler(pooling, self._model.config.hidden_size)

    def launch(self, spans: Sequence[TokenSpan[SlotState]], *, is_deferred: bool) -> LaunchHandle:
        sampling = [span for span in spans if span.is_sampled]
        not_sampling = [span for span in spans if not span.is_sampled]
        reporting = [span for span in spans if span.logprob_positions is not None]
        if not spans:
            no_logits = np.zeros((0, self._model.config.vocab_size), np.float32)
            return LaunchHandle(sampling, not_sampling, reporting, _ComputedStep(no_logits, [], {}, StepOutput([], [])))
        logits = self._decoder.forward(self._batch.build(spans))
        num_sampled = sum(1 + len(span.drafts) for span in sampling)
        given = self._given_logprobs(logits[num_sampled:], reporting) if reporting else []
        work = _ComputedStep(logits[:num_sampled], given, self._add_to_poolers(spans, not_sampling), StepOutput([], []))
        handle = LaunchHandle(sampling, not_sampling, reporting, work)
        if sampling and not is_deferred:
            self.sample(handle)
        return handle

    def new_bitmask(self, handle: LaunchHandle, num_rows: int) -> np.ndarray:
        return np.empty((num_rows, -(-self._model.config.vocab_size // 8)), np.uint8)

    def sample(
        self, handle: LaunchHandle, masks: TokenBitmasks | None = None, rows: Sequence[SampledRow] | None = None
    ) -> None:
        work: _ComputedStep = handle.work
        if rows is None:
            logits, spans = work.logits, handle.sampling
            positions, ends = [span.position for span in spans], [span.end for span in spans]
        else:
            logits = work.logits if len(rows) == len(work.logits) else work.logits[[row.row for row in rows]]
            spans = [row.span for row in rows]
            positions = [row.span.position + row.depth for row in rows]
            ends = [row.span.end + row.depth for row in rows]
        if not spans:
            return
        work.output = self._step_sampler.sample(logits, spans, positions, masks)
        # Entries beyond a slot's length are ignored, so tokens that will not be accepted need not be left out.
        self._tokens[[span.slot for span in spans], ends] = work.output.token_ids

    def is_done(self, handle: LaunchHandle) -> bool:
        return True

    def collect(self, handle: LaunchHandle) -> StepOutput:
        work: _ComputedStep = handle.work
        work.output.given_logprobs, work.output.vectors = work.given_logprobs, work.vectors
        return work.output

    def logits_of(self, spans: Sequence[TokenSpan[Any]]) -> np.ndarray:
        rows = self._batch.build(spans)
        assert rows.num_rows <= self._config.max_num_seqs, "the logits buffer has room for every row"
        rows.logits_indices = np.arange(rows.num_rows)
        return self._decoder.forward(rows)[:, : self._model.config.vocab_size].copy()

    def _open_pool(
        self, config: ModelConfig, dtype: np.dtype, memory_fd: int | None, exchange: "RankExchange | None", *,
        is_shared: bool,
    ) -> kv_pool.KvPool:  # fmt: skip
        """Opens the pool, with a block more for dummy steps. `config` is that of the whole model."""
        num_blocks, block_size = self.num_blocks + 1, self._config.block_size
        if exchange is None:
            is_shared = is_shared or self._config.kv_backend is not None
            return kv_pool.allocate_kv_pool(
                config, dtype, num_blocks, block_size, is_shared=is_shared, memory_fd=memory_fd
            )
        num_heads_before = exchange.shard.kv_heads(config).start
        region = kv_pool.PoolRegion.of_rank(config, num_heads_before, dtype, num_blocks, block_size)
        return kv_pool.allocate_kv_pool(
            rank_config(config, exchange.shard), dtype, num_blocks, block_size, is_shared=True, memory_fd=memory_fd,
            region=region,
        )  # fmt: skip

    def _given_logprobs(self, logits: np.ndarray, reporting: Sequence[TokenSpan[SlotState]]) -> list[TokenLogprobs]:
        """Returns the logprobs of the given tokens. The logits of each row are those of the token after it."""
        tokens, num_tops = given_tokens(reporting)
        assert len(tokens) == len(logits), "every row of logits that does not sample is reported"
        vocab_size = self._model.config.vocab_size
        return [
            token_logprobs(row[:vocab_size], token, num_top)
            for row, token, num_top in zip(logits, tokens, num_tops, strict=True)
        ]

    def _add_to_poolers(
        self, spans: Sequence[TokenSpan[SlotState]], not_sampling: Sequence[TokenSpan[SlotState]]
    ) -> dict[int, bytes]:
        """Adds the hidden states of the spans to their poolers. Returns the vectors of complete prompts, by slot."""
        vectors: dict[int, bytes] = {}
        if not any(span.is_pooled for span in not_sampling):
            return vectors
        outputs, row = self._decoder.last_hidden_states(), 0
        for span in spans:
            if span.is_pooled:
                span.slot_state.pooler.add(outputs[row : row + span.count])
                if span.end == span.slot_state.num_tokens:
                    vectors[span.slot] = span.slot_state.pooler.vector()
            row += span.num_rows
        return vectors


def _kv_layout(model: PreparedModel, pool: kv_pool.KvPool, block_size: int, max_model_len: int) -> KvLayout:
    """Returns the KV layout. If the rope scaling depends on `max_model_len`, its choice is part of the fingerprint:
    keys are equal only in instances with the same choice."""
    config = model.config
    scalings = (config.rope_scaling, config.local_rope_scaling)
    choices = [choice for scaling in scalings if (choice := length_choice(scaling, max_model_len))]
    return KvLayout(
        fingerprint="/".join([model.fingerprint, *choices]),
        dtype=pool.kv.data.dtype.name,
        block_size=block_size,
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
    )


def _num_threads(wanted: int | None, num_ranks: int) -> int:
    """Returns the threads of each rank. By default the ranks divide the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if wanted is None:
        return max(1, cores // num_ranks)
    if not 1 <= wanted <= cores:
        raise StartupError(f"--threads {wanted} is not within the 1 to {cores} cores that this process may use")
    return wanted
