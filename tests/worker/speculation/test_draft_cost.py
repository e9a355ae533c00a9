"""What drafting is said to cost decides when it is done: a model as large as the served one is never worth it."""

import msgspec
import pytest

from onward.engine.request import DraftAcceptance
from onward.engine.scheduling.scheduling_policy import StepLoad, choose_num_drafts
from onward.models.thinned import every_nth, thinned_config
from onward.proto.model import ModelConfig
from onward.worker.speculation import draft_cost

SERVED = ModelConfig(
    architecture="llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=100_000.0,
    tie_word_embeddings=True,
)  # fmt: skip


def _always_right() -> DraftAcceptance:
    record = DraftAcceptance()
    for _ in range(50):
        record.record(4, 4)
    return record


def test_a_model_as_large_as_the_served_one_takes_as_long() -> None:
    assert draft_cost.of_model(SERVED, SERVED) == 1.0
    assert choose_num_drafts(4, _always_right(), StepLoad(1, 100, 1.0)) == 0


def test_of_a_third_of_the_layers_the_head_costs_most() -> None:
    cost = draft_cost.of_model(thinned_config(SERVED, every_nth(30, 3)), SERVED)
    assert cost == pytest.approx(0.474, abs=0.001)
    assert choose_num_drafts(4, _always_right(), StepLoad(1, 100, cost)) == 4
    assert choose_num_drafts(4, _always_right(), StepLoad(8, 100, cost)) == 0


def test_a_cheap_model_drafts_for_many() -> None:
    assert choose_num_drafts(4, _always_right(), StepLoad(16, 100, 0.05)) == 4


def test_a_draft_layer_costs_its_head_and_four_times_its_weights_beside_int8() -> None:
    one_layer = msgspec.structs.replace(SERVED, num_layers=1)
    costs = [draft_cost.of_float_layer(one_layer, SERVED, served_is_int8=int8) for int8 in (False, True)]
    assert costs == [pytest.approx(0.237, abs=0.001), pytest.approx(0.316, abs=0.001)]
