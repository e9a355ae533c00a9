"""Packs the spans of a step into the arrays that a device gets. Plain numpy, without a device.

rows of the step     | decoding, longest history first | chunks, in the plan's order                      |
rows that sample     | decoding                        | last rows of chunks that end at the newest token |
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic

import numpy as np

from onward.kernels.ops import NUM_ROW_INPUTS
from onward.kernels.triton.chunk_tiles import chunk_tiles
from onward.worker.token_span import NO_BLOCK, Owner, TokenSpan

_slot, _end, _new_block = attrgetter("slot"), attrgetter("end"), attrgetter("new_block")


@dataclass(frozen=True, slots=True)
class PackedPrefillChunks:
    token_indices: np.ndarray
    table_indices: np.ndarray
    positions: np.ndarray
    tiles: np.ndarray


@dataclass(frozen=True, slots=True)
class PackedStep(Generic[Owner]):
    sampling: list[TokenSpan[Owner]]
    """Spans that sample, in the order of their rows; decoding spans come first."""
    num_decoding: int
    chunks: PackedPrefillChunks | None = None
    logits_indices: np.ndarray | None = None
    """For a step with chunks, its rows whose logits are needed: rows that sample, then rows whose given tokens'
    logprobs are requested."""
    not_sampling: list[TokenSpan[Owner]] = field(default_factory=list)
    """Chunks that do not sample."""
    reporting: list[TokenSpan[Owner]] = field(default_factory=list)
    pooled: list[tuple[int, TokenSpan[Owner]]] = field(default_factory=list)
    """Pooled spans, each with its first row of the step."""

    def __post_init__(self) -> None:
        assert self.num_decoding <= len(self.sampling), "every row that decodes samples"
        assert (self.chunks is None) == (self.logits_indices is None), "only a step with chunks selects rows of logits"


@dataclass(frozen=True, slots=True)
class PackingSizes:
    """The sizes from which offsets are computed."""

    block_size: int
    tokens_stride: int
    tables_stride: int
    group: int
    tile_rows: int


def pack(spans: Sequence[TokenSpan[Owner]], geometry: PackingSizes) -> PackedStep[Owner]:
    decoding = [span for span in spans if span.decodes]
    decoding.sort(key=_end, reverse=True)
    if len(decoding) == len(spans):
        return PackedStep(decoding, len(decoding))
    chunks = [span for span in spans if not span.decodes]
    logits_indices = list(range(len(decoding)))
    reported: list[int] = []
    pooled: list[tuple[int, TokenSpan[Owner]]] = []
    row = len(decoding)
    for span in chunks:
        assert span.count > 0, "a span has at least one token"
        if span.is_pooled:
            assert not span.is_sampled, "a pooled span does not sample"
            pooled.append((row, span))
        if span.logprob_positions is not None:
            reported.extend(row + position - span.start for position in span.logprob_positions)
        row += span.count
        if span.is_sampled:
            logits_indices.append(row - 1)
    return PackedStep(
        decoding + [span for span in chunks if span.is_sampled],
        len(decoding),
        _pack_chunks(chunks, geometry),
        np.array(logits_indices + reported, np.int64),
        [span for span in chunks if not span.is_sampled],
        [span for span in chunks if span.logprob_positions is not None],
        pooled,
    )


def _pack_chunks(spans: Sequence[TokenSpan[Owner]], geometry: PackingSizes) -> PackedPrefillChunks:
    slots = np.repeat(np.array([span.slot for span in spans], np.int64), [span.count for span in spans])
    positions = np.concatenate([np.arange(span.start, span.end, dtype=np.int64) for span in spans])
    tiles = chunk_tiles([(s.slot, s.start, s.count) for s in spans], geometry.group, geometry.tile_rows)
    return PackedPrefillChunks(
        slots * geometry.tokens_stride + positions,
        slots * geometry.tables_stride + positions // geometry.block_size,
        positions.astype(np.int32),
        tiles,
    )


def fill_inputs(inputs: np.ndarray, spans: Sequence[TokenSpan[Owner]], padding_slot: int) -> None:
    """Writes the inputs (int32 [3, rows]) of spans that sample; the rows after them get `padding_slot`."""
    assert inputs.shape[0] == NUM_ROW_INPUTS, "the inputs of a row are its slot, its end and its new block"
    assert len(spans) <= inputs.shape[1], "every span that samples has a row"
    count = len(spans)
    for row, field_of in enumerate((_slot, _end, _new_block)):
        inputs[row, :count] = list(map(field_of, spans))
    inputs[0, count:], inputs[1, count:], inputs[2, count:] = padding_slot, 0, NO_BLOCK
