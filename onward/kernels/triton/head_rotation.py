"""Norm and rotary embedding of heads, for the kernels that need rotated queries and keys: all of them get the same bits."""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from onward.kernels.triton.split_softmax import halving_sum


@triton.jit
def load_angles(cos_table, sin_table, position, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Cosines and signed sines [WIDTH] of a position; the tables are [positions, DIM / 2]."""
    HALF: tl.constexpr = DIM // 2
    dims = tl.arange(0, WIDTH)
    at = position * HALF + dims % HALF
    cos, sin = tl.load(cos_table + at), tl.load(sin_table + at)
    return cos, tl.where(dims < HALF, -sin, sin)


@triton.jit
def load_norm(norm, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The weights [WIDTH] of the norm of a head, and those of each dimension's partner in the rotation."""
    dims = tl.arange(0, WIDTH)
    own = tl.load(norm + dims, mask=dims < DIM, other=0.0)
    partners = tl.load(norm + (dims + DIM // 2) % DIM, mask=dims < DIM, other=0.0)
    return own.to(tl.float32), partners.to(tl.float32)


@triton.jit
def rotated(
    at, is_row, weights, partner_weights, cos, signed_sin, eps,
    DIM: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The heads at the pointers `at` [rows, 1], normalised and rotated, in float32 [rows, WIDTH]; zeros behind DIM."""
    dims = tl.arange(0, WIDTH)
    is_in = is_row & (dims < DIM)[None, :]
    x = tl.load(at + dims[None, :], mask=is_in, other=0.0).to(tl.float32)
    partner = tl.load(at + ((dims + DIM // 2) % DIM)[None, :], mask=is_in, other=0.0).to(tl.float32)
    if NORM:
        # A thread has loaded eight neighbours at once.
        mean = halving_sum(x * x, 1, WIDTH, WIDTH // 8) * (1.0 / DIM)
        factor = tl.rsqrt(mean + eps)[:, None]
        x = x * factor * weights[None, :]
        partner = partner * factor * partner_weights[None, :]
    return tl.fma(x, cos[None, :], partner * signed_sin[None, :])
