"""The sum of rows, one after the other, so that its bits do not depend on where a chunk of rows ends."""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from onward.kernels.triton.kernel_launch import launch

_COLUMNS = 32
"""Columns of a program. Few, so that many processors share a row: all of them wait for memory, one row after the
other."""


@triton.jit(do_not_specialize=["num_rows"])
def _add_rows(x, total, num_rows, stride, size, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < size
    found = tl.load(total + columns, mask=is_in, other=0.0)
    for row in range(num_rows):
        found += tl.load(x + row.to(tl.int64) * stride + columns, mask=is_in, other=0.0).to(tl.float64)
    tl.store(total + columns, found, mask=is_in)


def accumulate_rows(x: torch.Tensor, total: torch.Tensor) -> None:
    """Adds x [rows, size], in any type, to total, float64 [size]."""
    rows, size = x.shape
    grid = (triton.cdiv(size, _COLUMNS),)
    launch(_add_rows, grid, x, total, rows, x.stride(0), size, BLOCK=_COLUMNS, num_warps=1)
