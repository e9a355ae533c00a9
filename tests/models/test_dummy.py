import numpy as np
import pytest

from onward.models.loader.dummy_weights import DummyWeights
from onward.models.tensor_names import expected_tensors
from tests.models.checkpoints import VARIANTS, tiny_config


@pytest.mark.parametrize(("architecture", "tied"), VARIANTS)
def test_every_tensor_is_there_in_its_shape(architecture: str, tied: bool) -> None:
    config = tiny_config(architecture, tie_word_embeddings=tied)
    weights = DummyWeights(config)
    assert {name: array.shape for name, array in weights.items()} == expected_tensors(config)
    assert all(array.dtype == np.float32 for array in weights.values())


def test_weights_are_the_same_every_time_and_differ_between_tensors() -> None:
    config = tiny_config()
    one, two = DummyWeights(config), DummyWeights(config)
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])
    layers = [one[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in (0, 1)]
    assert not np.array_equal(layers[0], layers[1])


def test_norms_are_near_one_so_that_activations_neither_vanish_nor_explode() -> None:
    weights = DummyWeights(tiny_config(hidden_size=512))
    assert abs(float(weights["model.norm.weight"].mean()) - 1.0) < 0.01
    assert abs(float(weights["model.embed_tokens.weight"].std()) - 0.02) < 0.002
