"""Matrix products whose order of sums does not depend on the batch.

A row's output is summed over the inputs in their order, in one program, whatever other rows there are: the same bits
alone and in any batch. The kernel can also apply silu(gate) * up. With `overlap` a launch begins while the kernel
before it ends: it then prefetches its first weights, which depend on no kernel, before it waits for its input.
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from onward.kernels.triton.activation import gated
from onward.kernels.triton.invariant_linear_plan import LinearPlan
from onward.kernels.triton.kernel_launch import launch
from onward.kernels.triton.prefetch import LINE, prefetch

_TILES_TOGETHER = 16
"""Tiles of rows that are computed together, see `_linear`."""


@triton.jit(do_not_specialize=["num_rows"])  # otherwise some numbers of rows would have kernels of their own
def _linear(
    x, weight, weight_at, out, num_rows, num_outputs, num_inputs, out_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
    TOGETHER: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    # Programs that run at the same time work on few rows and few columns, which then stay in the cache.
    num_columns = tl.cdiv(num_outputs, OUTPUTS)
    first_tile = tl.program_id(0) // (TOGETHER * num_columns) * TOGETHER
    height = tl.minimum(tl.cdiv(num_rows, ROWS) - first_tile, TOGETHER)
    index_in_group = tl.program_id(0) % (TOGETHER * num_columns)
    row, column = (first_tile + index_in_group % height) * ROWS, index_in_group // height * OUTPUTS
    if PDL:
        if LINES > 0:
            columns = (column + tl.arange(0, OUTPUTS)) % num_outputs
            lines = columns.to(tl.int64)[:, None] * num_inputs + (tl.arange(0, LINES) * LINE)[None, :]
            prefetch(weight_at + lines)
            if GATE:
                prefetch(weight_at + num_outputs.to(tl.int64) * num_inputs + lines)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    acc_up = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in range(0, num_inputs, INPUTS):
        a = x.load([row, at])
        acc = tl.dot(a, weight.load([column, at]).T, acc, input_precision="ieee")
        if GATE:
            acc_up = tl.dot(a, weight.load([num_outputs + column, at]).T, acc_up, input_precision="ieee")
    if GATE:
        # Rounded as if the product had been stored: the bits are those of a product followed by `silu_and_mul`.
        acc = gated(acc.to(out.dtype.element_ty).to(tl.float32), acc_up.to(out.dtype.element_ty).to(tl.float32))
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, OUTPUTS)
    is_in = (rows < num_rows)[:, None] & (columns < num_outputs)[None, :]
    tl.store(out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :], acc.to(out.dtype.element_ty), mask=is_in)


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    plan: LinearPlan,
    *,
    gates: bool = False,
    overlap: bool = False,
) -> None:
    """Computes `Ops.invariant_linear`. x [rows, inputs], weight [outputs, inputs] (twice the outputs if it `gates`:
    gate first), out [rows, outputs]."""
    num_rows, num_inputs = x.shape
    num_outputs = out.shape[1]
    assert num_outputs % plan.outputs == 0 or not gates, "a tile of gates would reach into the ups"
    launch(
        _linear, (triton.cdiv(num_rows, plan.rows) * triton.cdiv(num_outputs, plan.outputs),),
        TensorDescriptor.from_tensor(_in_whole_tiles(x, plan.rows), [plan.rows, plan.inputs]),
        TensorDescriptor.from_tensor(weight, [plan.outputs, plan.inputs]),
        weight, out, num_rows, num_outputs, num_inputs, out.stride(0),
        ROWS=plan.rows, OUTPUTS=plan.outputs, INPUTS=plan.inputs, GATE=gates, PDL=overlap, TOGETHER=_TILES_TOGETHER,
        LINES=_lines_ahead(plan, num_inputs),
        num_warps=plan.num_warps, num_stages=plan.num_stages, launch_pdl=overlap, enable_fp_fusion=False,
    )  # fmt: skip


def _lines_ahead(plan: LinearPlan, num_inputs: int) -> int:
    """Returns the number of lines of each row of weights that are prefetched before the wait: a power of two."""
    most = min(plan.ahead, num_inputs) // LINE.value
    return 1 << (most.bit_length() - 1) if most else 0


def with_padding_rows(x: torch.Tensor, wanted: int) -> torch.Tensor:
    """Returns a view of `wanted` rows, or of fewer if the buffer has fewer after those of `x`."""
    there = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()) // x.stride(0)
    return x.as_strided((max(len(x), min(wanted, there)), x.shape[1]), x.stride())


def _in_whole_tiles(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns a view with as many rows after `x` as a whole tile needs. They are computed too, and not stored. Without
    them 160 rows took longer than 256: a tile that reaches over the end of its tensor seems to be copied slowly."""
    return with_padding_rows(x, triton.cdiv(len(x), rows) * rows)
