"""Applies token bitmasks: logits of tokens whose bit is not set become minus infinity."""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from onward.kernels.triton.kernel_launch import launch

_TOKENS = 4096
"""Tokens of a program."""


@triton.jit
def _forbid(logits, rows, bits, vocab_size, logits_stride, bits_stride, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = tokens < vocab_size
    octets = tl.load(bits + number * bits_stride + tokens // 8, mask=is_in, other=0).to(tl.int32)
    is_forbidden = ((octets >> (tokens % 8)) & 1) == 0
    tl.store(logits + row * logits_stride + tokens, -float("inf"), mask=is_in & is_forbidden)


def apply_token_bitmask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Sets the logits of forbidden tokens to minus infinity. logits float32 [any, vocabulary], rows int64 (the rows to
    change), bits uint8 [rows, octets], lowest first."""
    vocab_size = logits.shape[1]
    assert bits.shape[1] * 8 >= vocab_size, "every token has a bit"
    launch(
        _forbid, (len(rows), triton.cdiv(vocab_size, _TOKENS)),
        logits, rows, bits, vocab_size, logits.stride(0), bits.stride(0), BLOCK=_TOKENS,
    )  # fmt: skip
