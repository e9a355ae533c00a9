"""Every family divided among two ranks, on both devices for float models, against transformers in float32."""

import numpy as np
import pytest

from onward.errors import StartupError
from onward.models.rank_limits import check_num_ranks
from tests.models import family_models
from tests.models.family_models import CASES, MAX_MODEL_LEN
from tests.worker.shards import ShardedDeviceDriver, ShardedDriver

pytestmark = pytest.mark.usefixtures("one_thread")

pytestmark = pytest.mark.full

LIMIT = 1e-4
CHUNKS = [7, 16, 1, 2, 64]
REFUSED = {"olmo2": "qk_norm_is_whole", "phi3": "at most 1 ranks"}


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_logits_of_two_ranks_are_those_of_transformers(name: str) -> None:
    model = family_models.make(name)
    check_num_ranks(2, name, model.config, "none")
    token_ids = np.random.default_rng(3).integers(0, model.config.vocab_size, sum(CHUNKS)).tolist()
    expected = model.their_logits(token_ids)
    for driver in (ShardedDriver, ShardedDeviceDriver):
        ranks = driver(model.config, model.tensors, 2, max_model_len=MAX_MODEL_LEN, max_num_seqs=64)
        error = np.abs(ranks.logits(1, token_ids, CHUNKS) - expected).max() / np.abs(expected).max()
        assert error < LIMIT, driver


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_cannot_be_divided_are_refused_by_the_reason(name: str) -> None:
    with pytest.raises(StartupError, match=REFUSED[name]):
        check_num_ranks(2, name, family_models.make(name).config, "none")
