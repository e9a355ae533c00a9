"""A model divided among ranks on the devices of a CUDA worker, with plain operations on the host: logits and tokens are
those of one rank."""

from typing import Any

import numpy as np
import pytest

from onward.proto.model import ModelConfig
from onward.proto.sampling_params import SamplingParams
from tests.worker.batch_answers import KINDS, Answer, run_batch
from tests.worker.cuda.small_model import DeviceDriver, random_weights
from tests.worker.driver import Driver
from tests.worker.sharded_families import config_of, error, tokens
from tests.worker.shards import ShardedDeviceDriver

pytestmark = pytest.mark.usefixtures("one_thread")

LIMIT = 1e-5
LENGTH = 60
CHUNKS = ([LENGTH], [7, 16, 1, 36])
FAMILIES = ("qwen3", "llama, heads of 128", "gpt2", "gemma2", "gpt-oss")
QUICK = ["qwen3", "gpt-oss"]
SLOWER = [pytest.param(name, marks=pytest.mark.full) for name in FAMILIES if name not in QUICK]


def ranks(config: ModelConfig, num_ranks: int, **settings: Any) -> ShardedDeviceDriver:
    return ShardedDeviceDriver(config, random_weights(config), num_ranks, **settings)


@pytest.mark.parametrize("name", [*QUICK, *SLOWER])
def test_logits_of_ranks_are_those_of_one_rank_within_rounding(name: str) -> None:
    config = config_of(name)
    expected = DeviceDriver(config).logits(0, tokens(LENGTH), [LENGTH])
    for num_ranks, chunks in ((2, CHUNKS[0]), (2, CHUNKS[1]), (3, CHUNKS[1])):
        assert error(ranks(config, num_ranks).logits(1, tokens(LENGTH), chunks), expected) < LIMIT, (num_ranks, chunks)


@pytest.mark.parametrize("deterministic", [False, True])
def test_greedy_tokens_of_ranks_are_those_of_one_rank(deterministic: bool) -> None:
    config = config_of("llama, heads of 128")

    def outputs(driver: Driver) -> list[list[int]]:
        requests = [driver.assign(slot, tokens(50 - 20 * slot, slot), room=16) for slot in range(3)]
        return driver.generate(requests, 16)

    assert outputs(ranks(config, 2, deterministic=deterministic)) == outputs(DeviceDriver(config))


def test_every_kind_of_request_has_the_same_tokens_from_two_ranks() -> None:
    kinds = [kind for name, kind in KINDS.items() if name != "regex"][:7]  # which needs a tokenizer
    kinds.append(SamplingParams(seed=0, pooling="mean"))

    def answers(driver: Driver) -> list[Answer]:
        requests = [
            driver.assign(slot, tokens(30, slot), room=20, sampling=sampling) for slot, sampling in enumerate(kinds)
        ]
        return run_batch(driver, 8, requests, [13, 7], 2)

    config = config_of("qwen3")
    for ours, expected in zip(answers(ranks(config, 2)), answers(DeviceDriver(config)), strict=True):
        assert ours.token_ids == expected.token_ids
        if expected.vector is not None:
            assert error(*(np.frombuffer(one.vector or b"", "<f4") for one in (ours, expected))) < LIMIT
