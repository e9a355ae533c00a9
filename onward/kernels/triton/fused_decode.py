"""Everything between the QKV product and the output product of a decode step, in one launch.

Norm of each query and key head (Qwen3; optional), rotary embedding, KV write and attention. The new key and value are used
from registers, so no program waits for another one's write: the program of the last split writes them for later steps.

    qkv     [batch, (heads + 2 kv heads) * head_dim]: queries, keys, values of one token each
    history positions 0 .. length - 2 are in the pages; position length - 1 is the new token
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl

from onward.kernels.triton.decode_attention import (
    LOG2_E,
    MIN_DOT_ROWS,
    DecodePlan,
    DecodeScratch,
    add_tile,
    attend_tiles,
    combined_at_once,
    finish_split,
    load_tile,
    split_range,
)
from onward.kernels.triton.launching import launch
from onward.kernels.triton.pages import check_pages


@triton.jit
def _turned(x, partner, weight, partner_weight, cos, signed_sin, eps, DIM: tl.constexpr, NORM: tl.constexpr):
    """Rows of heads, normalised and rotated; `partner` holds the other half's elements at the same places."""
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
        x = x * factor[:, None] * weight[None, :]
        partner = partner * factor[:, None] * partner_weight[None, :]
    return x * cos[None, :] + partner * signed_sin[None, :]


@triton.jit
def _fused_decode(
    qkv, kv, tables, lengths, out, q_norm, k_norm, cos_table, sin_table, partials, peaks, sums, tickets,
    scale, eps, qkv_stride, table_stride, page_stride, value_offset, out_stride, num_splits, min_span,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, M: tl.constexpr, AT_ONCE: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    start, end, splits_used = split_range(length, split, num_splits, min_span, TILE)
    HALF: tl.constexpr = DIM // 2
    position = tl.maximum(length - 1, 0)
    end = tl.minimum(end, position)
    table = tables + row * table_stride
    dims = tl.arange(0, DIM)
    partners = (dims + HALF) % DIM
    cos = tl.load(cos_table + position * HALF + dims % HALF)
    sin = tl.load(sin_table + position * HALF + dims % HALF)
    signed_sin = tl.where(dims < HALF, -sin, sin)
    q_weight, q_weight_partner = tl.load(q_norm + dims).to(tl.float32), tl.load(q_norm + partners).to(tl.float32)
    if EARLY:
        # The history is older than the kernel before this one. Only where there are registers to hold a tile.
        keys, values, is_in = load_tile(
            kv, table, kv_head, start, end, page_stride, value_offset, PAGE, DIM, TILE, True
        )
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if start >= length:
        return
    heads = tl.arange(0, M)
    is_head = (heads < GROUP)[:, None]
    qkv += row * qkv_stride
    q_at = qkv + (kv_head * GROUP + heads)[:, None] * DIM
    x = tl.load(q_at + dims[None, :], mask=is_head, other=0.0).to(tl.float32)
    partner = tl.load(q_at + partners[None, :], mask=is_head, other=0.0).to(tl.float32)
    queries = _turned(x, partner, q_weight, q_weight_partner, cos, signed_sin, eps, DIM, NORM).to(kv.dtype.element_ty)
    peak = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DIM], tl.float32)
    if split == splits_used - 1:
        one = tl.arange(0, 1)
        k_at = qkv + (KV_HEADS * GROUP + kv_head + one)[:, None] * DIM
        raw_key = tl.load(k_at + dims[None, :]).to(tl.float32)
        key_partner = tl.load(k_at + partners[None, :]).to(tl.float32)
        key = _turned(
            raw_key, key_partner, tl.load(k_norm + dims).to(tl.float32), tl.load(k_norm + partners).to(tl.float32), cos,
            signed_sin, eps, DIM, NORM,
        ).to(kv.dtype.element_ty)  # fmt: skip
        value = tl.load(k_at + KV_HEADS * DIM + dims[None, :])
        page = tl.load(table + position // PAGE).to(tl.int64)
        place = kv + page * page_stride + (kv_head * PAGE + position % PAGE) * DIM + dims[None, :] + one[:, None]
        tl.store(place, key)
        tl.store(place + value_offset, value)
        peak = tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1) * scale
        total += 1.0
        acc += value.to(tl.float32)
    if EARLY:
        peak, total, acc = add_tile(queries, keys, values, is_in, scale, peak, total, acc, True)
        start += TILE
    if start < end:
        peak, total, acc = attend_tiles(
            queries, kv, table, kv_head, start, end, scale, peak, total, acc,
            page_stride, value_offset, PAGE, DIM, TILE,
        )  # fmt: skip
    finish_split(
        peak, total, acc, partials, peaks, sums, tickets, out, row, kv_head, split, splits_used, num_splits, out_stride,
        KV_HEADS, GROUP, GROUP_ROWS, DIM, M, AT_ONCE,
    )  # fmt: skip


def fused_decode(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],
    plan: DecodePlan,
    scratch: DecodeScratch,
    *,
    overlap: bool = False,
) -> None:
    """`lengths` count the new token. `norms` are the weights for heads of q and k, `rotary` cosines and sines, float32
    [positions, head_dim / 2]. out [batch, heads, head_dim]. A row of length 0 is padding.

    With `overlap` the launch begins while the kernel before it ends. Then only `qkv` may be that kernel's work: lengths,
    tables and the history are read at once.
    """
    check_pages(kv)
    batch, num_heads, dim = out.shape
    _, _, num_kv_heads, page, _ = kv.shape
    group = num_heads // num_kv_heads
    q_norm, k_norm = norms if norms is not None else (rotary[0], rotary[0])
    launch(
        _fused_decode, (num_kv_heads, batch, plan.num_splits),
        qkv, kv, tables, lengths, out, q_norm, k_norm, rotary[0], rotary[1],
        scratch.partials, scratch.peaks, scratch.sums, scratch.tickets,
        LOG2_E / dim**0.5, eps, qkv.stride(0), tables.stride(0), kv.stride(0), kv.stride(1), out.stride(0),
        plan.num_splits, plan.min_span,
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_ROWS=triton.next_power_of_2(group), PAGE=page, DIM=dim,
        TILE=plan.tile, M=max(MIN_DOT_ROWS, triton.next_power_of_2(group)), AT_ONCE=combined_at_once(plan),
        NORM=norms is not None, PDL=overlap, EARLY=overlap and plan.num_warps >= 4,
        num_warps=plan.num_warps, num_stages=plan.num_stages, launch_pdl=overlap,
    )  # fmt: skip
