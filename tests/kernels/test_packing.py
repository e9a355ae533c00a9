"""Packed weights stand for the right numbers, exactly where the checkpoint allows it."""

import gguf
import numpy as np
import pytest

from onward.kernels import numpy_reference
from onward.kernels.block_packing import BlockScaleError, pack_blocks
from onward.kernels.quantize import interleave_gate_up
from onward.kernels.weight_formats import BLOCK_FORMATS, FORMATS, INT8, Q4_1
from onward.kernels.weight_packing import pack
from tests.kernels.block_weights import block_size, packed_blocks, random_rows


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32)


def _through_gguf(weights: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    return gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind)


def test_a_q4_1_matrix_is_packed_as_nibbles_without_any_loss() -> None:
    weights = _through_gguf(_normal(64, 96) * 0.05, gguf.GGMLQuantizationType.Q4_1)
    packed = pack(weights)
    assert packed.shape == (4, 3, Q4_1.record_bytes)
    np.testing.assert_array_equal(numpy_reference.weights(packed), weights)


def test_a_q8_0_matrix_is_packed_as_bytes_without_any_loss() -> None:
    weights = _through_gguf(_normal(64, 96) * 0.05, gguf.GGMLQuantizationType.Q8_0)
    packed = pack(weights)
    assert packed.shape == (4, 3, INT8.record_bytes)
    np.testing.assert_array_equal(numpy_reference.weights(packed), weights)


def test_any_other_matrix_is_rounded_to_a_127th_of_each_groups_largest_weight() -> None:
    weights = _normal(32, 64)
    error = np.abs(numpy_reference.weights(pack(weights)) - weights).reshape(32, 2, 32)
    largest = np.abs(weights).reshape(32, 2, 32).max(-1, keepdims=True)
    assert (error <= largest / 127 * 0.5001).all()


def test_one_weight_off_the_grid_turns_nibbles_into_bytes() -> None:
    weights = _through_gguf(_normal(32, 32) * 0.05, gguf.GGMLQuantizationType.Q4_1)
    weights[5, 7] += 1e-3
    assert pack(weights).shape[-1] == INT8.record_bytes


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


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_stand_for_the_weights_that_the_package_reads_in_them(name: str) -> None:
    rows = random_rows(name, 40, 512)
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[name]).reshape(40, 512)
    unpacked = numpy_reference.weights(packed_blocks(name, 40, 512))
    np.testing.assert_array_equal(unpacked[:40], expected)
    assert len(unpacked) == 64 and not unpacked[40:].any()


@pytest.mark.parametrize("name", FORMATS)
def test_packed_blocks_take_little_more_memory_than_the_file(name: str) -> None:
    num_weights, num_bytes = block_size(name)
    assert packed_blocks(name, 64, 512).nbytes <= 1.04 * 64 * 512 // num_weights * num_bytes


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q6_K"])
def test_a_scale_that_is_not_finite_is_refused(name: str) -> None:
    rows = random_rows(name, 32, 256)
    at = {"Q4_0": 0, "Q5_1": 2, "Q6_K": 208}[name]
    rows[7, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(BlockScaleError, match=r"blk\.0\.w .*not finite"):
        pack_blocks(name, rows, "blk.0.w")
