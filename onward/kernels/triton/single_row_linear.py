"""The matrix products of a single stream's decode step: one row times a matrix, bound by reading the matrix.

The kernel includes the operations before and after: the norm of the input (a factor for the whole row, so it is applied
last), silu(gate) * up of a matrix that has both, or the addition to the residual stream. With `overlap` a program loads
its first weights while the kernel before it is still running, because no kernel writes weights.

Weights are bfloat16, or float8 (e4m3) with one scale per output.
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from onward.kernels.triton.kernel_launch import launch


@dataclass(frozen=True, slots=True)
class SingleRowPlan:
    outputs: int
    """Outputs of one program."""
    inputs: int
    """Inputs that are read at once."""
    num_warps: int = 4

    @classmethod
    def choose(cls, num_rows: int, num_inputs: int) -> "SingleRowPlan":
        """Returns the plan that was fastest on an H200. Many rows of the matrix fill the device with small steps; with
        few rows, more threads read each."""
        divisor = num_inputs & -num_inputs
        if num_rows >= 16_384:
            return cls(outputs=32, inputs=min(256, divisor))
        inputs = min(2048 if num_inputs == 2048 else 1024, divisor)
        return cls(outputs=8 if num_inputs <= 1024 else 4, inputs=inputs)


@triton.jit
def _one_row(
    x, weight, out, norm, scales, num_outputs, num_inputs, eps, weight_stride,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr,
    SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, INPUTS)
    is_row = rows < num_outputs
    is_in = is_row[:, None]
    w_at = weight + rows.to(tl.int64)[:, None] * weight_stride + columns[None, :]
    gate_size = num_outputs.to(tl.int64) * weight_stride
    w = tl.load(w_at, mask=is_in, other=0.0)
    if GATE:
        u = tl.load(w_at + gate_size, mask=is_in, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + columns).to(tl.float32)
    squares = value * value
    if NORM:
        value = value * tl.load(norm + columns).to(tl.float32)
    acc = tl.sum(w.to(tl.float32) * value[None, :], 1)
    if GATE:
        acc_up = tl.sum(u.to(tl.float32) * value[None, :], 1)
    for at in range(INPUTS, num_inputs, INPUTS):
        w = tl.load(w_at + at, mask=is_in, other=0.0)
        value = tl.load(x + at + columns).to(tl.float32)
        if NORM:
            squares += value * value
            value = value * tl.load(norm + at + columns).to(tl.float32)
        acc += tl.sum(w.to(tl.float32) * value[None, :], 1)
        if GATE:
            u = tl.load(w_at + gate_size + at, mask=is_in, other=0.0)
            acc_up += tl.sum(u.to(tl.float32) * value[None, :], 1)
    if SCALE:
        acc = acc * tl.load(scales + rows, mask=is_row, other=0.0)
        if GATE:
            acc_up = acc_up * tl.load(scales + num_outputs + rows, mask=is_row, other=0.0)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / num_inputs + eps)
        acc = acc * factor
    if GATE:
        if NORM:
            acc_up = acc_up * factor
        acc = acc_up * acc / (1.0 + tl.exp(-acc))
    if ADD:
        acc += tl.load(out + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + rows, acc.to(out.dtype.element_ty), mask=is_row)


def single_row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    plan: SingleRowPlan,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    scales: torch.Tensor | None = None,
    adds: bool = False,
    gates: bool = False,
    overlap: bool = False,
) -> None:
    """Computes `Ops.single_row_linear`. x [1, inputs], weight [outputs, inputs] (with `gates` twice the outputs, gate
    first), out [1, outputs]. With `adds` the product is added to `out`. `norm` is the weight and epsilon of an RMSNorm
    of x, `scales` float32, one per row of the weight."""
    assert x.shape[0] == 1
    num_outputs, num_inputs = out.shape[1], x.shape[1]
    assert num_inputs % plan.inputs == 0
    norm_weight, eps = norm if norm is not None else (x, 0.0)
    launch(
        _one_row, (triton.cdiv(num_outputs, plan.outputs),),
        x, weight, out, norm_weight, scales if scales is not None else x, num_outputs, num_inputs, eps, weight.stride(0),
        OUTPUTS=plan.outputs, INPUTS=plan.inputs, NORM=norm is not None, ADD=adds, GATE=gates,
        SCALE=scales is not None, PDL=overlap,
        num_warps=plan.num_warps, launch_pdl=overlap,
    )  # fmt: skip
