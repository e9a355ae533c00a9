"""The parts of all ranks together are the whole model, each value once."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.models.device_support import check_supported
from onward.models.sharding.shard_plan import SHARD_UNIT, Shard, max_num_ranks, rank_config
from onward.models.sharding.sharded_tensors import ShardedTensors
from onward.models.tensor_names import expected_tensors
from onward.proto.model import Experts, ModelConfig
from tests.models.checkpoints import random_tensors, tiny_config

CONFIG = tiny_config(
    "qwen2", vocab_size=199, intermediate_size=104, num_heads=9, num_kv_heads=3, head_dim=16, o_bias=True, mlp_bias=True,
    attention_sinks=True, tie_word_embeddings=False, qk_norm=True,
)  # fmt: skip
EXPERTS = tiny_config(num_heads=6, num_kv_heads=3, experts=Experts(4, 2, 64, shared_intermediate_size=48))
BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
SUMMED_BIASES = ("o_proj.bias", "down_proj.bias")
REPLICATED = ("norm.weight", "router.weight", "expert_gate.weight")


@given(total=st.integers(0, 100_000), num_ranks=st.integers(1, 64), unit=st.sampled_from([1, 16]))
def test_shares_follow_each_other_and_differ_by_little(total: int, num_ranks: int, unit: int) -> None:
    shares = [Shard(rank, num_ranks).share(total, unit) for rank in range(num_ranks)]
    assert shares[0].start == 0 and shares[-1].stop == total
    assert all(left.stop == right.start for left, right in itertools.pairwise(shares))
    assert max(map(len, shares)) - min(map(len, shares)) < 2 * unit
    if total >= num_ranks * unit:
        assert all(shares)


def test_nine_heads_that_share_three_are_divided_unevenly_over_two_ranks() -> None:
    assert [len(Shard(rank, 2).kv_heads(CONFIG)) for rank in (0, 1)] == [1, 2]
    assert [list(Shard(rank, 2).query_heads(CONFIG)) for rank in (0, 1)] == [[0, 1, 2], [3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
def test_the_tensors_of_all_ranks_are_those_of_the_model(config: ModelConfig, num_ranks: int) -> None:
    whole, shards = random_tensors(config), [Shard(rank, num_ranks) for rank in range(num_ranks)]
    parts = [ShardedTensors(whole, config, shard) for shard in shards]
    for shard, part in zip(shards, parts, strict=True):
        small = rank_config(config, shard)
        check_supported(small, "cpu float")
        assert {name: tuple(array.shape) for name, array in part.items()} == expected_tensors(small)
    for name, array in whole.items():
        found = [part[name] for part in parts]
        if name.endswith(SUMMED_BIASES):
            joined = np.sum(found, axis=0)
        elif name.endswith(REPLICATED):
            joined = found[-1]
        else:
            joined = np.concatenate(found, axis=1 if name.endswith(BY_COLUMNS) else 0)
        np.testing.assert_array_equal(joined, array, name)


def test_each_rank_has_a_part_of_everything_up_to_the_limit() -> None:
    assert max_num_ranks(CONFIG) == 3
    assert (
        max_num_ranks(tiny_config(num_heads=8, num_kv_heads=8, intermediate_size=5 * SHARD_UNIT, vocab_size=999)) == 5
    )
    assert max_num_ranks(EXPERTS) == 3


def test_ranks_have_devices_of_their_own_only_if_there_are_enough() -> None:
    shard = Shard(2, 3)
    assert [shard.device_index(count) for count in (1, 2, 3, 8)] == [0, 0, 2, 2]
    assert [shard.ranks_per_device(count) for count in (1, 2, 3, 8)] == [3, 3, 1, 1]
