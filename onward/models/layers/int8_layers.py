"""The int8 family: a model is a context of addresses, and its forward pass is one kernel. No torch.

The arrays are those of `kernels.quantize`, mapped and used where they lie.
"""

from collections.abc import Mapping

import numpy as np

from onward.kernels.cpu import int8_forward as step
from onward.kernels.cpu import int8_forward_general as general
from onward.kernels.cpu.activations import KINDS
from onward.kernels.cpu.phases import END_STAMP, WORDS_PER_PHASE
from onward.kernels.cpu.quantized_rows import QuantizedActivations
from onward.kernels.cpu.threads import ThreadPool
from onward.kernels.weight_packing import NIBBLES_RECORD, OUTPUT_UNIT
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
from onward.proto.model import ModelConfig

TILE_SCRATCH = step.TILE_SCRATCH
_FINISHED = 8
"""Where a phase counts its finished items, see `kernels.cpu.phases`."""

_COLUMNS = {
    "qkv": step.QKV, "o": step.OUT, "gate_up": step.GATE_UP, "down": step.DOWN, "input_norm": step.INPUT_NORM,
    "post_norm": step.POST_NORM, "qkv_bias": step.QKV_BIAS, "q_norm": step.Q_NORM, "k_norm": step.K_NORM,
    "o_bias": step.OUT_BIAS, "gate_up_bias": step.GATE_UP_BIAS, "down_bias": step.DOWN_BIAS,
    "input_norm_bias": step.INPUT_NORM_BIAS, "post_norm_bias": step.POST_NORM_BIAS, "out_norm": step.OUT_NORM,
    "out_norm_bias": step.OUT_NORM_BIAS, "mlp_norm": step.MLP_NORM, "mlp_norm_bias": step.MLP_NORM_BIAS,
    "sinks": step.SINKS,
}  # fmt: skip


class Int8Model:
    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        config: ModelConfig,
        rotary: RotaryTables,
        kv: PagedKV,
        scratch: AttentionScratch,
        threads: ThreadPool,
        *,
        max_rows: int,
        max_sampled: int,
    ) -> None:
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
        self._set_weights(weights, config, rotary)
        self._allocate(config, max_rows, max_sampled)

    def forward(self, rows: ForwardBatch) -> np.ndarray:
        count = len(rows.logits_indices)
        assert count <= len(self._logits), "the logits buffer has room for every row that is sampled"
        fill_batch_fields(self._context, rows)
        fill_context(self._context, token_ids=rows.token_ids, sampled=rows.logits_indices, num_sampled=count)
        self._work[:] = 0
        self._num_rows = self._num_rows_running = rows.num_rows
        self._threads.run(self._kernel, self._context)
        self._layers_done += self._num_layers
        self._num_rows_running = None
        return self._logits[:count]

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
        """Read in this order the answer is never too high, also if a pass ends and the next one begins meanwhile."""
        layers_before, num_rows = self._layers_done, self._num_rows_running
        if num_rows is None:
            return layers_before
        return layers_before + int(np.count_nonzero(self._num_stored >= num_rows))

    def phase_cycles(self) -> dict[str, int]:
        """What the last forward pass spent on each kind of phase, from the end of the embedding on."""
        # A phase that was skipped has no stamp: the time of the last one before it stands for it.
        phase_times = np.diff(np.maximum.accumulate(self._work[:, END_STAMP]))
        names = [*self._phases * self._num_layers, "norm", "head", "head"]
        cycles = dict.fromkeys([*self._phases, "head"], 0)
        for name, count in zip(names, phase_times.tolist(), strict=True):
            cycles[name] += count
        return cycles

    def _set_fields(self, **fields: np.ndarray | float) -> None:
        """Keeps the arrays as long as the context."""
        self._references += fields.values()
        fill_context(self._context, **fields)

    def _set_weights(self, weights: Mapping[str, np.ndarray], config: ModelConfig, rotary: RotaryTables) -> None:
        layers = np.zeros((config.num_layers, step.NUM_WEIGHTS), np.int64)
        is_nibbles = np.zeros((config.num_layers, step.NUM_MATRICES), np.uint8)
        for layer in range(config.num_layers):
            for name, column in _COLUMNS.items():
                array = weights.get(f"layers.{layer}.{name}")
                if array is not None:
                    self._references.append(array)
                    layers[layer, column] = array.ctypes.data
                    if column < step.NUM_MATRICES:
                        is_nibbles[layer, column] = _is_nibbles(array)
            layers[layer, step.WINDOW] = config.layer(layer).window or 0
            if (rotary_table := rotary.of_layer(config, layer)) is not None:
                layers[layer, step.COS] = rotary_table.cos.ctypes.data
                layers[layer, step.SIN] = rotary_table.sin.ctypes.data
        embedding = weights["embed"]
        head = embedding if config.tie_word_embeddings else weights["head"]
        self._set_fields(layers=layers, is_nibbles=is_nibbles, embedding=embedding, head=head)
        self._set_fields(embedding_is_nibbles=_is_nibbles(embedding), head_is_nibbles=_is_nibbles(head))
        self._final_norm, self._final_norm_bias = weights["norm"], weights.get("norm_bias")
        # The kernel's copy has the factor of the logits, which hidden states do not have.
        factor = np.float32(config.logits_multiplier)
        self._set_fields(final_norm=self._final_norm if factor == 1 else self._final_norm * factor)
        if self._final_norm_bias is not None:
            self._set_fields(final_norm_bias=self._final_norm_bias * factor)
        if config.learned_positions:
            self._set_fields(position_table=weights["positions"])

    def _allocate(self, config: ModelConfig, max_rows: int, max_sampled: int) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        heads_width = config.num_heads * config.head_dim
        qkv_width = heads_width + 2 * config.num_kv_heads * config.head_dim
        self._hidden = np.zeros((max_rows, hidden), np.float32)
        self._logits = np.zeros((max_sampled, self._vocab_size), np.float32)
        self._work = np.zeros((step.num_phases(config.num_layers, len(self._phases)), WORDS_PER_PHASE), np.int64)
        # Of each layer, the rows whose keys and values are written. `_work` is cleared before a pass is said to run.
        first = 1 + self._phases.index("rope")
        last = first + config.num_layers * len(self._phases)
        self._num_stored = self._work[first : last : len(self._phases), _FINISHED]
        self._set_fields(logits=self._logits, work=self._work)
        self._set_fields(hidden_size=hidden, inner_size=inner, vocab_size=self._vocab_size)
        self._set_fields(
            hidden=self._hidden,
            qkv=np.zeros((max_rows, qkv_width), np.float32),
            attended=np.zeros((max_rows, heads_width), np.float32),
        )
        if not is_plain(config):
            self._set_fields(product=np.zeros((max_rows, hidden), np.float32))
        for name, width in zip(step.QUANTIZED_INPUTS, (hidden, heads_width, inner), strict=True):
            parts = QuantizedActivations.allocate(max(max_rows, max_sampled), width)._asdict()
            self._set_fields(**{f"{name}_{part}": array for part, array in parts.items()})


def _is_nibbles(packed: np.ndarray) -> bool:
    return packed.shape[-1] == NIBBLES_RECORD
