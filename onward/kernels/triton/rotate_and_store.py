"""Norm of heads, rotary embedding and KV write of any rows: the operations between the QKV product and chunk attention.

qkv    [rows, (heads + 2 kv heads) * head_dim]: queries are rotated in place, keys and values are stored in their pages
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from onward.kernels.triton.head_rotation import head_sizes, head_tensors, load_angles, load_norm, rotated
from onward.kernels.triton.kernel_launch import launch
from onward.kernels.triton.kv_page_layout import check_kv_layout


@triton.jit
def _rotate_and_store(
    qkv, kv, positions, pages, q_norm, k_norm, cos_table, sin_table, eps, qkv_stride, page_stride, value_offset,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, ROTATED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    page = tl.load(pages + row).to(tl.int64)
    dims = tl.arange(0, WIDTH)
    is_dim = (dims < DIM)[None, :]
    cos, signed_sin = load_angles(cos_table, sin_table, position, DIM, WIDTH, ROTATED)
    heads = tl.arange(0, ROWS)[:, None]
    qkv += row * qkv_stride
    q_at = qkv + (kv_head * GROUP + heads) * DIM
    q_weights, q_partner_weights = load_norm(q_norm, DIM, WIDTH, ROTATED, NORM)
    q = rotated(q_at, heads < GROUP, q_weights, q_partner_weights, cos, signed_sin, eps, DIM, WIDTH, ROTATED, NORM)
    tl.debug_barrier()  # a thread may store to an address from which another thread loads its partner dimension
    tl.store(q_at + dims[None, :], q.to(qkv.dtype.element_ty), mask=(heads < GROUP) & is_dim)
    k_at = qkv + (KV_HEADS * GROUP + kv_head) * DIM + tl.zeros([1, 1], tl.int32)
    one = tl.full([1, 1], 1, tl.int1)
    k_weights, k_partner_weights = load_norm(k_norm, DIM, WIDTH, ROTATED, NORM)
    key = rotated(k_at, one, k_weights, k_partner_weights, cos, signed_sin, eps, DIM, WIDTH, ROTATED, NORM)
    value = tl.load(k_at + KV_HEADS * DIM + dims[None, :], mask=is_dim, other=0.0)
    key_ptrs = kv + page * page_stride + (kv_head * PAGE + position % PAGE) * DIM + dims[None, :]
    tl.store(key_ptrs, key.to(kv.dtype.element_ty), mask=is_dim)
    tl.store(key_ptrs + value_offset, value, mask=is_dim)


def rotate_and_store(
    qkv: torch.Tensor,
    kv: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Computes `Ops.rotate_and_store`. positions and pages int32 [rows]: the position of each row's token, and the
    block of its key and value. `norms` are the weights for heads of q and k, `rotary` cosines and sines, float32
    [positions, rotated / 2]."""
    check_kv_layout(kv)
    _, _, num_kv_heads, page, dim = kv.shape
    group = qkv.shape[1] // dim // num_kv_heads - 2
    q_norm, k_norm, cos, sin = head_tensors(norms, rotary, qkv)
    launch(
        _rotate_and_store, (qkv.shape[0], num_kv_heads),
        qkv, kv, positions, pages, q_norm, k_norm, cos, sin, eps, qkv.stride(0), kv.stride(0), kv.stride(1),
        KV_HEADS=num_kv_heads, GROUP=group, ROWS=triton.next_power_of_2(group), PAGE=page, DIM=dim,
        WIDTH=triton.next_power_of_2(dim), num_warps=1, enable_fp_fusion=False, **head_sizes(norms, rotary),
    )  # fmt: skip
