"""Puts keys and values of rows where their pages are, without touching them."""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from onward.kernels.triton.launching import launch
from onward.kernels.triton.pages import check_pages


@triton.jit
def _kv_write(
    keys, values, kv, positions, pages, k_stride, v_stride, page_stride, value_offset,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.load(positions + row) % PAGE
    page = tl.load(pages + row).to(tl.int64)
    heads = tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, DIM)[None, :]
    is_head = heads < KV_HEADS
    place = kv + page * page_stride + (heads * PAGE + lane) * DIM + dims
    source = heads * DIM + dims
    tl.store(place, tl.load(keys + row * k_stride + source, mask=is_head), mask=is_head)
    tl.store(place + value_offset, tl.load(values + row * v_stride + source, mask=is_head), mask=is_head)


def kv_write(
    keys: torch.Tensor, values: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor
) -> None:
    """keys and values [rows, kv heads, head_dim] (rows may be strided); positions and pages int32 [rows]."""
    check_pages(kv)
    _, _, num_kv_heads, page, dim = kv.shape
    launch(
        _kv_write, (keys.shape[0],),
        keys, values, kv, positions, pages, keys.stride(0), values.stride(0), kv.stride(0), kv.stride(1),
        KV_HEADS=num_kv_heads, HEADS=triton.next_power_of_2(num_kv_heads), PAGE=page, DIM=dim, num_warps=4,
    )  # fmt: skip
