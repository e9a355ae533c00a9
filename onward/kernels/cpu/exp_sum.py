"""The sum of exponentials of one row of logits, from which logprobs are computed.

Each chunk of 256 logits has sixteen running sums, which are folded; chunks are added in float64 from first to last. So
the order, and with it the bits, depend on the row alone on every CPU. numpy's `exp` has other last bits on a CPU
without AVX2.
"""

import numpy as np
from numba.np.numpy_support import carray

from onward.kernels.cpu import simd
from onward.kernels.cpu.jit import Kernel

_CHUNK = 256

CONTEXT = np.dtype(
    [
        ("size", np.int64),
        ("logits", np.int64),  # float32 [size]
        ("peak", np.float32),  # the largest of them
        ("total", np.float64),  # the result
    ],
    align=True,
)


def _sum_exp(thread, context):
    c = carray(context, 1)[0]
    logits, top = simd.floats(c.logits), simd.splat(c.peak)
    total = np.float64(0.0)
    for chunk in range(0, c.size, _CHUNK):
        end = min(chunk + _CHUNK, c.size)
        whole = chunk + (end - chunk) // 16 * 16
        lanes = simd.splat(np.float32(0.0))
        for i in range(chunk, whole, 16):
            lanes = lanes + simd.exp(simd.load(logits, i) - top)
        total += np.float64(simd.sum_lanes(lanes))
        for i in range(whole, end):
            total += np.float64(simd.max_lanes(simd.exp(simd.splat(logits[i]) - top)))
    c.total = total


_KERNEL = Kernel(_sum_exp, CONTEXT)


def exp_sum(logits: np.ndarray, peak: np.float32) -> float:
    """Returns the sum of e to the power of each logit less `peak`. It runs on the caller's thread alone, as it is
    quick."""
    assert logits.dtype == np.float32, "the kernel reads float32 logits"
    assert logits.ndim == 1, "the sum is over one row of logits"
    assert logits.flags.c_contiguous, "the kernel reads a contiguous row"
    context = np.zeros((), CONTEXT)
    context["size"], context["logits"], context["peak"] = len(logits), logits.ctypes.data, peak
    _KERNEL.run_on_caller(context)
    return float(context["total"])
