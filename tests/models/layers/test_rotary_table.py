"""Tables of cosines and sines."""

import numpy as np

from onward.kernels import numpy_reference
from onward.models.layers.rotary_table import RotaryTable


def test_rotation_depends_on_distance_only() -> None:
    table = RotaryTable.build(10_000.0, 64, 300, None)
    cos, sin = (a.reshape(300, -1) for a in (table.cos, table.sin))
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 64), dtype=np.float32)

    def product(at: int, seen: int) -> float:
        left = numpy_reference.rotate(q, cos[at : at + 1], sin[at : at + 1])
        right = numpy_reference.rotate(k, cos[seen : seen + 1], sin[seen : seen + 1])
        return float((left * right).sum())

    np.testing.assert_allclose(product(20, 7), product(290, 277), rtol=1e-3)


def test_divisors_slow_single_frequencies_down() -> None:
    plain = RotaryTable.build(10_000.0, 8, 10, None)
    slowed = RotaryTable.build(10_000.0, 8, 10, [1.0, 1.0, 8.0, 8.0])
    plain_cos, slowed_cos = (table.cos.reshape(10, 4) for table in (plain, slowed))
    np.testing.assert_array_equal(plain_cos[:, :2], slowed_cos[:, :2])
    np.testing.assert_allclose(slowed_cos[8, 2:], plain_cos[1, 2:], rtol=1e-6)


def test_a_table_is_right_to_the_last_bit_or_nearly_so_at_every_position() -> None:
    theta, head_dim, length = 500_000.0, 128, 5_000
    table = RotaryTable.build(theta, head_dim, length, None)
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.float64(theta) ** exponents.astype(np.float64)
    frequencies = np.float32(1.0) / powers.astype(np.float32)
    angles = (np.arange(length, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    np.testing.assert_allclose(table.cos.reshape(length, -1), np.cos(angles), rtol=0, atol=2.0**-24)
    np.testing.assert_allclose(table.sin.reshape(length, -1), np.sin(angles), rtol=0, atol=2.0**-24)
