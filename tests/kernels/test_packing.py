"""Packed weights stand for the right numbers, exactly where the checkpoint allows it."""

import gguf
import numpy as np
import pytest

from onward.kernels import numpy_reference
from onward.kernels.quantize import interleave_gate_up
from onward.kernels.weight_packing import BYTES_RECORD, NIBBLES_RECORD, pack


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32)


def _through_gguf(weights: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind)


def test_a_q4_1_matrix_is_packed_as_nibbles_without_any_loss() -> None:
    weights = _through_gguf(_normal(64, 96) * 0.05, gguf.GGMLQuantizationType.Q4_1)
    packed = pack(weights)
    assert packed.shape == (4, 3, NIBBLES_RECORD)
    np.testing.assert_array_equal(numpy_reference.weights(packed), weights)


def test_a_q8_0_matrix_is_packed_as_bytes_without_any_loss() -> None:
    weights = _through_gguf(_normal(64, 96) * 0.05, gguf.GGMLQuantizationType.Q8_0)
    packed = pack(weights)
    assert packed.shape == (4, 3, BYTES_RECORD)
    np.testing.assert_array_equal(numpy_reference.weights(packed), weights)


def test_any_other_matrix_is_rounded_to_a_127th_of_each_groups_largest_weight() -> None:
    weights = _normal(32, 64)
    error = np.abs(numpy_reference.weights(pack(weights)) - weights).reshape(32, 2, 32)
    largest = np.abs(weights).reshape(32, 2, 32).max(-1, keepdims=True)
    assert (error <= largest / 127 * 0.5001).all()


def test_one_weight_off_the_grid_turns_nibbles_into_bytes() -> None:
    weights = _through_gguf(_normal(32, 32) * 0.05, gguf.GGMLQuantizationType.Q4_1)
    weights[5, 7] += 1e-3
    assert pack(weights).shape[-1] == BYTES_RECORD


def test_groups_that_are_all_equal_or_all_zero_survive() -> None:
    weights = np.zeros((32, 64), np.float32)
    weights[3] = 0.25
    np.testing.assert_array_equal(numpy_reference.weights(pack(weights)), weights)


@pytest.mark.parametrize("outputs", [1, 31, 33, 301])
def test_outputs_are_padded_with_zeros_to_whole_pairs_of_tiles(outputs: int) -> None:
    weights = _normal(outputs, 32)
    unpacked = numpy_reference.weights(pack(weights))
    assert len(unpacked) % 32 == 0 and len(unpacked) >= outputs
    assert (unpacked[outputs:] == 0).all()


def test_gate_and_up_alternate_in_tiles() -> None:
    gate, up = np.full((32, 4), 1.0), np.full((32, 4), 2.0)
    assert interleave_gate_up(gate, up)[:, 0].tolist() == [1.0] * 16 + [2.0] * 16 + [1.0] * 16 + [2.0] * 16
