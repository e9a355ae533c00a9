"""Quantizes rows of activations to float8 (e4m3), each with a scale of its own."""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from onward.kernels.ops import FP8_MAX
from onward.kernels.triton.kernel_launch import launch


@triton.jit
def _quantize_rows(x, out, scales, size, x_stride, out_stride, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < size
    value = tl.load(x + row * x_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-12) / LARGEST
    tl.store(out + row * out_stride + columns, (value / scale).to(out.dtype.element_ty), mask=is_in)
    tl.store(scales + row, scale)


def quantize_rows(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantizes rows to float8, with a scale for each. x [rows, size], out float8 [rows, size], scales float32 [rows,
    1]."""
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    launch(
        _quantize_rows, (rows,),
        x, out, scales, size, x.stride(0), out.stride(0), LARGEST=FP8_MAX, BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )  # fmt: skip
