"""Attention of chunks of several requests, each over its own paged history and, causally, over itself.

The chunks' keys and values are in the pages before this runs. A program serves one tile of query rows of one KV head: a row
is a (token, query head of that KV head), so that a short chunk still fills a tile and each key is read once for its heads.

    history    |------ computed before ------|---- chunk ----|
               0                           start       start + count
    tile rows  token t0 head 0, token t0 head 1, …, token t0 + 1 head 0, …
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from onward.kernels.triton.decode_attention import LOG2_E
from onward.kernels.triton.launching import launch
from onward.kernels.triton.pages import check_pages


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    rows: int = 128
    """Query rows of a program."""
    tile: int = 32
    """Positions that it handles at once."""
    num_warps: int = 8
    num_stages: int = 3


# The same bits whichever of these a row is computed with: both are cut into the same tiles of positions, their warps lie
# along the rows, and they are too few for the wide matrix instructions, which may add up otherwise.
FIXED_CHUNK_PLAN = PrefillPlan(rows=64, num_warps=2)
FIXED_ROW_PLAN = PrefillPlan(rows=16, num_warps=1, num_stages=4)


@triton.jit
def _tile_offsets(table, kv_head, at, limit, page_stride, PAGE: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr):
    """Where the keys of the positions [at, at + TILE) lie. A tile within one page needs one entry of the table."""
    lanes = tl.arange(0, TILE)
    dims = tl.arange(0, DIM)
    if PAGE >= TILE:
        page = tl.load(table + at // PAGE).to(tl.int64)
        rows = page * page_stride + (kv_head * PAGE + at % PAGE + lanes) * DIM
    else:
        positions = at + lanes
        pages = tl.load(table + positions // PAGE, mask=positions < limit, other=0).to(tl.int64)
        rows = pages * page_stride + (kv_head * PAGE + positions % PAGE) * DIM
    return rows[:, None] + dims[None, :]


@triton.jit
def _prefill(
    q, kv, tables, tiles, out, scale, q_stride, table_stride, page_stride, value_offset, out_stride,
    GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    FIXED: tl.constexpr,
):  # fmt: skip
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(tiles + tile * 4)
    count = tl.load(tiles + tile * 4 + 1)
    request = tl.load(tiles + tile * 4 + 2)
    first_position = tl.load(tiles + tile * 4 + 3)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    lanes = tl.arange(0, TILE)
    tokens = rows // GROUP
    is_row = tokens < count
    heads = kv_head * GROUP + rows % GROUP
    batch_rows = (first_row + tokens).to(tl.int64)
    queries = tl.load(
        q + (batch_rows * q_stride + heads * DIM)[:, None] + dims[None, :], mask=is_row[:, None], other=0.0
    )
    positions = first_position + tokens
    table = tables + request.to(tl.int64) * table_stride
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    limit = first_position + count
    seen_by_all = (first_position + 1) // TILE * TILE
    if FIXED:
        # The two loops round differently, and which positions each gets would depend on where the chunk begins.
        seen_by_all = 0
    for at in range(0, seen_by_all, TILE):
        offsets = _tile_offsets(table, kv_head, at, limit, page_stride, PAGE, DIM, TILE)
        keys = tl.load(kv + offsets)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(kv + value_offset + offsets)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    for at in range(seen_by_all, limit, TILE):
        is_in = (at + lanes < limit)[:, None]
        offsets = _tile_offsets(table, kv_head, at, limit, page_stride, PAGE, DIM, TILE)
        keys = tl.load(kv + offsets, mask=is_in, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where((at + lanes)[None, :] <= positions[:, None], scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(kv + value_offset + offsets, mask=is_in, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        peak = new_peak
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (batch_rows * out_stride + heads * DIM)[:, None] + dims[None, :], result, mask=is_row[:, None])


def prefill_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    plan: PrefillPlan,
    *,
    fixed_order: bool = False,
) -> None:
    """q and out [rows, heads, head_dim] (rows may be strided), tables int32 [requests, blocks], tiles those of
    `prefill_tiles` for `plan.rows` rows, or of fewer. In a fixed order a row's bits do not depend on its tile."""
    check_pages(kv)
    _, num_heads, dim = q.shape
    _, _, num_kv_heads, page, _ = kv.shape
    group = num_heads // num_kv_heads
    launch(
        _prefill, (num_kv_heads, len(tiles)),
        q, kv, tables, tiles, out, LOG2_E / dim**0.5, q.stride(0), tables.stride(0), kv.stride(0),
        kv.stride(1), out.stride(0),
        GROUP=group, PAGE=page, DIM=dim, ROWS=plan.rows, TILE=plan.tile, FIXED=fixed_order,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
