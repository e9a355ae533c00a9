"""The int8 family: a model is tables of addresses and buffers, and its forward pass is one kernel. No torch.

The arrays are those of `kernels.quantize`, mapped and used where they lie.
"""

from collections.abc import Mapping

import numpy as np

from onward.kernels.cpu import int8_step as step
from onward.kernels.cpu.quantized import Quantized
from onward.kernels.packing import NIBBLES_RECORD, OUTPUT_UNIT
from onward.layers.paged_kv import AttentionScratch, PagedKV
from onward.layers.rotary import RotaryTable
from onward.layers.rows import Rows
from onward.proto.model import ModelConfig

_COLUMNS = {
    "qkv": step.QKV, "o": step.O, "gate_up": step.GATE_UP, "down": step.DOWN, "input_norm": step.INPUT_NORM,
    "post_norm": step.POST_NORM, "qkv_bias": step.QKV_BIAS, "q_norm": step.Q_NORM, "k_norm": step.K_NORM,
}  # fmt: skip
_MATRICES = ("qkv", "o", "gate_up", "down")


class Int8Model:
    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        config: ModelConfig,
        rotary: RotaryTable,
        kv: PagedKV,
        scratch: AttentionScratch,
        *,
        max_rows: int,
        max_sampled: int,
    ) -> None:
        self._arrays: list[np.ndarray] = []
        self._shape = _shape(config)
        self._weights = self._tables(weights, config)
        self._memory = step.Memory(kv.data, kv.layer_stride, kv.block_size, rotary.cos, rotary.sin)
        self._num_threads = scratch.num_threads
        self._buffers = _allocate(self._shape, scratch, max_rows, max_sampled)
        widths = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
        self._inputs = tuple(Quantized.allocate(max(max_rows, max_sampled), width) for width in widths)

    def forward(self, rows: Rows) -> np.ndarray:
        batch = step.Batch(
            rows.token_ids, rows.positions, rows.pages, rows.tiles.reshape(-1), rows.sampled,
            rows.block_tables.reshape(-1), rows.block_tables.shape[1],
        )  # fmt: skip
        step.int8_forward(
            self._shape, self._weights, batch, self._memory, self._buffers, *self._inputs, self._num_threads
        )
        count = len(rows.sampled)
        return self._buffers.logits[: count * self._shape.vocab].reshape(count, self._shape.vocab)

    def _tables(self, weights: Mapping[str, np.ndarray], config: ModelConfig) -> step.Weights:
        layers = np.zeros((config.num_layers, step.NUM_WEIGHTS), np.int64)
        is_nibbles = np.zeros((config.num_layers, len(_MATRICES)), np.uint8)
        for layer in range(config.num_layers):
            for name, column in _COLUMNS.items():
                array = weights.get(f"layers.{layer}.{name}")
                if array is not None:
                    layers[layer, column] = self._keep(array)
                    if name in _MATRICES:
                        is_nibbles[layer, column] = array.shape[-1] == NIBBLES_RECORD
        embed = weights["embed"]
        head = embed if config.tie_word_embeddings else weights["head"]
        ends = np.array([self._keep(embed), self._keep(head), self._keep(weights["norm"])], np.int64)
        kinds = np.array([a.shape[-1] == NIBBLES_RECORD for a in (embed, head)], np.uint8)
        return step.Weights(layers.reshape(-1), is_nibbles.reshape(-1), ends, kinds)

    def _keep(self, array: np.ndarray) -> int:
        """Its address, which stays valid as long as this model."""
        array = np.ascontiguousarray(array)
        self._arrays.append(array)
        return array.ctypes.data


def _shape(config: ModelConfig) -> step.Shape:
    return step.Shape(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab=-(-config.vocab_size // OUTPUT_UNIT) * OUTPUT_UNIT,
        eps=np.float32(config.rms_norm_eps),
    )


def _allocate(shape: step.Shape, scratch: AttentionScratch, max_rows: int, max_sampled: int) -> step.Buffers:
    heads_width = shape.num_heads * shape.head_dim
    stride = scratch.stride + step.TILE_SCRATCH
    return step.Buffers(
        hidden=np.zeros(max_rows * shape.hidden, np.float32),
        qkv=np.zeros(max_rows * (heads_width + 2 * shape.num_kv_heads * shape.head_dim), np.float32),
        attended=np.zeros(max_rows * heads_width, np.float32),
        logits=np.zeros(max_sampled * shape.vocab, np.float32),
        scratch=np.zeros(stride * scratch.num_threads, np.float32),
        scratch_stride=stride,
        work=np.zeros(step.work_words(shape.num_layers), np.int64),
    )
