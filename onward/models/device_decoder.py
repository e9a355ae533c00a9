"""The decoder on a device, for all families of `ModelConfig`: computes the logits of rows and writes their keys and
values into pages.

A step has two kinds of rows. A decoding row is the one new token of a slot and attends to its whole history. A chunk of
a prompt has many rows, which are attended tile by tile. Decoding rows come first. `forward_decode` runs these alone and
never waits for the host, so that it can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch

from onward.kernels.ops import AttentionLayer, Ops, Rotary, RowTensors, Scoring, SlotTensors
from onward.models.layers.device.forward_layers import (
    ActivationBuffers,
    Attend,
    forward,
    forward_single_row,
    has_plain_blocks,
    prefers_own_kernels,
)
from onward.models.layers.device.model_weights import ModelWeights
from onward.models.layers.rotary_table import RotaryTable, RotaryTables
from onward.models.sharding.parallel_layers import VocabularyParallel
from onward.proto.model import ModelConfig


@dataclass(frozen=True, slots=True)
class DeviceVocabulary:
    """The vocabulary of a model whose ranks each have a part of it."""

    ranks: VocabularyParallel
    part: torch.Tensor
    """For this rank's part of the logits, with as many rows as the logits."""


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """The rows of all prompt chunks of a step, one after the other."""

    token_indices: torch.Tensor
    """int64: index of each row's token in the tokens of all slots."""
    table_indices: torch.Tensor
    """int64: index of the entry for its block in the block tables of all slots."""
    positions: torch.Tensor
    """int32."""
    tiles: torch.Tensor
    """int32 [tiles, 4], made by `chunk_tiles`; requests are slots, and rows count from the first of these rows."""


def build_attention_layers(
    config: ModelConfig, weights: ModelWeights, max_model_len: int, device: str
) -> list[AttentionLayer]:
    """Returns the `AttentionLayer` of each layer. Layers of one kind share their rope tables."""
    tables = RotaryTables.build(config, max_model_len)
    on_device: dict[int, Rotary] = {}

    def rotary(table: RotaryTable | None) -> Rotary | None:
        if table is None:
            return None
        if id(table) not in on_device:
            cos, sin = (torch.from_numpy(x).view(max_model_len, -1).to(device) for x in (table.cos, table.sin))
            on_device[id(table)] = cos, sin
        return on_device[id(table)]

    def window(index: int) -> int | None:
        """Returns None for a window that covers every context, because kernels without windows are faster."""
        found = config.layer(index).window
        return found if found is not None and found < max_model_len else None

    return [
        AttentionLayer(
            Scoring(config.attention_scale, window(index), config.attention_softcap, layer.sinks),
            rotary(tables.of_layer(config, index)),
            layer.head_norms,
            config.rms_norm_eps,
        )
        for index, layer in enumerate(weights.layers)
    ]


class DeviceDecoder:
    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        buffers: ActivationBuffers,
        logits: torch.Tensor,
        attention_layers: list[AttentionLayer],
        *,
        deterministic: bool,
        vocabulary: DeviceVocabulary | None = None,
    ) -> None:
        """`vocabulary` is set for a rank that has a part of the vocabulary; None: it has all of it."""
        self._config, self._weights, self._ops, self._buffers = config, weights, ops, buffers
        self._vocabulary = vocabulary
        self._attention_layers, self._deterministic = attention_layers, deterministic
        self.logits = logits
        """Logits of the last step; the next step overwrites them."""
        self._kv: list[torch.Tensor] = []

    def set_kv_cache(self, kv: list[torch.Tensor]) -> None:
        """Sets the pages of each layer, [blocks, 2, kv heads, block_size, head_dim]. They are measured and allocated
        after everything else."""
        self._kv = kv

    def last_hidden_states(self) -> torch.Tensor:
        """Returns the output of the last norm for the rows of the last mixed step. The next step overwrites it."""
        return self._buffers.normed

    def forward_decode(self, rows: RowTensors) -> torch.Tensor:
        """Returns the logits of each row, in a buffer that the next step overwrites."""
        count = len(rows.token_ids)
        buffers = self._buffers.first(count)
        self._embed(rows.token_ids, rows.lengths - 1 if self._config.learned_positions else None, buffers.residual)
        attend = self._decode_attention(rows)
        is_alone = count == 1 and self._vocabulary is None  # the products of a single row are not added up across ranks
        if is_alone and not self._deterministic and has_plain_blocks(self._config):
            return self._forward_single_row(buffers, attend)
        own = self._deterministic or prefers_own_kernels(self._weights, count)
        forward(self._config, self._weights, buffers, self._ops, attend, own=own)
        return self._head(buffers.normed)

    def forward_mixed(
        self,
        slots: SlotTensors,
        rows: RowTensors,
        num_decoding: int,
        chunks: PrefillChunks,
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the logits of the rows in `logits_indices` (int64). Only the first `num_decoding` of `rows` are rows
        of this step."""
        count = num_decoding + len(chunks.positions)
        assert count <= len(self._buffers.residual), "a plan keeps to the tokens that one step may have"
        buffers = self._buffers.first(count)
        token_ids = torch.cat([rows.token_ids[:num_decoding], slots.tokens.view(-1)[chunks.token_indices]])
        positions = None
        if self._config.learned_positions:
            positions = torch.cat([rows.lengths[:num_decoding] - 1, chunks.positions])
        self._embed(token_ids, positions, buffers.residual)
        attend_chunks = self._chunk_attention(slots, chunks)
        attend_decoding = self._decode_attention(rows.first(num_decoding))

        def attend(index: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
            if num_decoding:
                attend_decoding(index, qkv[:num_decoding], out[:num_decoding])
            attend_chunks(index, qkv[num_decoding:], out[num_decoding:])

        forward(self._config, self._weights, buffers, self._ops, attend, own=self._deterministic)
        if not len(logits_indices):
            return self.logits[:0]
        # Copied into a buffer that is no longer needed and has further rows behind these.
        hidden = torch.index_select(buffers.normed, 0, logits_indices, out=self._buffers.product[: len(logits_indices)])
        return self._head(hidden)

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor | None, residual: torch.Tensor) -> None:
        """Writes the embeddings to `residual`. `positions` is set for learned positions; rows that only pad a batch
        have position -1."""
        if self._vocabulary is None:
            torch.index_select(self._weights.embedding, 0, token_ids, out=residual)
        else:
            residual.copy_(self._vocabulary.ranks.embed(self._weights.embedding, token_ids))
        if self._config.embedding_multiplier != 1.0:
            residual.mul_(self._config.embedding_multiplier)
        if positions is not None:
            assert self._weights.positions is not None, "a model with learned positions has their vectors"
            residual.add_(self._weights.positions.index_select(0, positions.clamp(min=0)))

    def _forward_single_row(self, buffers: ActivationBuffers, attend: Attend) -> torch.Tensor:
        eps, logits = self._config.rms_norm_eps, self.logits[:1]
        forward_single_row(self._weights, buffers, eps, self._ops, attend)
        norm = (self._weights.norm.weight, eps)
        self._ops.single_row_linear(buffers.residual, self._weights.head, logits, None, norm=norm)
        return self._finished(logits)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        vocabulary = self._vocabulary
        product = (self.logits if vocabulary is None else vocabulary.part)[: len(hidden)]
        if self._deterministic:
            self._ops.invariant_linear(hidden, self._weights.head, product)
        else:
            self._ops.matmul(hidden, self._weights.head, product, None, None)
        if vocabulary is None:
            return self._finished(product)
        logits = self.logits[: len(hidden)]
        return self._finished(logits) if vocabulary.ranks.join_logits(product, logits) else product

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        multiplier, softcap = self._config.logits_multiplier, self._config.logit_softcap
        if multiplier != 1.0 or softcap is not None:
            self._ops.finish_logits(logits, multiplier, softcap)
        return logits

    def _decode_attention(self, rows: RowTensors) -> Attend:
        def attend(index: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
            self._ops.decode_attention(qkv, self._kv[index], rows, self._attention_layers[index], out)

        return attend

    def _chunk_attention(self, slots: SlotTensors, chunks: PrefillChunks) -> Attend:
        pages = slots.tables.view(-1)[chunks.table_indices]
        heads = self._config.num_heads

        def attend(index: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
            kv, layer = self._kv[index], self._attention_layers[index]
            self._ops.rotate_and_store(qkv, kv, chunks.positions, pages, layer)
            self._ops.chunk_attention(qkv, kv, slots.tables, chunks.tiles, heads, layer.scoring, out)

        return attend
