"""Matrix products of a decode batch whose order of sums does not depend on the batch.

A row's output is summed over the inputs in steps of a fixed size, in one program, whatever other rows there are: the same
bits alone and in any batch (torch's products choose their way by the number of rows). Beside that, silu(gate) * up is done
on the way, and with `overlap` a launch begins while the kernel before it ends.
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """How the work is cut up. None of it changes a bit of the result: inputs are added up in their order."""

    rows: int
    outputs: int
    inputs: int = 64
    num_warps: int = 4
    num_stages: int = 4

    @classmethod
    def choose(cls, num_rows: int, num_outputs: int, *, gates: bool = False) -> "LinearPlan":
        """Measured on an H200."""
        if num_rows <= 64:
            return cls(64, 128 if gates and num_outputs >= 8192 else 32, 64 if gates and num_outputs >= 8192 else 128)
        if gates:
            return cls(128, 64)
        if num_outputs <= 2048:
            return cls(64, 32, 128)
        return cls(64, 64, num_stages=5) if num_outputs < 6144 else cls(128, 128, num_warps=8)


@triton.jit
def _linear(
    x, weight, out, num_rows, num_outputs, num_inputs, out_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS, tl.program_id(1) * OUTPUTS
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    acc_up = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in range(0, num_inputs, INPUTS):
        a = x.load([row, at])
        acc = tl.dot(a, weight.load([column, at]).T, acc)
        if GATE:
            acc_up = tl.dot(a, weight.load([num_outputs + column, at]).T, acc_up)
    if GATE:
        acc = acc_up * acc / (1.0 + tl.exp(-acc))
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, OUTPUTS)
    is_in = (rows < num_rows)[:, None] & (columns < num_outputs)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :], acc.to(out.dtype.element_ty), mask=is_in)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    plan: LinearPlan,
    *,
    gates: bool = False,
    overlap: bool = False,
) -> None:
    """x [rows, inputs], weight [outputs, inputs] (twice the outputs if it `gates`: gate first), out [rows, outputs]."""
    num_rows, num_inputs = x.shape
    num_outputs = out.shape[1]
    assert num_outputs % plan.outputs == 0 or not gates, "a tile of gates would reach into the ups"
    _linear[(triton.cdiv(num_rows, plan.rows), triton.cdiv(num_outputs, plan.outputs))](
        TensorDescriptor.from_tensor(x, [plan.rows, plan.inputs]),
        TensorDescriptor.from_tensor(weight, [plan.outputs, plan.inputs]),
        out, num_rows, num_outputs, num_inputs, out.stride(0),
        ROWS=plan.rows, OUTPUTS=plan.outputs, INPUTS=plan.inputs, GATE=gates, PDL=overlap,
        num_warps=plan.num_warps, num_stages=plan.num_stages, launch_pdl=overlap,
    )  # fmt: skip
