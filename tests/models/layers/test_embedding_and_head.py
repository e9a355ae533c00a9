"""A model's two ends, without what lies between them: its rows of the embedding, and its head as it is."""

import numpy as np
import pytest

from onward.kernels import numpy_reference
from onward.kernels.cpu.threads import ThreadPool
from onward.models.layers.embedding_and_head import EmbeddingAndHead, open_embedding_and_head
from onward.proto.model import ModelConfig
from tests.worker import small_int8
from tests.worker.driver import prepared

TOKENS = np.array([3, 96, 0, 41, 3], np.int32)


def _ends(config: ModelConfig, kind: str) -> tuple[EmbeddingAndHead, np.ndarray, np.ndarray]:
    """The ends, and the matrices that they stand for."""
    random = np.random.default_rng(3)
    if kind == "int8":
        arrays = small_int8.arrays(config)
        model, weights = prepared(config, quantization="int8"), dict(arrays)
        matrices = [
            numpy_reference.weights(arrays[name])[: config.vocab_size] for name in ("embed", "head") if name in arrays
        ]
    else:
        matrices = [random.standard_normal((config.vocab_size, config.hidden_size), np.float32) for _ in range(2)]
        matrices = matrices[:1] if config.tie_word_embeddings else matrices
        names = ("model.embed_tokens.weight", "lm_head.weight")
        model, weights = prepared(config), dict(zip(names, matrices, strict=False))
    return (
        open_embedding_and_head(model, weights, ThreadPool(1), max_embedded=8, max_logits=4),
        matrices[0],
        matrices[-1],
    )


@pytest.mark.parametrize("kind", ["float", "int8"])
@pytest.mark.parametrize("config", [small_int8.CONFIG, small_int8.UNTIED], ids=["tied", "untied"])
def test_embedding_and_head_are_the_models_and_nothing_else(config: ModelConfig, kind: str) -> None:
    ends, embedding, head = _ends(config, kind)
    np.testing.assert_array_equal(ends.embed(TOKENS), embedding[TOKENS])
    for size in (0.01, 1.0, 50.0):
        hidden = np.float32(size) * np.random.default_rng(1).standard_normal((3, config.hidden_size), np.float32)
        expected = hidden @ head.T
        logits = ends.logits(hidden)[:, : config.vocab_size]
        assert np.abs(logits - expected).max() < 0.03 * np.abs(expected).max()
    np.testing.assert_array_equal(ends.embed(TOKENS[:2]), embedding[TOKENS[:2]])
