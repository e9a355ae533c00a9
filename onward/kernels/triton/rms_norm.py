"""RMSNorm, optionally after the addition to the residual stream.

A row's sum is computed in the layout that Triton chooses. The bits are still equal in every batch, because one compiled
kernel serves every row of a norm.
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from onward.kernels.triton.kernel_launch import launch


@triton.jit
def _add_norm(
    x, residual, weight, out, eps, x_stride, residual_stride, out_stride, size,
    BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < size
    w = tl.load(weight + columns, mask=is_in, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + row * x_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + columns, mask=is_in, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * residual_stride + columns, rounded, mask=is_in)
        value = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    tl.store(out + row * out_stride + columns, (value * factor * w).to(out.dtype.element_ty), mask=is_in)


def _launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, **flags
) -> None:
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    launch(
        _add_norm, (rows,),
        x, residual, weight, out, eps, x.stride(0), residual.stride(0), out.stride(0), size,
        BLOCK=block, num_warps=max(1, min(16, block // 512)), enable_fp_fusion=False, **flags,
    )  # fmt: skip


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, overlap: bool = False) -> None:
    """Computes the RMS norm of each row. `x` and `out` are [rows, size]."""
    _launch(x, x, weight, eps, out, ADD=False, PDL=overlap, launch_pdl=overlap)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    overlap: bool = False,
) -> None:
    """Adds and normalizes: residual += x; out = norm(residual). The norm is of the sum as it is stored, rounded."""
    _launch(x, residual, weight, eps, out, ADD=True, PDL=overlap, launch_pdl=overlap)
