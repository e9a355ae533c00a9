"""The normalisers of log-probabilities: the logarithm of each row's sum of exponentials.

There is one program per row and one kernel for all rows, so a row's bits depend neither on the number of rows nor on
what else is in the batch.
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from onward.kernels.triton.kernel_launch import launch

_TOKENS = 2048
"""Tokens that are read at once."""


@triton.jit
def _log_totals(logits, out, stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    logits += row * stride
    peaks = tl.full([BLOCK], -float("inf"), tl.float32)
    for at in range(0, size, BLOCK):
        peaks = tl.maximum(peaks, tl.load(logits + at + lanes, mask=at + lanes < size, other=-float("inf")))
    peak = tl.max(peaks, 0).to(tl.float64)
    sums = tl.zeros([BLOCK], tl.float64)
    for at in range(0, size, BLOCK):
        x = tl.load(logits + at + lanes, mask=at + lanes < size, other=-float("inf"))
        sums += tl.exp(x.to(tl.float64) - peak)
    tl.store(out + row, peak + tl.log(tl.sum(sums, 0)))


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """Returns the logarithms of the sums of exponentials, float64 [rows]. logits float32 [rows, vocabulary]."""
    assert logits.dtype == torch.float32, "another type would be another kernel, with sums in another order"
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.float64, device=logits.device)
    launch(
        _log_totals, (rows,), logits, out, logits.stride(0), size, BLOCK=_TOKENS, num_warps=8, enable_fp_fusion=False
    )  # fmt: skip
    return out
