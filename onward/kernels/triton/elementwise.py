"""Elementwise operations on the residual stream and on the logits, for models that need them."""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from onward.kernels.triton.kernel_launch import launch

_BLOCK = 1024


@triton.jit
def tanh(x):
    """Returns tanh of float32. A large exponential is infinite, and gives one."""
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _add_scaled(x, residual, factor, size, x_stride, residual_stride, BLOCK: tl.constexpr):
    # Rows on the first axis of the grid, the only one that may be longer than 65,535.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < size
    value = tl.load(x + row * x_stride + columns, mask=is_in).to(tl.float32)
    at = residual + row * residual_stride + columns
    total = tl.fma(value, factor, tl.load(at, mask=is_in).to(tl.float32))
    tl.store(at, total.to(residual.dtype.element_ty), mask=is_in)


@triton.jit
def _finish_logits(logits, multiplier, cap, size, stride, BLOCK: tl.constexpr, CAPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * stride + columns
    value = tl.load(at, mask=columns < size).to(tl.float32) * multiplier
    if CAPS:
        value = cap * tanh(value / cap)
    tl.store(at, value.to(logits.dtype.element_ty), mask=columns < size)


def add_scaled(x: torch.Tensor, factor: float, residual: torch.Tensor) -> None:
    """Adds in place: residual += factor * x, [rows, size] each."""
    rows, size = x.shape
    launch(
        _add_scaled, (rows, triton.cdiv(size, _BLOCK)), x, residual, factor, size, x.stride(0), residual.stride(0),
        BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def finish_logits(logits: torch.Tensor, multiplier: float, softcap: float | None) -> None:
    """Multiplies the logits by the multiplier, then applies softcap * tanh(logits / softcap), both in place."""
    rows, size = logits.shape
    launch(
        _finish_logits, (rows, triton.cdiv(size, _BLOCK)), logits, multiplier, softcap or 1.0, size, logits.stride(0),
        BLOCK=_BLOCK, CAPS=softcap is not None, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
