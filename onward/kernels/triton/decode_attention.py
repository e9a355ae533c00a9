"""Attention of one new token per request over its paged history: what a decode step does.

A program serves one (request, KV head, split): all query heads of that KV head read each key once, and a long history is
cut into splits, so that few requests still fill the device. The program that finishes last of a (request, KV head) adds
the splits up, in their order: no second launch, and the same bits whoever comes last.

    history    |-- split 0 --|-- split 1 --|-- split 2 -|
               0           span         2 span        length         span = max(min_span, length / num_splits), in tiles

The grid depends on the batch and `num_splits` alone, so a captured graph serves every length.
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from onward.kernels.triton.launching import launch
from onward.kernels.triton.pages import check_pages

LOG2_E = 1.4426950408889634
MIN_DOT_ROWS = 16


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How the work of a batch is cut up. All of it but `num_stages` decides in which order sums are made: who wants the
    same bits in every batch takes one plan for all."""

    num_splits: int
    min_span: int = 64
    tile: int = 64
    num_warps: int = 4
    num_stages: int = 3

    @classmethod
    def choose(
        cls, batch: int, num_kv_heads: int, max_length: int, *, fused: bool = False, num_processors: int = 132
    ) -> "DecodePlan":
        """Measured on an H200. Splits only where there are not two programs for each processor without them, because the
        one that adds them up keeps its processor waiting."""
        programs = batch * num_kv_heads
        if fused and programs >= 128:
            return cls._for_fused(programs, max_length)
        if programs >= 2 * num_processors:
            return cls(1, num_warps=2)
        num_splits = max(1, min(-(-512 // programs), -(-max_length // 64), 32 if max_length > 8192 else 16))
        return cls(num_splits, num_warps=2 if programs >= 64 else 4)

    @classmethod
    def _for_fused(cls, programs: int, max_length: int) -> "DecodePlan":
        """A fused program begins with more work of its own: many small ones hide each other's beginnings."""
        if programs >= 1280:
            return cls(1, tile=32, num_warps=1, num_stages=4)
        if programs >= 512:
            return cls(1, num_warps=2)
        num_splits = max(1, min(-(-1024 // programs), -(-max_length // 256)))
        return cls(num_splits, 256, tile=32, num_warps=1, num_stages=4)


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Where splits leave their results. Tickets are zero between launches; each launch puts them back."""

    partials: torch.Tensor
    peaks: torch.Tensor
    sums: torch.Tensor
    tickets: torch.Tensor

    @classmethod
    def allocate(
        cls, batch: int, num_heads: int, num_kv_heads: int, head_dim: int, num_splits: int, device: str
    ) -> "DecodeScratch":
        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        group = num_heads // num_kv_heads
        return cls(
            floats(batch, num_kv_heads, num_splits, group, head_dim),
            floats(batch, num_kv_heads, num_splits, group),
            floats(batch, num_kv_heads, num_splits, group),
            torch.zeros((batch, num_kv_heads), dtype=torch.int32, device=device),
        )


@triton.jit
def load_tile(
    kv, table, kv_head, at, end, page_stride, value_offset,
    PAGE: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Keys and values of the positions [at, at + TILE), and which of them count; with MASK only those before `end`."""
    positions = at + tl.arange(0, TILE)
    dims = tl.arange(0, DIM)
    is_in = positions < end
    if MASK:
        pages = tl.load(table + positions // PAGE, mask=is_in, other=0).to(tl.int64)
    else:
        pages = tl.load(table + positions // PAGE).to(tl.int64)
    rows = pages * page_stride + (kv_head * PAGE + positions % PAGE) * DIM
    offsets = rows[:, None] + dims[None, :]
    if MASK:
        keys = tl.load(kv + offsets, mask=is_in[:, None], other=0.0)
        values = tl.load(kv + value_offset + offsets, mask=is_in[:, None], other=0.0)
    else:
        keys = tl.load(kv + offsets)
        values = tl.load(kv + value_offset + offsets)
    return keys, values, is_in


@triton.jit
def add_tile(q, keys, values, is_in, scale, peak, total, acc, MASK: tl.constexpr):
    """Adds a tile to a running softmax; scores are in units of log 2."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if MASK:
        scores = tl.where(is_in[None, :], scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def attend_tiles(
    q, kv, table, kv_head, start, end, scale, peak, total, acc,
    page_stride, value_offset, PAGE: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds the positions [start, end). Whole tiles need no masks; the last one, if it is not whole, comes apart."""
    whole = start + (end - start) // TILE * TILE
    for at in range(start, whole, TILE):
        keys, values, is_in = load_tile(kv, table, kv_head, at, end, page_stride, value_offset, PAGE, DIM, TILE, False)
        peak, total, acc = add_tile(q, keys, values, is_in, scale, peak, total, acc, False)
    if whole < end:
        keys, values, is_in = load_tile(
            kv, table, kv_head, whole, end, page_stride, value_offset, PAGE, DIM, TILE, True
        )
        peak, total, acc = add_tile(q, keys, values, is_in, scale, peak, total, acc, True)
    return peak, total, acc


@triton.jit
def finish_split(
    peak, total, acc, partials, peaks, sums, tickets, out, row, kv_head, split, splits_used, num_splits, out_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, DIM: tl.constexpr, M: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Writes the result, if this split is the only one; else leaves it, and the last to leave one adds them up."""
    heads = tl.arange(0, M)
    dims = tl.arange(0, DIM)
    is_head = heads < GROUP
    out += row * out_stride + kv_head * GROUP * DIM
    if splits_used == 1:
        result = acc / total[:, None]
        tl.store(out + heads[:, None] * DIM + dims[None, :], result.to(out.dtype.element_ty), mask=is_head[:, None])
    else:
        owner = row * KV_HEADS + kv_head
        first = owner.to(tl.int64) * num_splits
        mine = (first + split) * GROUP + heads
        tl.store(partials + mine[:, None] * DIM + dims[None, :], acc, mask=is_head[:, None])
        tl.store(peaks + mine, peak, mask=is_head)
        tl.store(sums + mine, total, mask=is_head)
        tl.debug_barrier()
        ticket = tl.atomic_add(tickets + owner, 1, sem="acq_rel")
        if ticket == splits_used - 1:
            tl.store(tickets + owner, 0)
            _combine(partials, peaks, sums, out, first, splits_used, GROUP, GROUP_ROWS, DIM, AT_ONCE)


@triton.jit
def _combine(
    partials, peaks, sums, out, first, splits_used,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, DIM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    heads = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, DIM)
    is_head = heads < GROUP
    peak = tl.full([GROUP_ROWS], -1e30, tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, DIM], tl.float32)
    for at in range(0, splits_used, AT_ONCE):
        splits = at + tl.arange(0, AT_ONCE)
        is_in = (splits < splits_used)[:, None] & is_head[None, :]
        owners = (first + splits)[:, None] * GROUP + heads[None, :]
        peaks_in = tl.load(peaks + owners, mask=is_in, other=-float("inf"))
        sums_in = tl.load(sums + owners, mask=is_in, other=0.0)
        parts = tl.load(partials + owners[:, :, None] * DIM + dims[None, None, :], mask=is_in[:, :, None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks_in, 0))
        weights = tl.exp2(peaks_in - new_peak[None, :])
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(sums_in * weights, 0)
        acc = acc * shrink[:, None] + tl.sum(parts * weights[:, :, None], 0)
        peak = new_peak
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + heads[:, None] * DIM + dims[None, :], result, mask=is_head[:, None])


@triton.jit
def split_range(length, split, num_splits, min_span, TILE: tl.constexpr):
    """(start, end, how many splits have any positions) of a history of this length."""
    span = tl.maximum(tl.cdiv(tl.cdiv(length, num_splits), TILE) * TILE, min_span)
    return split * span, tl.minimum(split * span + span, length), tl.cdiv(length, span)


@triton.jit
def _decode(
    q, kv, tables, lengths, out, partials, peaks, sums, tickets,
    scale, q_stride, table_stride, page_stride, value_offset, out_stride, num_splits, min_span,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, M: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    start, end, splits_used = split_range(length, split, num_splits, min_span, TILE)
    if start >= length:
        return
    heads = tl.arange(0, M)
    dims = tl.arange(0, DIM)
    q += row * q_stride + kv_head * GROUP * DIM
    queries = tl.load(q + heads[:, None] * DIM + dims[None, :], mask=(heads < GROUP)[:, None], other=0.0)
    peak = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DIM], tl.float32)
    peak, total, acc = attend_tiles(
        queries, kv, tables + row * table_stride, kv_head, start, end, scale, peak, total, acc,
        page_stride, value_offset, PAGE, DIM, TILE,
    )  # fmt: skip
    finish_split(
        peak, total, acc, partials, peaks, sums, tickets, out, row, kv_head, split, splits_used, num_splits, out_stride,
        KV_HEADS, GROUP, GROUP_ROWS, DIM, M, AT_ONCE,
    )  # fmt: skip


def combined_at_once(plan: DecodePlan) -> int:
    """All of them, up to sixteen, for their loads to be under way together; one warp has no registers for that."""
    return min(16, triton.next_power_of_2(plan.num_splits)) if plan.num_warps > 1 else 2


def decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    plan: DecodePlan,
    scratch: DecodeScratch,
) -> None:
    """q and out [batch, heads, head_dim] (rows may be strided), tables [batch, blocks], lengths [batch], both int32.

    A row of length 0 is padding: nothing is read or written for it.
    """
    check_pages(kv)
    batch, num_heads, dim = q.shape
    _, _, num_kv_heads, page, _ = kv.shape
    group = num_heads // num_kv_heads
    launch(
        _decode, (num_kv_heads, batch, plan.num_splits),
        q, kv, tables, lengths, out, scratch.partials, scratch.peaks, scratch.sums, scratch.tickets,
        LOG2_E / dim**0.5, q.stride(0), tables.stride(0), kv.stride(0), kv.stride(1), out.stride(0),
        plan.num_splits, plan.min_span,
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_ROWS=triton.next_power_of_2(group), PAGE=page, DIM=dim,
        TILE=plan.tile, M=max(MIN_DOT_ROWS, triton.next_power_of_2(group)), AT_ONCE=combined_at_once(plan),
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip
