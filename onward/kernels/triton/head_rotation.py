"""Norm and rotary embedding of heads, shared by all kernels that need rotated queries and keys, so that they have the
same bits.
"""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from onward.kernels.triton.split_softmax import halving_sum


@triton.jit
def _partners(dims, DIM: tl.constexpr, ROTATED: tl.constexpr):
    """Returns the dimension that each dimension is rotated with. From ROTATED on, that is the dimension itself."""
    if ROTATED == DIM:
        return (dims + DIM // 2) % DIM
    elif ROTATED > 0:
        return tl.where(dims < ROTATED, (dims + ROTATED // 2) % ROTATED, dims)
    else:
        return dims


@triton.jit
def load_angles(cos_table, sin_table, position, DIM: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr):
    """Loads cosines and signed sines [WIDTH] of a position; the tables are [positions, ROTATED / 2]."""
    dims = tl.arange(0, WIDTH)
    if ROTATED > 0:
        HALF: tl.constexpr = ROTATED // 2
        at = position * HALF + dims % HALF
        cos, sin = tl.load(cos_table + at), tl.load(sin_table + at)
        signed_sin = tl.where(dims < HALF, -sin, sin)
        if ROTATED < DIM:
            cos, signed_sin = tl.where(dims < ROTATED, cos, 1.0), tl.where(dims < ROTATED, signed_sin, 0.0)
    else:
        cos, signed_sin = tl.full([WIDTH], 1.0, tl.float32), tl.zeros([WIDTH], tl.float32)
    return cos, signed_sin


@triton.jit
def load_norm(norm, DIM: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr, NORM: tl.constexpr):
    """Loads the weights [WIDTH] of the norm of a head, and those of each dimension's partner in the rotation. NORM is
    the number of weights, as the padding of a head has none. 0: there is no norm."""
    SIZE: tl.constexpr = NORM if NORM > 0 else DIM
    dims = tl.arange(0, WIDTH)
    own = tl.load(norm + dims, mask=dims < SIZE, other=0.0)
    partners = tl.load(norm + _partners(dims, DIM, ROTATED), mask=dims < SIZE, other=0.0)
    return own.to(tl.float32), partners.to(tl.float32)


@triton.jit
def rotated(
    at, is_row, weights, partner_weights, cos, signed_sin, eps,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Loads the heads at the pointers `at` [rows, 1] and returns them normalised and rotated, in float32 [rows, WIDTH],
    with zeros from DIM on. The first ROTATED dimensions are rotated. With a norm, the first NORM dimensions have
    weights and further ones become zero."""
    dims = tl.arange(0, WIDTH)
    is_in = is_row & (dims < DIM)[None, :]
    x = tl.load(at + dims[None, :], mask=is_in, other=0.0).to(tl.float32)
    partner = tl.load(at + _partners(dims, DIM, ROTATED)[None, :], mask=is_in, other=0.0).to(tl.float32)
    if NORM > 0:
        # A thread has loaded eight neighbours at once, which are added first.
        mean = halving_sum(x * x, 1, WIDTH, WIDTH // 8) * (1.0 / NORM)
        factor = tl.rsqrt(mean + eps)[:, None]
        x = x * factor * weights[None, :]
        partner = partner * factor * partner_weights[None, :]
    return tl.fma(x, cos[None, :], partner * signed_sin[None, :])


def head_tensors(
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    any_: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Returns the tensors of norms and angles as a kernel's arguments. Placeholders stand for missing ones, which the
    kernel does not read."""
    cos, sin = rotary if rotary is not None else (any_, any_)
    return (*(norms if norms is not None else (cos, cos)), cos, sin)


def head_sizes(
    norms: tuple[torch.Tensor, torch.Tensor] | None, rotary: tuple[torch.Tensor, torch.Tensor] | None
) -> dict[str, int]:
    """Returns the numbers of dimensions of a head that have a norm and that are rotated, as a kernel's options."""
    return {
        "NORM": 0 if norms is None else len(norms[0]),
        "ROTATED": 0 if rotary is None else 2 * rotary[0].shape[1],
    }
