"""The int8 layers: a model is a kernel context of addresses, and its forward pass is one kernel. No torch.

The weights are the arrays of `kernels.quantize`, mapped and used in place.
"""

from collections.abc import Mapping

import numpy as np

from onward.kernels.cpu import int8_forward as step
from onward.kernels.cpu import int8_forward_general as general
from onward.kernels.cpu.activations import KINDS
from onward.kernels.cpu.phases import END_STAMP, WORDS_PER_PHASE
from onward.kernels.cpu.quantized_rows import QuantizedActivations
from onward.kernels.cpu.threads import KernelThreads
from onward.kernels.cpu.weight_kernels import pair_table
from onward.kernels.cpu.weight_lookup import format_fields
from onward.kernels.quantize import segments_of
from onward.kernels.weight_formats import OUTPUT_UNIT, format_of_record
from onward.models.device_support import is_plain
from onward.models.layers.forward_batch import ForwardBatch
from onward.models.layers.kernel_context import (
    fill_batch_fields,
    fill_context,
    fill_model_fields,
    fill_options,
    new_context,
)
from onward.models.layers.paged_kv import AttentionScratch, PagedKV
from onward.models.layers.rotary_table import RotaryTables
from onward.models.layers.step_arrays import BatchArrays, PrivateArrays, StepArrays
from onward.proto.model import Experts, ModelConfig

TILE_SCRATCH = step.TILE_SCRATCH
_FINISHED = 8
"""Index of the word that counts a phase's finished items, see `kernels.cpu.phases`."""

_COLUMNS = {
    "qkv": step.QKV, "o": step.OUT, "gate_up": step.GATE_UP, "down": step.DOWN, "input_norm": step.INPUT_NORM,
    "post_norm": step.POST_NORM, "qkv_bias": step.QKV_BIAS, "q_norm": step.Q_NORM, "k_norm": step.K_NORM,
    "o_bias": step.OUT_BIAS, "gate_up_bias": step.GATE_UP_BIAS, "down_bias": step.DOWN_BIAS,
    "input_norm_bias": step.INPUT_NORM_BIAS, "post_norm_bias": step.POST_NORM_BIAS, "out_norm": step.OUT_NORM,
    "out_norm_bias": step.OUT_NORM_BIAS, "mlp_norm": step.MLP_NORM, "mlp_norm_bias": step.MLP_NORM_BIAS,
    "sinks": step.SINKS, "router": step.ROUTER, "router_bias": step.ROUTER_BIAS, "shared_gate": step.SHARED_GATE,
    "selection_bias": step.SELECTION_BIAS,
}  # fmt: skip
_EXPERT_COLUMNS = {
    "gate_up": step.EXPERT_GATE_UP, "down": step.EXPERT_DOWN, "gate_up_bias": step.EXPERT_GATE_UP_BIAS,
    "down_bias": step.EXPERT_DOWN_BIAS,
}  # fmt: skip


class Int8Model:
    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        config: ModelConfig,
        rotary: RotaryTables,
        kv: PagedKV,
        scratch: AttentionScratch,
        threads: KernelThreads,
        *,
        max_rows: int,
        max_sampled: int,
        shared: StepArrays | None = None,
    ) -> None:
        """`shared` allocates arrays that all ranks share; None: there is one rank."""
        self._kernel, self._phases = step.int8_forward[kv.data.itemsize], step.PHASES
        if not is_plain(config):
            self._kernel, self._phases = general.int8_forward_general[kv.data.itemsize], general.PHASES
        self._threads = threads
        self._num_layers, self._layers_done = config.num_layers, 0
        self._num_rows, self._eps, self._is_layer_norm = 0, np.float32(config.rms_norm_eps), config.norm == "layer"
        self._num_rows_running: int | None = None
        self._vocab_size = -(-config.vocab_size // OUTPUT_UNIT) * OUTPUT_UNIT
        self._context = new_context(self._kernel)
        self._references: list[object] = [rotary, kv, scratch]
        fill_model_fields(self._context, config, rotary.everywhere, kv, scratch, threads)
        fill_options(self._context, config)
        self._set_fields(layer_stride=kv.layer_stride, num_layers=config.num_layers)
        self._set_fields(
            is_layer_norm=self._is_layer_norm, is_parallel=config.parallel_block, is_gated=config.gated_mlp,
            activation=KINDS[config.activation], embedding_multiplier=config.embedding_multiplier,
            logit_softcap=config.logit_softcap or 0.0,
        )  # fmt: skip
        if (clamped := config.clamped_swiglu) is not None:
            self._set_fields(swiglu_alpha=clamped.alpha, swiglu_limit=clamped.limit)
        self._set_weights(weights, config, rotary)
        self._arrays = shared or PrivateArrays()
        self._batch = None if shared is None else BatchArrays.allocate(shared, max_rows, max_sampled)
        self._allocate(config, max_rows, max_sampled)
        if shared is not None:
            assert self._kernel.address, "rank 0 compiles the kernel before other ranks look for it in the cache"

    def forward(self, rows: ForwardBatch) -> np.ndarray:
        count = len(rows.logits_indices)
        assert count <= len(self._logits), "the logits buffer has room for every row that is sampled"
        self._fill_batch(rows if self._batch is None else self._batch.take(rows))
        self._work[:] = 0
        self._num_rows = self._num_rows_running = rows.num_rows
        self._threads.run(self._kernel, self._context)
        self._layers_done += self._num_layers
        self._num_rows_running = None
        return self._logits[:count]

    def follow(self, block_tables: np.ndarray) -> None:
        """Takes part in the passes of rank 0, as another rank. Returns when rank 0 has stopped them."""
        assert self._batch is not None, "ranks share their arrays"
        self._fill_batch(self._batch.empty(block_tables))
        self._threads.run(self._kernel, self._context)

    def _fill_batch(self, rows: ForwardBatch) -> None:
        fill_batch_fields(self._context, rows)
        sampled = rows.logits_indices
        fill_context(self._context, token_ids=rows.token_ids, sampled=sampled, num_sampled=len(sampled))

    @property
    def hidden(self) -> np.ndarray:
        """The residual stream of each row, float32 [max_rows, hidden_size]."""
        return self._hidden

    def last_hidden_states(self) -> np.ndarray:
        hidden = self._hidden[: self._num_rows]
        if self._is_layer_norm:
            hidden = hidden - np.mean(hidden, axis=1, keepdims=True)
        scale = 1 / np.sqrt(np.mean(np.square(hidden), axis=1, keepdims=True) + self._eps)
        normed = hidden * scale * self._final_norm
        return normed if self._final_norm_bias is None else normed + self._final_norm_bias

    def layers_done(self) -> int:
        """Returns the number of layers whose keys and values are written, over all passes. The fields are read in an
        order in which the result is never too high, even if a pass ends and the next one begins meanwhile."""
        layers_before, num_rows = self._layers_done, self._num_rows_running
        if num_rows is None:
            return layers_before
        return layers_before + int(np.count_nonzero(self._num_stored >= num_rows))

    def phase_cycles(self) -> dict[str, int]:
        """Returns the cycles that the last forward pass spent in each kind of phase, from the end of the embedding
        on."""
        # A skipped phase has no time stamp: it gets that of the last phase before it.
        phase_times = np.diff(np.maximum.accumulate(self._work[:, END_STAMP]))
        names = [*self._phases * self._num_layers, "norm", "head", "head"]
        cycles = dict.fromkeys([*self._phases, "head"], 0)
        for name, count in zip(names, phase_times.tolist(), strict=True):
            cycles[name] += count
        return cycles

    def _set_fields(self, **fields: np.ndarray | float) -> None:
        """Sets fields of the context, and keeps their arrays alive as long as the context."""
        self._references += fields.values()
        fill_context(self._context, **fields)

    def _set_weights(self, weights: Mapping[str, np.ndarray], config: ModelConfig, rotary: RotaryTables) -> None:
        layers = np.zeros((config.num_layers, step.NUM_WEIGHTS), np.int64)
        for layer in range(config.num_layers):
            for name, column in _COLUMNS.items():
                array = weights.get(f"layers.{layer}.{name}")
                if array is not None and column < step.NUM_MATRICES:
                    array = self._pairs(segments_of(weights, f"layers.{layer}.{name}"))
                if array is not None:
                    self._references.append(array)
                    layers[layer, column] = array.ctypes.data
            layers[layer, step.WINDOW] = config.layer(layer).window or 0
            layers[layer, step.MLP_SIZE] = config.mlp_size(layer) or 0
            if (experts := config.layer_experts(layer)) is not None:
                layers[layer, step.EXPERTS] = self._expert_table(weights, layer, experts).ctypes.data
            if (rotary_table := rotary.of_layer(config, layer)) is not None:
                layers[layer, step.COS] = rotary_table.cos.ctypes.data
                layers[layer, step.SIN] = rotary_table.sin.ctypes.data
        embedding = weights["embed"]
        head = embedding if config.tie_word_embeddings else weights["head"]
        self._set_fields(layers=layers, embedding=embedding, head=self._pairs([head]))
        self._set_fields(embedding_fields=format_fields(format_of_record(embedding.shape[-1])))
        self._final_norm, self._final_norm_bias = weights["norm"], weights.get("norm_bias")
        # The kernel's copy includes the factor of the logits; `last_hidden_states` does not.
        factor = np.float32(config.logits_multiplier)
        self._set_fields(final_norm=self._final_norm if factor == 1 else self._final_norm * factor)
        if self._final_norm_bias is not None:
            self._set_fields(final_norm_bias=self._final_norm_bias * factor)
        if config.learned_positions:
            self._set_fields(position_table=weights["positions"])

    def _pairs(self, segments: list[np.ndarray]) -> np.ndarray:
        self._references += segments
        return pair_table(segments)

    def _expert_table(self, weights: Mapping[str, np.ndarray], layer: int, experts: Experts) -> np.ndarray:
        table = np.zeros((experts.num_experts, step.NUM_EXPERT_COLUMNS), np.int64)
        self._references.append(table)
        for expert in range(experts.num_experts):
            for name, column in _EXPERT_COLUMNS.items():
                array = weights.get(f"layers.{layer}.experts.{expert}.{name}")
                if array is not None and column < step.NUM_EXPERT_MATRICES:
                    array = self._pairs([array])
                if array is not None:
                    self._references.append(array)
                    table[expert, column] = array.ctypes.data
        return table

    def _allocate(self, config: ModelConfig, max_rows: int, max_sampled: int) -> None:
        hidden = config.hidden_size
        inner = max([config.mlp_size(layer) or 0 for layer in range(config.num_layers)], default=0)
        heads_width = config.num_heads * config.head_dim
        qkv_width = heads_width + 2 * config.num_kv_heads * config.head_dim
        zeros = self._arrays.zeros
        num_phases = step.num_phases(config.num_layers, len(self._phases))
        self._hidden = zeros("hidden", (max_rows, hidden), np.float32)
        self._logits = zeros("logits", (max_sampled, self._vocab_size), np.float32)
        self._work = zeros("work", (num_phases, WORDS_PER_PHASE), np.int64)
        # Number of rows of each layer whose keys and values are written. `forward` clears `_work` before it sets
        # `_num_rows_running`.
        first = 1 + self._phases.index("rope")
        last = first + config.num_layers * len(self._phases)
        self._num_stored = self._work[first : last : len(self._phases), _FINISHED]
        self._set_fields(logits=self._logits, work=self._work)
        self._set_fields(hidden_size=hidden, inner_size=config.intermediate_size, vocab_size=self._vocab_size)
        self._set_fields(
            hidden=self._hidden,
            qkv=zeros("qkv", (max_rows, qkv_width), np.float32),
            attended=zeros("attended", (max_rows, heads_width), np.float32),
        )
        if not is_plain(config):
            self._set_fields(product=zeros("product", (max_rows, hidden), np.float32))
        for name, width in zip(step.QUANTIZED_INPUTS, (hidden, heads_width, inner), strict=True):
            self._allocate_inputs(name, max(max_rows, max_sampled), width)
        if config.experts is not None:
            self._allocate_for_experts(config.experts, hidden, max_rows)

    def _allocate_inputs(self, name: str, num_rows: int, width: int) -> None:
        def zeros(part: str, size: int, dtype: type) -> np.ndarray:
            return self._arrays.zeros(f"{name}_{part}", size, dtype)

        parts = QuantizedActivations.allocate(num_rows, width, zeros)._asdict()
        self._set_fields(**{f"{name}_{part}": array for part, array in parts.items()})

    def _allocate_for_experts(self, experts: Experts, hidden: int, max_rows: int) -> None:
        """Allocates the arrays for experts. The system provides their pages only when a step uses them."""
        zeros = self._arrays.zeros
        num_assignments, score_stride = max_rows * experts.top_k, -(-experts.num_experts // 16) * 16
        self._set_fields(
            num_experts=experts.num_experts, top_k=experts.top_k, renormalize=experts.renormalize,
            expert_size=experts.intermediate_size, score_stride=score_stride, is_sigmoid=experts.scores == "sigmoid",
            num_groups=experts.num_groups, top_groups=experts.top_groups, weight_multiplier=experts.weight_multiplier,
        )  # fmt: skip
        scores = zeros("scores", (max_rows, score_stride), np.float32)
        ranks = scores if experts.scores == "softmax" else zeros("ranks", (max_rows, score_stride), np.float32)
        self._set_fields(
            normed=zeros("normed", (max_rows, hidden), np.float32),
            scores=scores,
            ranks=ranks,
            chosen=zeros("chosen", num_assignments, np.int32),
            shares=zeros("shares", num_assignments, np.float32),
            shared_shares=zeros("shared_shares", max_rows, np.float32),
            expert_starts=zeros("expert_starts", experts.num_experts + 1, np.int32),
            assignments=zeros("assignments", num_assignments, np.int32),
            sorted_at=zeros("sorted_at", num_assignments, np.int32),
            expert_output=zeros("expert_output", (num_assignments, hidden), np.float32),
        )
        if experts.shared_intermediate_size is not None:
            self._set_fields(shared_output=zeros("shared_output", (max_rows, hidden), np.float32))
        for name, width in zip(step.EXPERT_INPUTS, (hidden, experts.intermediate_size), strict=True):
            self._allocate_inputs(name, num_assignments, width)
