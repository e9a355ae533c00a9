"""The int8 product equals its plain reference bit by bit, on every level of the CPU and in every height of tile."""

import gguf
import numpy as np
import pytest
from numba import carray

from onward.kernels import numpy_reference
from onward.kernels.cpu import simd
from onward.kernels.cpu.dot_instruction import supported_levels
from onward.kernels.cpu.int8_matmul_tile import int8_tile
from onward.kernels.cpu.jit import Kernel
from onward.kernels.weight_packing import BYTES_RECORD, NIBBLES_RECORD, pack
from tests.kernels.kernel_runs import run

_NAMES = ("num_groups", "weights", "values", "scales", "totals", "corrections", "together", "alone")
CONTEXT = np.dtype([(name, np.int64) for name in _NAMES])
OUTPUTS, INPUTS, ROWS = 32, 160, 3


def _kernel(level: str, is_nibbles: bool) -> Kernel:
    """All rows in one tile, and each on its own."""
    record = NIBBLES_RECORD if is_nibbles else BYTES_RECORD

    def multiply(thread, context):
        c = carray(context, 1)[0]
        n = c.num_groups
        weights, x, together, alone = simd.uint8s(c.weights), simd.int8s(c.values), c.together, c.alone
        s, t, k = simd.floats(c.scales), simd.floats(c.totals), simd.int32s(c.corrections)
        int8_tile(level, is_nibbles, ROWS, weights, 0, n * record, n, x, 0, s, t, k, 0, simd.floats(together), 0)
        for row in range(ROWS):
            int8_tile(level, is_nibbles, 1, weights, 0, n * record, n, x, row * n * 32, s, t, k, row * n,
                      simd.floats(alone), row * 32)  # fmt: skip

    return Kernel(multiply, CONTEXT)


def _weights(is_nibbles: bool) -> np.ndarray:
    values = np.random.default_rng(2).standard_normal((OUTPUTS, INPUTS), dtype=np.float32)
    if not is_nibbles:
        return values
    kind = gguf.GGMLQuantizationType.Q4_1
    return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)


@pytest.mark.parametrize("is_nibbles", [True, False], ids=["nibbles", "bytes"])
@pytest.mark.parametrize("level", supported_levels())
def test_a_product_has_the_bits_of_its_reference_in_any_company(level: str, is_nibbles: bool) -> None:
    packed = pack(_weights(is_nibbles))
    assert (packed.shape[-1] == NIBBLES_RECORD) == is_nibbles
    x = np.random.default_rng(3).standard_normal((ROWS, INPUTS), dtype=np.float32)
    x[1, 32:64] = 0  # a group without a scale
    x[2] = np.sign(x[2])  # the largest sums there can be
    rows = numpy_reference.quantize_rows(x)
    together, alone = (np.full((ROWS, OUTPUTS), np.nan, np.float32) for _ in range(2))
    run(
        _kernel(level, is_nibbles), num_groups=INPUTS // 32, weights=packed, together=together, alone=alone,
        **rows._asdict(),
    )  # fmt: skip
    expected = numpy_reference.int8_linear(packed, rows)
    np.testing.assert_array_equal(together, expected)
    np.testing.assert_array_equal(alone, expected)
    np.testing.assert_allclose(
        expected, numpy_reference.dequantize_rows(rows) @ numpy_reference.weights(packed).T, atol=1e-4
    )
