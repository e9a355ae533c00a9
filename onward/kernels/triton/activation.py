"""The operations between the two products of an MLP: silu(gate) * up of a product that has both, gate first, and the
other activations, with or without a gate."""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from onward.kernels.ops import Activation
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
    """Computes out = silu(gate) * up. gate_up [rows, 2 size], out [rows, size]."""
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


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y))
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(ACTIVATION == "relu")
        return tl.maximum(x, 0.0)


@triton.jit
def _activate(x, out, size, in_stride, out_stride, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < size
    value = _activated(tl.load(x + row * in_stride + columns, mask=is_in).to(tl.float32), ACTIVATION)
    if GATED:
        value *= tl.load(x + row * in_stride + size + columns, mask=is_in).to(tl.float32)
    tl.store(out + row * out_stride + columns, value.to(out.dtype.element_ty), mask=is_in)


def activate(x: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
    """Computes `Ops.activate`. x [rows, size], or [rows, 2 size] with gates first; out [rows, size]."""
    rows, size = out.shape
    assert x.shape[1] in (size, 2 * size)
    launch(
        _activate, (rows, triton.cdiv(size, _BLOCK)), x, out, size, x.stride(0), out.stride(0),
        BLOCK=_BLOCK, ACTIVATION=activation, GATED=x.shape[1] == 2 * size, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
