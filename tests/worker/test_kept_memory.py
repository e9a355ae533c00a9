"""A worker that starts on KV memory of an earlier one: it has the same blocks, and writes none of them before its first
step."""

import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from onward.config import WorkerConfig
from onward.errors import StartupError
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import AssignSlot, RunSlot, SlotAdvanced, SlotTokens, StepPlan
from onward.worker import cpu_device
from onward.worker.cpu_device import CpuDevice
from onward.worker.model_runner import ModelRunner
from onward.worker.speculation.proposer_factory import create_proposer_factory
from tests.worker import small_int8
from tests.worker.driver import prepared

NUM_BLOCKS = 24
CONFIG = WorkerConfig(num_kv_blocks=NUM_BLOCKS, max_num_seqs=8, max_model_len=128, max_num_batched_tokens=64)


@pytest.fixture
def memory_fd() -> Iterator[int]:
    """As the supervisor keeps it. Workers get duplicates, as over a process boundary."""
    fd = os.memfd_create("onward-kv-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)


def open_runner(memory_fd: int, config: WorkerConfig = CONFIG) -> ModelRunner:
    """Ready to run, as a worker process has it."""
    model = prepared(small_int8.CONFIG, quantization="int8")
    drafter = create_proposer_factory(config)
    runner = ModelRunner(model, config, CpuDevice(model, config, small_int8.arrays(), drafter, os.dup(memory_fd)))
    runner.warm_up(lambda message: None)
    return runner


def pages_of(runner: ModelRunner) -> np.ndarray:
    """Bytes of the memory, as (layer, block, byte of a page); the last block is the scratch block."""
    memory = runner.device.kv_memory
    assert memory is not None
    geometry = memory.pool.geometry
    return memory.pool.data.reshape(geometry.num_layers, geometry.num_blocks, geometry.page_bytes)


def fill_with_pattern(runner: ModelRunner) -> np.ndarray:
    pages = pages_of(runner)
    pages[:] = np.random.default_rng(7).integers(0, 256, pages.shape, np.uint8)
    return pages.copy()


@pytest.mark.parametrize("speculative", [None, "ngram:4"])
def test_a_second_worker_changes_no_byte_of_a_block_that_may_be_handed_out(
    memory_fd: int, speculative: str | None
) -> None:
    config = replace(CONFIG, speculative=speculative)
    first = open_runner(memory_fd, config)
    before = fill_with_pattern(first)
    second = open_runner(memory_fd, config)
    assert second.num_blocks == first.num_blocks == NUM_BLOCKS
    after = pages_of(second)
    assert np.array_equal(after[:, :NUM_BLOCKS], before[:, :NUM_BLOCKS])
    assert not np.array_equal(after[:, NUM_BLOCKS:], before[:, NUM_BLOCKS:]), "the warm-up writes the scratch block"


def test_memory_that_exists_is_not_counted_against_what_is_free(
    memory_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_runner(memory_fd)
    before = fill_with_pattern(first)
    monkeypatch.setattr(cpu_device, "free_memory_bytes", lambda: 1 << 12)
    second = open_runner(memory_fd)
    assert second.num_blocks == NUM_BLOCKS
    assert np.array_equal(pages_of(second)[:, :NUM_BLOCKS], before[:, :NUM_BLOCKS])
    other_fd = os.memfd_create("onward-kv-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with pytest.raises(StartupError, match="--num-kv-blocks"):
            open_runner(other_fd)
    finally:
        os.close(other_fd)


def test_a_pool_whose_size_was_chosen_by_free_memory_keeps_it(memory_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = WorkerConfig(max_num_seqs=8, max_model_len=128, max_num_batched_tokens=64)
    monkeypatch.setattr(cpu_device, "free_memory_bytes", lambda: 1 << 20)
    first = open_runner(memory_fd, config)
    monkeypatch.setattr(cpu_device, "free_memory_bytes", lambda: 1 << 30)
    assert open_runner(memory_fd, config).num_blocks == first.num_blocks


def test_the_scratch_block_is_none_that_the_engine_may_hand_out(memory_fd: int) -> None:
    runner = open_runner(memory_fd)
    assert runner.device.scratch_block == runner.num_blocks
    assert runner.hello("w", "e").num_blocks == NUM_BLOCKS
    assert pages_of(runner).shape[1] == NUM_BLOCKS + 1


PROMPT = [(7 * i + 3) % 97 for i in range(40)]
BLOCKS = [5, 0, 17, 9]


def assign(sampling: SamplingParams, num_computed: int) -> StepPlan:
    return StepPlan(1, assign=[AssignSlot(2, 1, "r", PROMPT, len(PROMPT), num_computed, BLOCKS, sampling)])


def run(runner: ModelRunner, num_tokens: int) -> SlotAdvanced | SlotTokens:
    [event] = runner.step(StepPlan(2, run=[RunSlot(2, 1, num_tokens)])).events
    assert isinstance(event, SlotAdvanced | SlotTokens)
    return event


@pytest.mark.parametrize("num_committed", [1, 16, 23, 39])
def test_a_second_worker_goes_on_where_the_first_was_killed(memory_fd: int, num_committed: int) -> None:
    """The first has computed more than was committed: that is written again. Tokens and prompt logprobs are the same."""
    sampling = SamplingParams(seed=0, temperature=0.0, logprobs=3, prompt_logprobs=3)
    first = open_runner(memory_fd)
    first.step(assign(sampling, 0))
    before = run(first, num_committed)
    whole = run(first, len(PROMPT) - num_committed)
    second = open_runner(memory_fd)
    second.step(assign(sampling, num_committed))
    after = run(second, len(PROMPT) - num_committed)
    assert isinstance(after, SlotTokens)
    assert after == whole
    gathered = (before.prompt_logprobs or []) + (after.prompt_logprobs or [])
    assert len(gathered) == len(PROMPT) - 1
