"""Rotary embedding, seen through what attention makes of it."""

import numpy as np

from onward.kernels import numpy_reference
from onward.models.layers.rotary_table import RotaryTable
from tests.kernels.test_attention import LENGTH, Case


def test_keys_and_queries_are_rotated_by_their_positions() -> None:
    case = Case("float32")
    table = RotaryTable.build(10_000.0, case.head_dim, LENGTH, None)
    case.cos, case.sin = (a.reshape(LENGTH, -1) for a in (table.cos, table.sin))
    q, k, v = np.split(case.qkv, [case.heads, case.heads + case.kv_heads], axis=1)
    rotated = [numpy_reference.rotate(x, case.cos, case.sin) for x in (q, k)]
    expected = numpy_reference.attention(rotated[0], rotated[1], v, 0)
    np.testing.assert_allclose(case.attend([LENGTH]), expected, atol=2e-6)
