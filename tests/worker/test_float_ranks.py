"""A float model divided among ranks computes what one rank computes, up to the rounding of sums.

Ranks are threads that exchange tensors as processes do. `tests/e2e/test_float_ranks.py` has processes.
"""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from onward.errors import StartupError
from onward.models.sharding.rank_lost import RankLost
from onward.proto.model import ModelConfig
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import RunSlot, SlotTokens
from onward.supervisor.rank_process import spawn_ranks
from onward.worker.speculation.ngram_proposer import NgramProposerFactory
from onward.worker.tensor_parallel.shard_group import ShardGroup
from tests.worker.batch_answers import KINDS, Answer, run_batch
from tests.worker.cuda.small_model import CONFIG, random_weights
from tests.worker.driver import Driver, prepared
from tests.worker.sharded_families import FAMILIES, config_of, error, tokens
from tests.worker.shards import ShardedDriver
from tests.worker.speculation.drafted import generate, tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 90
CHUNKS = ([LENGTH], [7, 16, 1, 2, 64], [50] + [1] * 40)
LIMIT = 1e-5
NUM_TOKENS = 24


QUICK = ["qwen3", "llama, heads of 128", "gpt2", "gpt-oss"]
SLOWER = [pytest.param(name, marks=pytest.mark.full) for name in FAMILIES if name not in QUICK]


def one_rank(config: ModelConfig, **settings: Any) -> Driver:
    return Driver(prepared(config), random_weights(config), max_num_seqs=128, threads=1, **settings)


def ranks(config: ModelConfig, num_ranks: int, **settings: Any) -> ShardedDriver:
    return ShardedDriver(config, random_weights(config), num_ranks, max_num_seqs=128, **settings)


@pytest.mark.parametrize("name", [*QUICK, *SLOWER])
def test_logits_of_ranks_are_those_of_one_rank_within_rounding(name: str) -> None:
    config = config_of(name)
    expected = one_rank(config).logits(0, tokens(LENGTH), [LENGTH])
    for num_ranks in (3, 2):
        driver = ranks(config, num_ranks)
        for chunks in CHUNKS if num_ranks == 2 else CHUNKS[1:2]:
            assert error(driver.logits(1, tokens(LENGTH), chunks), expected) < LIMIT, (num_ranks, chunks)


def test_bfloat16_logits_of_ranks_are_those_of_one_rank_within_its_rounding() -> None:
    config = config_of("qwen3")
    expected = one_rank(config).logits(0, tokens(LENGTH), [LENGTH])
    ours = ranks(config, 2, dtype="bfloat16").logits(0, tokens(LENGTH), [LENGTH])
    assert LIMIT < error(ours, expected) < 0.05


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_greedy_tokens_of_ranks_are_those_of_one_rank(num_ranks: int) -> None:
    config = config_of("llama, heads of 128")

    def outputs(driver: Driver) -> list[list[int]]:
        requests = [driver.assign(slot, tokens(LENGTH - 30 * slot, slot), room=NUM_TOKENS) for slot in range(3)]
        return driver.generate(requests, NUM_TOKENS)

    assert outputs(ranks(config, num_ranks)) == outputs(one_rank(config))


def test_the_blocks_of_a_slot_that_grows_reach_all_ranks() -> None:
    config, token_ids, num_tokens = config_of("qwen3"), tokens(10), 45

    def output(driver: Driver) -> list[int]:
        """Blocks come one by one, as an engine hands them out."""
        blocks = driver.blocks_for(len(token_ids) + num_tokens)
        request = driver.assign(0, token_ids, blocks=blocks[:1])
        [event] = driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, len(token_ids))])
        found = list(event.token_ids) if isinstance(event, SlotTokens) else []
        for position in range(len(token_ids), len(token_ids) + num_tokens):
            new = [blocks[position // 16]] if position % 16 == 0 else []
            [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 1, new)])
            assert isinstance(event, SlotTokens)
            found += event.token_ids
        return found

    assert output(ranks(config, 2)) == output(one_rank(config))


def test_every_kind_of_request_has_the_same_tokens_from_two_ranks() -> None:
    kinds = [kind for name, kind in KINDS.items() if name != "regex"]  # which needs a tokenizer
    kinds += [SamplingParams(seed=0, pooling="mean"), SamplingParams(seed=0, pooling="last")]

    def answers(driver: Driver) -> list[Answer]:
        requests = [
            driver.assign(slot, tokens(40, slot), room=64, sampling=sampling) for slot, sampling in enumerate(kinds)
        ]
        return run_batch(driver, 12, requests, [13, 7], 2)

    config = config_of("qwen2")
    for ours, expected in zip(answers(ranks(config, 2)), answers(one_rank(config)), strict=True):
        assert ours.token_ids == expected.token_ids
        assert len(ours.logprobs) == len(expected.logprobs) and len(ours.of_given) == len(expected.of_given)
        if expected.vector is not None:
            vectors = (np.frombuffer(one.vector or b"", "<f4") for one in (ours, expected))
            assert error(*vectors) < LIMIT


def test_drafts_are_verified_by_all_ranks_as_by_one() -> None:
    config = config_of("qwen3")

    def outputs(driver: Driver, num_drafts: int) -> list[list[int]]:
        requests = [driver.assign(slot, tokens(8, slot) * 6, room=64) for slot in range(3)]
        return [tokens_of(events) for events in generate(driver, requests, NUM_TOKENS, num_drafts)]

    assert outputs(ranks(config, 2, drafter=NgramProposerFactory()), 4) == outputs(one_rank(config), 0)


def test_a_group_that_replaces_another_finds_the_kv_of_all_ranks() -> None:
    """KV memory outlives a group, and each rank has its own part of it."""
    config, token_ids = config_of("qwen3"), tokens(LENGTH)
    first = ranks(config, 3)
    request = first.assign(0, token_ids, room=NUM_TOKENS)
    expected = first.generate([request], NUM_TOKENS)
    second = ranks(config, 3, kv_memory_fd=os.dup(first.kv_memory_fd))
    resumed = second.assign(
        0, token_ids, sampling=request.sampling_params, blocks=request.block_ids, num_computed=LENGTH - 1
    )
    assert second.generate([resumed], NUM_TOKENS) == expected


def test_a_rank_that_cannot_load_its_part_fails_the_start_and_says_why(tmp_path: Path) -> None:
    model = msgspec.structs.replace(prepared(CONFIG), folder=str(tmp_path), weights=["missing"])
    with spawn_ranks(2) as ([rank], [fd]):
        group = ShardGroup([os.dup(fd)])
    try:
        with pytest.raises(StartupError, match=r"rank 1: cannot read .*missing"):
            ShardedDriver.of_group(model, random_weights(), group)
    finally:
        rank.discard()
    assert rank.process.returncode == -signal.SIGKILL, "a rank that has failed waits until it is killed"


@pytest.mark.full
def test_rank_0_gets_an_error_of_its_own_kind_when_another_rank_is_killed() -> None:
    with spawn_ranks(2) as ([rank], [fd]):
        group = ShardGroup([os.dup(fd)])
    driver = ShardedDriver.of_group(prepared(CONFIG), random_weights(), group)
    driver.logits(0, tokens(LENGTH), [64, 26])
    rank.discard()
    with pytest.raises(RankLost):
        driver.logits(0, tokens(LENGTH), [64, 26])


@pytest.mark.full
def test_a_rank_waits_until_it_is_killed_when_rank_0_is_gone() -> None:
    with spawn_ranks(2) as ([rank], [fd]):
        group, leader_end = ShardGroup([os.dup(fd)]), socket.socket(fileno=os.dup(fd))
    ShardedDriver.of_group(prepared(CONFIG), random_weights(), group).logits(0, tokens(LENGTH), [64, 26])
    with leader_end:
        leader_end.setblocking(True)
        leader_end.shutdown(socket.SHUT_WR)
        assert not leader_end.recv(1), "the rank has noticed the end of rank 0"
    rank.discard()
    assert rank.process.returncode == -signal.SIGKILL
