"""The int8 product equals its plain reference bit by bit, in every weight format, on every level of the CPU and in every
height of tile."""

import gguf
import numpy as np
import pytest
from numba.np.numpy_support import carray

from onward.kernels import numpy_reference
from onward.kernels.cpu import simd
from onward.kernels.cpu.dot_instruction import supported_levels
from onward.kernels.cpu.int8_matmul_tile import int8_tile
from onward.kernels.cpu.jit import Kernel
from onward.kernels.weight_formats import FORMATS, format_of_record
from tests.kernels.block_weights import packed_blocks
from tests.kernels.kernel_runs import run

_NAMES = (
    "num_groups", "weights", "values", "scales", "totals", "corrections", "low_corrections", "together", "alone",
)  # fmt: skip
CONTEXT = np.dtype([(name, np.int64) for name in _NAMES])
OUTPUTS, INPUTS, ROWS = 32, 512, 3


def _kernel(level: str, name: str) -> Kernel:
    """All rows in one tile, and each on its own."""

    def multiply(thread, context):
        c = carray(context, 1)[0]
        n = c.num_groups
        weights, x, together, alone = simd.uint8s(c.weights), simd.int8s(c.values), c.together, c.alone
        s, t = simd.floats(c.scales), simd.floats(c.totals)
        k, low = simd.int32s(c.corrections), simd.int32s(c.low_corrections)
        int8_tile(level, name, ROWS, weights, n, x, s, t, k, low, simd.floats(together))
        for row in range(ROWS):
            at = row * n
            int8_tile(level, name, 1, weights, n, simd.shifted(x, at * 32), simd.shifted(s, at), simd.shifted(t, at),
                      simd.shifted(k, at), simd.shifted(low, at),
                      simd.shifted(simd.floats(alone), row * 32))  # fmt: skip

    return Kernel(multiply, CONTEXT)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("level", supported_levels())
def test_a_product_has_the_bits_of_its_reference_in_any_company(level: str, name: str) -> None:
    packed = packed_blocks(name, OUTPUTS, INPUTS)
    assert format_of_record(packed.shape[-1]).name == name
    x = np.random.default_rng(3).standard_normal((ROWS, INPUTS), dtype=np.float32)
    x[1, 32:64] = 0  # a group without a scale
    x[2] = np.sign(x[2])  # the largest sums there can be
    rows = numpy_reference.quantize_rows(x)
    together, alone = (np.full((ROWS, OUTPUTS), np.nan, np.float32) for _ in range(2))
    run(
        _kernel(level, name), num_groups=INPUTS // 32, weights=packed, together=together, alone=alone,
        **rows._asdict(),
    )  # fmt: skip
    expected = numpy_reference.int8_linear(packed, rows)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(together, expected)
    np.testing.assert_array_equal(alone, expected)
    weights = numpy_reference.weights(packed).astype(np.float64)
    inputs = numpy_reference.dequantize_rows(rows).astype(np.float64)
    error = np.abs(expected - inputs @ weights.T)
    assert (error <= 1e-5 * (np.abs(inputs) @ np.abs(weights).T) + 1e-35).all()


def test_the_weights_of_the_package_are_those_of_the_blocks() -> None:
    """So that the reference above is held against what others read in a file."""
    assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"} == {
        kind.name for kind in gguf.GGMLQuantizationType if kind.name in FORMATS
    }
