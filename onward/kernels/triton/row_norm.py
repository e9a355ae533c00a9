"""A norm of rows of any kind: RMSNorm or LayerNorm, with or without a bias. Plain models use `rms_norm`, which is
faster.

As in `rms_norm`, one compiled kernel serves every row of a norm, whatever the batch, so that a row's bits are always
the same.
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from onward.kernels.ops import NormWeights
from onward.kernels.triton.kernel_launch import launch


@triton.jit
def _row_norm(
    x, weight, bias, out, eps, x_stride, out_stride, size, count,
    BLOCK: tl.constexpr, CENTERS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_in = columns < size
    value = tl.load(x + row * x_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    if CENTERS:
        value = tl.where(is_in, value - tl.sum(value, 0) / count, 0.0)
    factor = tl.rsqrt(tl.sum(value * value, 0) / count + eps)
    value = value * factor * tl.load(weight + columns, mask=is_in, other=0.0).to(tl.float32)
    if BIAS:
        value += tl.load(bias + columns, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, value.to(out.dtype.element_ty), mask=is_in)


def row_norm(x: torch.Tensor, norm: NormWeights, eps: float, out: torch.Tensor) -> None:
    """Applies the norm to each row. `x` and `out` are [rows, size]; `out` may be `x`."""
    rows, size = x.shape
    assert not norm.centers or norm.count is None, "padding would no longer be zero"
    block = triton.next_power_of_2(size)
    launch(
        _row_norm, (rows,),
        x, norm.weight, norm.weight if norm.bias is None else norm.bias, out, eps, x.stride(0), out.stride(0), size,
        norm.count or size, BLOCK=block, CENTERS=norm.centers, BIAS=norm.bias is not None,
        num_warps=max(1, min(16, block // 512)), enable_fp_fusion=False,
    )  # fmt: skip
