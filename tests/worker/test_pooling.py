"""One vector of a prompt, from rows that come in chunks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.proto.sampling_params import Pooling
from onward.worker.embedding_pooler import EmbeddingPooler


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.sampled_from(["mean", "last"]))
def test_the_bits_do_not_depend_on_where_chunks_end(counts: list[int], kind: Pooling) -> None:
    rows = np.random.default_rng(sum(counts)).normal(size=(sum(counts), 16)).astype(np.float32)
    whole, parts = EmbeddingPooler(kind, 16), EmbeddingPooler(kind, 16)
    whole.add(rows)
    at = 0
    for count in counts:
        parts.add(rows[at : at + count])
        at += count
    assert whole.vector() == parts.vector()


@pytest.mark.parametrize(("kind", "expected"), [("mean", [2.0, 4.0]), ("last", [3.0, 6.0])])
def test_the_mean_is_of_all_rows_and_last_is_the_last(kind: Pooling, expected: list[float]) -> None:
    pool = EmbeddingPooler(kind, 2)
    pool.add(np.array([[1, 2], [2, 4], [3, 6]], np.float32))
    assert np.frombuffer(pool.vector(), "<f4").tolist() == expected
