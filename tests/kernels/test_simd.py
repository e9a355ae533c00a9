"""Vectors of sixteen lanes, and the exponential that softmax, silu and sampling share."""

import numpy as np
from numba import carray

from onward.kernels import numpy_reference
from onward.kernels.cpu import simd
from onward.kernels.cpu.jit import Kernel
from onward.kernels.cpu.quantized_rows import QuantizedActivations, quantize_group
from onward.kernels.cpu.rope import mean_square
from tests.kernels.kernel_runs import run

CONTEXT = np.dtype([("size", np.int64), ("x", np.int64), ("y", np.int64), ("z", np.int64)])


def _exp(thread, context):
    c = carray(context, 1)[0]
    for i in range(0, c.size, 16):
        simd.store(simd.floats(c.y), i, simd.exp(simd.load(simd.floats(c.x), i)))


def _folds(thread, context):
    c = carray(context, 1)[0]
    x, y = simd.floats(c.x), simd.floats(c.y)
    v = simd.load(x, 0)
    y[0] = simd.sum_lanes(v)
    y[1] = simd.max_lanes(v)
    y[2] = simd.max_lanes(simd.keep_first(v, 3, np.float32(-1e9)))
    y[3] = mean_square(x, 0, c.size)
    simd.store(y, 16, simd.fma(v, v, v) - v / v)


def test_exp_is_right_to_two_units_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 16 * 4000).astype(np.float32)
    y = np.empty_like(x)
    run(Kernel(_exp, CONTEXT), size=len(x), x=x, y=y)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(y - exact) / exact).max() < 2 * 2.0**-23


def test_exp_ends_at_zero_below_and_stays_finite_above() -> None:
    x = np.array([-np.inf, -1e30, -200, -88.5, 0, 88, 1e30, np.inf] * 2, np.float32)
    y = np.empty_like(x)
    run(Kernel(_exp, CONTEXT), size=len(x), x=x, y=y)
    assert y[:5].tolist() == [0, 0, 0, 0, 1]
    assert np.isfinite(y).all()


def test_lanes_fold_in_a_fixed_order() -> None:
    x = np.random.default_rng(0).standard_normal(64, dtype=np.float32)
    y = np.zeros(32, np.float32)
    run(Kernel(_folds, CONTEXT), size=len(x), x=x, y=y)
    total = x[:16]
    for width in (8, 4, 2, 1):
        total = total[:width] + total[width : 2 * width]
    assert y[0] == total[0]
    assert y[1] == x[:16].max() and y[2] == x[:3].max()
    np.testing.assert_allclose(y[3], (x.astype(np.float64) ** 2).mean(), rtol=1e-6)
    np.testing.assert_allclose(y[16:], x[:16] ** 2 + x[:16] - 1, atol=1e-6)


GROUP_CONTEXT = np.dtype([(name, np.int64) for name in ("size", "x", *QuantizedActivations._fields)])


def _quantize(thread, context):
    c = carray(context, 1)[0]
    x = simd.floats(c.x)
    target = QuantizedActivations(
        simd.int8s(c.values), simd.floats(c.scales), simd.floats(c.totals), simd.int32s(c.corrections),
        simd.int32s(c.low_corrections),
    )  # fmt: skip
    for group in range(c.size):
        quantize_group(simd.load(x, group * 32), simd.load(x, group * 32 + 16), target, group)


def test_rows_are_quantized_with_the_bits_of_the_reference() -> None:
    x = np.random.default_rng(4).standard_normal((5, 96), dtype=np.float32)
    x[2, 32:64] = 0
    ours = QuantizedActivations.allocate(5, 96)
    run(Kernel(_quantize, GROUP_CONTEXT), size=15, x=x, **ours._asdict())
    for mine, expected in zip(ours, numpy_reference.quantize_rows(x), strict=True):
        np.testing.assert_array_equal(mine, expected.reshape(-1))


def test_a_single_value_that_is_no_number_shows_in_its_groups_scale() -> None:
    x = np.ones((1, 96), np.float32)
    x[0, 40] = np.nan
    ours = QuantizedActivations.allocate(1, 96)
    run(Kernel(_quantize, GROUP_CONTEXT), size=3, x=x, **ours._asdict())
    assert np.isnan(ours.scales).tolist() == [False, True, False]
