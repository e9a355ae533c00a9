"""Activations and soft-caps of kernels against the textbook's."""

import numpy as np
import pytest
from numba import carray

from onward.kernels import numpy_reference
from onward.kernels.cpu import simd
from onward.kernels.cpu.activations import KINDS, activate, soft_cap
from onward.kernels.cpu.jit import Kernel
from tests.kernels.kernel_runs import run

CONTEXT = np.dtype([("x", np.int64), ("size", np.int64), ("kind", np.int64), ("cap", np.float32)], align=True)


def _in_place(thread, context):
    c = carray(context, 1)[0]
    x = simd.floats(c.x)
    for i in range(0, c.size, 16):
        v = simd.load(x, i)
        simd.store(x, i, soft_cap(v, c.cap) if c.cap > 0 else activate(c.kind, v))


KERNEL = Kernel(_in_place, CONTEXT)
VALUES = np.concatenate([np.linspace(-12, 12, 4001), [-200, 200, 0.0], np.linspace(-1e-3, 1e-3, 44)]).astype(np.float32)


def computed(**fields: float) -> np.ndarray:
    x = np.zeros(-(-len(VALUES) // 16) * 16, np.float32)
    x[: len(VALUES)] = VALUES
    run(KERNEL, x=x, size=len(x), **fields)
    return x[: len(VALUES)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_activation_is_that_of_the_reference(kind: str) -> None:
    np.testing.assert_allclose(
        computed(kind=KINDS[kind]), numpy_reference.activate(kind, VALUES), rtol=3e-6, atol=1.5e-6
    )


@pytest.mark.parametrize("cap", [0.7, 5.0, 50.0])
def test_a_soft_cap_is_a_scaled_tanh(cap: float) -> None:
    expected = cap * np.tanh(VALUES.astype(np.float64) / cap)
    np.testing.assert_allclose(computed(cap=cap), expected, atol=cap * 2e-7)
