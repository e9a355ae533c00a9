"""Norm of heads, rotary embedding and KV write of any rows: what lies between the QKV product and prefill attention.

qkv    [rows, (heads + 2 kv heads) * head_dim]: queries are turned in place, keys and values go to their pages
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl

from onward.kernels.triton.launching import launch
from onward.kernels.triton.pages import check_pages


@triton.jit
def _halves(low, high, weight, cos, sin, half_dims, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """The two halves of some heads ([heads, HALF] each), normalised and rotated."""
    if NORM:
        factor = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)
        low = low * factor[:, None] * tl.load(weight + half_dims).to(tl.float32)[None, :]
        high = high * factor[:, None] * tl.load(weight + HALF + half_dims).to(tl.float32)[None, :]
    return low * cos[None, :] - high * sin[None, :], high * cos[None, :] + low * sin[None, :]


@triton.jit
def _rotate_and_store(
    qkv, kv, positions, pages, q_norm, k_norm, cos_table, sin_table, eps, qkv_stride, page_stride, value_offset,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    position = tl.load(positions + row)
    page = tl.load(pages + row).to(tl.int64)
    dims = tl.arange(0, HALF)
    cos = tl.load(cos_table + position * HALF + dims)
    sin = tl.load(sin_table + position * HALF + dims)
    heads = tl.arange(0, GROUP_ROWS)[:, None]
    q_at = qkv + row * qkv_stride + (kv_head * GROUP + heads) * DIM + dims[None, :]
    is_head = heads < GROUP
    low = tl.load(q_at, mask=is_head, other=0.0).to(tl.float32)
    high = tl.load(q_at + HALF, mask=is_head, other=0.0).to(tl.float32)
    low, high = _halves(low, high, q_norm, cos, sin, dims, eps, HALF, NORM)
    tl.store(q_at, low.to(qkv.dtype.element_ty), mask=is_head)
    tl.store(q_at + HALF, high.to(qkv.dtype.element_ty), mask=is_head)
    one = tl.arange(0, 1)[:, None]
    k_at = qkv + row * qkv_stride + (KV_HEADS * GROUP + kv_head + one) * DIM + dims[None, :]
    low, high = _halves(
        tl.load(k_at).to(tl.float32), tl.load(k_at + HALF).to(tl.float32), k_norm, cos, sin, dims, eps, HALF, NORM
    )
    place = kv + page * page_stride + (kv_head * PAGE + position % PAGE + one) * DIM + dims[None, :]
    tl.store(place, low.to(kv.dtype.element_ty))
    tl.store(place + HALF, high.to(kv.dtype.element_ty))
    v_at = k_at + KV_HEADS * DIM
    tl.store(place + value_offset, tl.load(v_at))
    tl.store(place + value_offset + HALF, tl.load(v_at + HALF))


def rotate_and_store(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """positions and pages int32 [rows]: where each row's token is, and the block of its key and value. `norms` are the
    weights for heads of q and k, `rotary` cosines and sines, float32 [positions, head_dim / 2]."""
    check_pages(kv)
    _, _, num_kv_heads, page, dim = kv.shape
    group = qkv.shape[1] // dim // num_kv_heads - 2
    q_norm, k_norm = norms if norms is not None else (rotary[0], rotary[0])
    launch(
        _rotate_and_store, (qkv.shape[0], num_kv_heads),
        qkv, kv, positions, pages, q_norm, k_norm, rotary[0], rotary[1], eps, qkv.stride(0), kv.stride(0), kv.stride(1),
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_ROWS=triton.next_power_of_2(group), PAGE=page, DIM=dim,
        NORM=norms is not None, num_warps=1,
    )  # fmt: skip
