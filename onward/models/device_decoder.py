"""The dense decoder on a device: rows in, logits out, keys and values into their pages. All families of `ModelConfig`.

A step has two kinds of rows. Those that decode bring one token each and read a whole history; chunks of prompts bring many
and are attended tile by tile. Decoding rows come first. `decode` runs those alone and asks the host for nothing, so that
it can be captured in a graph.
"""

from dataclasses import dataclass

import torch

from onward.kernels.ops import Ops, Rotary, RowTensors, SlotTensors
from onward.models.layers.device.forward_layers import (
    ActivationBuffers,
    forward_invariant,
    forward_library,
    forward_single_row,
    prefers_own_kernels,
)
from onward.models.layers.device.model_weights import ModelWeights
from onward.models.layers.rotary_table import RotaryTable
from onward.models.rope_scaling import rope_divisors
from onward.proto.model import ModelConfig


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """The rows of a step that do not decode, one after the other."""

    token_indices: torch.Tensor
    """int64: where each row's token is among all slots' tokens."""
    table_indices: torch.Tensor
    """int64: where its block is named among all slots' tables."""
    positions: torch.Tensor
    """int32."""
    tiles: torch.Tensor
    """int32 [tiles, 4], of `chunk_tiles`; requests are slots, and rows count from the first of these."""


def build_device_rotary(config: ModelConfig, max_model_len: int, device: str) -> Rotary:
    divisors = None
    if config.rope_scaling is not None:
        divisors = rope_divisors(config.rope_scaling, config.rope_theta, config.head_dim)
    table = RotaryTable.build(config.rope_theta, config.head_dim, max_model_len, divisors)
    cos, sin = (torch.from_numpy(x).view(max_model_len, -1).to(device) for x in (table.cos, table.sin))
    return cos, sin


class DeviceDecoder:
    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        buffers: ActivationBuffers,
        logits: torch.Tensor,
        rotary: Rotary,
        *,
        deterministic: bool,
    ) -> None:
        self._config, self._weights, self._ops, self._buffers = config, weights, ops, buffers
        self.logits, self._rotary, self._deterministic = logits, rotary, deterministic
        """Of the last step; the next one overwrites them."""
        self._kv: list[torch.Tensor] = []

    def set_kv_cache(self, kv: list[torch.Tensor]) -> None:
        """The pages of each layer, [blocks, 2, kv heads, block_size, head_dim]: measured and allocated last."""
        self._kv = kv

    def last_hidden_states(self) -> torch.Tensor:
        """The last norm's, of the rows of the last step that was mixed; the next step overwrites them."""
        return self._buffers.normed

    def forward_decode(self, rows: RowTensors) -> torch.Tensor:
        """Logits of each row, which lie in a buffer that the next step overwrites."""
        count = len(rows.token_ids)
        buffers = self._buffers.first(count)
        torch.index_select(self._weights.embedding, 0, rows.token_ids, out=buffers.residual)
        if self._deterministic:
            forward_invariant(self._weights, buffers, self._eps, self._ops, self._decode_attention(rows))
            return self._head(buffers.normed)
        if count == 1:
            forward_single_row(self._weights, buffers, self._eps, self._ops, self._decode_attention(rows))
            logits = self.logits[:1]
            norm = (self._weights.norm, self._eps)
            self._ops.single_row_linear(buffers.residual, self._weights.head, logits, None, norm=norm)
            return logits
        forward = forward_invariant if prefers_own_kernels(self._weights, count) else forward_library
        forward(self._weights, buffers, self._eps, self._ops, self._decode_attention(rows))
        return self._head(buffers.normed)

    def forward_mixed(
        self,
        slots: SlotTensors,
        rows: RowTensors,
        num_decoding: int,
        chunks: PrefillChunks,
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Logits of the rows in `logits_indices` (int64). The first `num_decoding` of `rows` are rows of this step."""
        count = num_decoding + len(chunks.positions)
        assert count <= len(self._buffers.residual), "a plan keeps to the tokens that one step may have"
        buffers = self._buffers.first(count)
        token_ids = torch.cat([rows.token_ids[:num_decoding], slots.tokens.view(-1)[chunks.token_indices]])
        torch.index_select(self._weights.embedding, 0, token_ids, out=buffers.residual)
        attend_chunks = self._chunk_attention(slots, chunks)
        attend_decoding = self._decode_attention(rows.first(num_decoding))

        def attend(index: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
            if num_decoding:
                attend_decoding(index, qkv[:num_decoding], out[:num_decoding])
            attend_chunks(index, qkv[num_decoding:], out[num_decoding:])

        forward = forward_invariant if self._deterministic else forward_library
        forward(self._weights, buffers, self._eps, self._ops, attend)
        if not len(logits_indices):
            return self.logits[:0]
        # Into a buffer that nothing needs any more, and that has rows behind these.
        hidden = torch.index_select(buffers.normed, 0, logits_indices, out=self._buffers.product[: len(logits_indices)])
        return self._head(hidden)

    @property
    def _eps(self) -> float:
        return self._config.rms_norm_eps

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.logits[: len(hidden)]
        if self._deterministic:
            self._ops.invariant_linear(hidden, self._weights.head, logits)
        else:
            self._ops.matmul(hidden, self._weights.head, logits, None, None)
        return logits

    def _decode_attention(self, rows: RowTensors):
        def attend(index: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
            norms = self._weights.layers[index].head_norms
            self._ops.decode_attention(qkv, self._kv[index], rows, norms, self._eps, self._rotary, out)

        return attend

    def _chunk_attention(self, slots: SlotTensors, chunks: PrefillChunks):
        pages = slots.tables.view(-1)[chunks.table_indices]
        heads = self._config.num_heads

        def attend(index: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
            kv, norms = self._kv[index], self._weights.layers[index].head_norms
            self._ops.rotate_and_store(qkv, kv, chunks.positions, pages, norms, self._eps, self._rotary)
            self._ops.chunk_attention(qkv, kv, slots.tables, chunks.tiles, heads, out)

        return attend
