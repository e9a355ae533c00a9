"""silu(gate) * up of a product that holds both, gate first."""

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
def gated(gate, up):
    return up * gate / (1.0 + tl.exp(-gate))


@triton.jit
def _silu_gate(gate_up, out, size, in_stride, out_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    # Rows on the first axis of the grid, the only one that may be longer than 65,535.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_up + row * in_stride + columns, mask=is_in).to(tl.float32)
    up = tl.load(gate_up + row * in_stride + size + columns, mask=is_in).to(tl.float32)
    tl.store(out + row * out_stride + columns, gated(gate, up).to(out.dtype.element_ty), mask=is_in)


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor, *, overlap: bool = False) -> None:
    """gate_up [rows, 2 size], out [rows, size]."""
    rows, size = out.shape
    launch(
        _silu_gate,
        (rows, triton.cdiv(size, _BLOCK)),
        gate_up,
        out,
        size,
        gate_up.stride(0),
        out.stride(0),
        BLOCK=_BLOCK,
        PDL=overlap,
        num_warps=4,
        launch_pdl=overlap,
        enable_fp_fusion=False,
    )
