"""Attention of chunks of several requests, each over its own paged history and, causally, over itself.

The chunks' keys and values are in the pages before this runs. A program serves one tile of query rows of one KV head. A
row is a (token, query head of that KV head), so that a short chunk still fills a tile and each key is read once for its
heads. With the same splits a row has the same bits as from `decode_attention`.

    history    |------ computed before ------|---- chunk ----|
               0                           start       start + count
    tile rows  token t0 head 0, token t0 head 1, …, token t0 + 1 head 0, …
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from onward.kernels.ops import Scoring
from onward.kernels.triton.kernel_launch import launch
from onward.kernels.triton.kv_page_layout import check_kv_layout
from onward.kernels.triton.split_softmax import (
    FIXED_SPLITS,
    LOG2_E,
    WHOLE,
    Splits,
    add_sinks,
    add_tile,
    empty_softmax,
    ends_split,
    load_sinks,
    load_tile,
    merge_split,
    normalised,
    scoring_flags,
)

TILE_ROWS = 128
"""Query rows of a program, as `chunk_tiles` makes them for each step."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How the rows are divided among programs. Only `splits` decides the order of sums."""

    splits: Splits
    rows: int = TILE_ROWS
    num_warps: int = 8
    num_stages: int = 3
    max_registers: int | None = 128
    """Registers of a thread. With 128, two programs of 8 warps share a processor; the merged splits are then spilled to
    memory, which costs less than the second program gains."""

    @classmethod
    def choose(cls, head_dim: int, *, fixed_order: bool) -> "ChunkPlan":
        """Returns the plan that was fastest on an H200."""
        splits, num_stages = (FIXED_SPLITS, 2) if fixed_order else (WHOLE, 3)
        return cls(splits, num_stages=num_stages) if head_dim <= 128 else cls(splits, num_stages=2, max_registers=None)


@triton.jit
def _chunk_attention(
    q, kv, tables, tiles, out, sinks, scale, q_stride, table_stride, page_stride, value_offset, out_stride,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, FINE: tl.constexpr, NUM_FINE: tl.constexpr, COARSE: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(tiles + tile * 4)
    count = tl.load(tiles + tile * 4 + 1)
    request = tl.load(tiles + tile * 4 + 2)
    first_position = tl.load(tiles + tile * 4 + 3)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    tokens = rows // GROUP
    is_in = (tokens < count)[:, None] & (dims < DIM)[None, :]
    heads = kv_head * GROUP + rows % GROUP
    batch_rows = (first_row + tokens).to(tl.int64)
    queries = tl.load(q + (batch_rows * q_stride + heads * DIM)[:, None] + dims[None, :], mask=is_in, other=0.0)
    positions = (first_position + tokens)[:, None]
    table = tables + request.to(tl.int64) * table_stride
    limit = first_position + count
    begin = 0
    if WINDOW > 0:  # windows begin at different tiles, so that every tile is masked
        begin = tl.maximum(first_position - WINDOW + 1, 0)
        seen_by_all = begin // TILE * TILE
    else:
        seen_by_all = (first_position + 1) // TILE * TILE
    peak, total, acc = empty_softmax(ROWS, WIDTH, 1)
    all_peak, all_total, all_acc = peak, total, acc
    if WINDOW == 0:
        for at in range(0, seen_by_all, TILE):
            keys, values = load_tile(
                kv, table, kv_head, at, begin, limit, page_stride, value_offset, PAGE, DIM, WIDTH, TILE, False, WINDOW
            )  # fmt: skip
            peak, total, acc = add_tile(queries, keys, values, None, scale, peak, total, acc, 1, False, CAP)
            if FINE > 0:  # noqa: SIM102 (known when compiled)
                if ends_split(at + TILE, FINE, NUM_FINE, COARSE):
                    all_peak, all_total, all_acc = merge_split(all_peak, all_total, all_acc, peak, total, acc, 1, False)
                    peak, total, acc = empty_softmax(ROWS, WIDTH, 1)
    for at in range(seen_by_all, limit, TILE):
        keys, values = load_tile(
            kv, table, kv_head, at, begin, limit, page_stride, value_offset, PAGE, DIM, WIDTH, TILE, True, WINDOW
        )  # fmt: skip
        key_positions = (at + tl.arange(0, TILE))[None, :]
        visible = key_positions <= positions
        if WINDOW > 0:
            visible = visible & (key_positions > positions - WINDOW)
        peak, total, acc = add_tile(queries, keys, values, visible, scale, peak, total, acc, 1, True, CAP)
        if FINE > 0:  # noqa: SIM102 (known when compiled)
            if ends_split(at + TILE, FINE, NUM_FINE, COARSE):
                all_peak, all_total, all_acc = merge_split(
                    all_peak, all_total, all_acc, peak, total, acc, 1, WINDOW > 0
                )  # fmt: skip
                peak, total, acc = empty_softmax(ROWS, WIDTH, 1)
    if FINE > 0:
        peak, total, acc = merge_split(all_peak, all_total, all_acc, peak, total, acc, 1, WINDOW > 0)
    if SINKS:
        total, acc = add_sinks(peak, total, acc, load_sinks(sinks, heads, tokens < count), 1)
    result = normalised(total, acc, 1).to(out.dtype.element_ty)
    tl.store(out + (batch_rows * out_stride + heads * DIM)[:, None] + dims[None, :], result, mask=is_in)


def chunk_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    plan: ChunkPlan,
    scoring: Scoring | None = None,
) -> None:
    """Computes causal attention of chunks. q and out [rows, heads, head_dim] (rows may be strided), tables int32
    [requests, blocks], tiles from `chunk_tiles` for at most `plan.rows` rows. Without `scoring` scores are divided by
    the root of the head's size."""
    check_kv_layout(kv)
    _, num_heads, dim = q.shape
    _, _, num_kv_heads, page, _ = kv.shape
    splits, scoring = plan.splits, scoring or Scoring(dim**-0.5)
    launch(
        _chunk_attention, (num_kv_heads, len(tiles)),
        q, kv, tables, tiles, out, q if scoring.sinks is None else scoring.sinks, LOG2_E * scoring.scale, q.stride(0),
        tables.stride(0), kv.stride(0), kv.stride(1), out.stride(0),
        GROUP=num_heads // num_kv_heads, PAGE=page, DIM=dim, WIDTH=triton.next_power_of_2(dim), ROWS=plan.rows,
        TILE=splits.tile, FINE=splits.fine, NUM_FINE=splits.num_fine, COARSE=splits.coarse,
        **scoring_flags(scoring),
        num_warps=plan.num_warps, num_stages=plan.num_stages, maxnreg=plan.max_registers, enable_fp_fusion=False,
    )  # fmt: skip
