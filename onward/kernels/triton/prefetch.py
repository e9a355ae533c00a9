"""Prefetches memory. Data that a launch will read, and that no kernel before it writes, can be fetched while the launch
still waits for its input."""

# Triton is not installed everywhere, and its kernels are a language of their own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false

import triton
import triton.language as tl

LINE = tl.constexpr(64)
"""Numbers of two bytes in a cache line."""


@triton.jit
def prefetch(pointers):
    """Fetches the cache lines at these addresses from memory into the L2 cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
