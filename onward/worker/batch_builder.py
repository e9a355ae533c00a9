"""Turns the slots that a step runs into arrays. Buffers are allocated once; a step only fills them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from onward.kernels.cpu.attention_tiles import row_tile
from onward.models.layers.forward_batch import ForwardBatch
from onward.proto.model import ModelConfig
from onward.worker.kv_pool import BlockTables
from onward.worker.token_span import TokenSpan


class BatchBuilder:
    def __init__(
        self, config: ModelConfig, tokens: np.ndarray, tables: BlockTables, block_size: int, max_rows: int
    ) -> None:
        self._tokens, self._tables, self._block_size = tokens, tables, block_size
        self._row_tile = row_tile(config.num_heads // config.num_kv_heads)
        self._token_ids, self._positions, self._pages = (np.zeros(max_rows, np.int32) for _ in range(3))

    def build(self, spans: Sequence[TokenSpan[Any]]) -> ForwardBatch:
        """Returns the forward batch of these spans. It has logits of the rows that sample, then of the rows whose given
        tokens' logprobs are requested."""
        row = 0
        tiles: list[tuple[int, int, int, int]] = []
        sampled: list[int] = []
        reported: list[int] = []
        for span in spans:
            assert span.count > 0, "a span has at least one token"
            self._fill(row, span)
            num_rows = span.num_rows
            for offset in range(0, num_rows, self._row_tile):
                height = min(self._row_tile, num_rows - offset)
                tiles.append((row + offset, height, span.slot, span.start + offset))
            if span.logprob_positions is not None:
                reported.extend(row + position - span.start for position in span.logprob_positions)
            if span.is_sampled:
                sampled.extend(range(row + span.count - 1, row + num_rows))
            row += num_rows
        return ForwardBatch(
            num_rows=row,
            token_ids=self._token_ids[:row],
            positions=self._positions[:row],
            kv_block_ids=self._pages[:row],
            tiles=np.array(tiles, np.int32),
            logits_indices=np.array(sampled + reported, np.int64),
            block_tables=self._tables.ids,
        )

    def _fill(self, row: int, span: TokenSpan[Any]) -> None:
        """Fills the rows of one span. One token is the usual case and is written apart, because slices cost more than
        scalars."""
        slot, start = span.slot, span.start
        count = span.num_rows
        assert row + count <= len(self._token_ids), "the rows of a step fit into the buffers"
        if count == 1:
            self._token_ids[row] = self._tokens[slot, start]
            self._positions[row] = start
            self._pages[row] = self._tables.ids[slot, start // self._block_size]
            return
        end = start + count
        positions = np.arange(start, end, dtype=np.int32)
        self._token_ids[row : row + count] = self._tokens[slot, start:end]
        self._positions[row : row + count] = positions
        self._pages[row : row + count] = self._tables.ids[slot, positions // self._block_size]
