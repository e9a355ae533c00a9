"""The default model in int8: with drafts it says, token by token and bit by bit, what it says without."""

import pytest

from onward import LLM
from onward.config import EngineConfig, WorkerConfig
from onward.models.loader.weights import open_weights
from onward.offline.sampling_options import SamplingOptions
from onward.proto.sampling_params import SamplingParams
from onward.worker.cpu_device import CpuDevice
from onward.worker.model_runner import ModelRunner
from onward.worker.speculation.ngram_proposer import NgramProposerFactory
from tests.models.default_model import default_model, driver, prompt_ids
from tests.worker.driver import GREEDY, Driver
from tests.worker.speculation.drafted import generate, tokens_of
from tests.worker.speculation.proposers import Injected, right_until
from tests.worker.speculation.texts import FIFTY

SEEDED = SamplingParams(seed=5, temperature=0.8, top_p=0.95, logprobs=1)
FEW = FIFTY[20:30]
"""Most of them ask for a copy, so that guesses are right."""


def outputs(
    driver: Driver, prompts: list[str], sampling: SamplingParams, length: int, num_drafts: int, batch: int
) -> list:
    """Tokens and logprobs of each prompt, computed so many at a time."""
    told = []
    for first in range(0, len(prompts), batch):
        ids = [prompt_ids(prompt) for prompt in prompts[first : first + batch]]
        assigns = [driver.assign(slot, one, room=length + 1, sampling=sampling) for slot, one in enumerate(ids)]
        for assign, events in zip(assigns, generate(driver, assigns, length, num_drafts), strict=True):
            told.append((tokens_of(events), [one for event in events for one in event.logprobs or []]))
            driver.give_back(assign.block_ids)
    return told


def check(prompts: list[str], sampling: SamplingParams, length: int, batches: tuple[int, ...]) -> None:
    plain = outputs(driver("int8", num_kv_blocks=512), prompts, sampling, length, 0, 32)
    guessing = driver("int8", num_kv_blocks=512, drafter=NgramProposerFactory())
    for batch in batches:
        assert outputs(guessing, prompts, sampling, length, 4, batch) == plain
    for depth in (0, 2):
        known = {slot: plain[slot][0] for slot in range(len(prompts))}
        wrong = Injected(right_until(known, depth, default_model("int8").config.vocab_size))
        adversary = driver("int8", num_kv_blocks=512, drafter=wrong)
        assert outputs(adversary, prompts[:32], sampling, length, 4, 32) == plain[:32]
        assert wrong.num_drafted


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_ten_prompts_are_answered_as_without_drafts(sampling: SamplingParams) -> None:
    check(FEW, sampling, 16, (1, 10))


@pytest.mark.full
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_fifty_prompts_are_answered_as_without_drafts_alone_and_in_batches(sampling: SamplingParams) -> None:
    check(FIFTY, sampling, 32, (1, 32))


def answers(prompts: list[str], num_drafts: int, num_kv_blocks: int) -> tuple[list[list[int]], LLM]:
    """Four at a time: few enough that each of them drafts."""
    model = default_model("int8")
    config = WorkerConfig(num_kv_blocks=num_kv_blocks, max_num_seqs=4)
    runner = ModelRunner(model, config, CpuDevice(model, config, open_weights(model), NgramProposerFactory()))
    llm = LLM.from_runner(model, runner, EngineConfig(max_num_seqs=4, num_draft_tokens=num_drafts))
    options = [SamplingOptions(seed=i, temperature=0.7 * (i % 2), max_tokens=64) for i in range(len(prompts))]
    return [one.token_ids for one in llm.generate([prompt_ids(prompt) for prompt in prompts], options)], llm


@pytest.mark.parametrize("prompts", [FEW, pytest.param(FIFTY, marks=pytest.mark.full)], ids=["ten", "fifty"])
def test_preempted_requests_are_answered_as_without_drafts(prompts: list[str]) -> None:
    expected, _ = answers(prompts, 0, 512)
    told, llm = answers(prompts, 4, 11)
    assert told == expected
    metrics = llm._engine._core.metrics
    assert metrics.preemptions.value() > 0
    assert metrics.drafts.totals[1] > 0
