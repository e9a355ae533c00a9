"""What is said with drafts of a model is what is said without, token by token; and good drafts are accepted."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from onward.config import WorkerConfig
from onward.kernels.quantize import quantize_model
from onward.models.loader.eagle_head import read_eagle_head
from onward.models.thinned import ThinnedTensors, every_nth, thinned_config
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import PreemptSlot, RunSlot, SlotPreempted, SlotTokens
from onward.worker.speculation.draft_model_proposer import DraftModelProposerFactory
from onward.worker.speculation.eagle_proposer import EagleProposerFactory
from onward.worker.speculation.proposer import ProposerFactory
from tests.models.checkpoints import random_tensors
from tests.worker import small_int8
from tests.worker.driver import GREEDY, Driver, prepared
from tests.worker.speculation.plain_eagle import random_head, write_head
from tests.worker.speculation.speculating import Spoken, speculate

CONFIG = msgspec.structs.replace(small_int8.CONFIG, num_layers=3, tie_word_embeddings=False)
MODEL = prepared(CONFIG, quantization="int8")
SETTINGS: dict[str, Any] = {
    "num_kv_blocks": 64, "max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 64, "threads": 1,
}  # fmt: skip
NUM_TOKENS = 24
PROMPTS = [[(7 * i + j * j) % 97 for j in range(3 + 5 * i)] for i in range(6)]
SAMPLINGS = [
    GREEDY,
    SamplingParams(seed=71, choice_index=1, temperature=2.0, top_p=0.9),
    SamplingParams(seed=3, temperature=1.5, presence_penalty=1.5, repetition_penalty=1.3, logprobs=2),
]


@functools.cache
def _arrays(seed: int = 0) -> dict[str, np.ndarray]:
    return dict(quantize_model(CONFIG, random_tensors(CONFIG, seed)))


def _itself(config: WorkerConfig) -> ProposerFactory:
    return DraftModelProposerFactory(MODEL, _arrays(), config, "itself")


def _another(config: WorkerConfig) -> ProposerFactory:
    return DraftModelProposerFactory(MODEL, _arrays(1), config, "another")


def _thinned(config: WorkerConfig) -> ProposerFactory:
    kept = every_nth(CONFIG.num_layers, 2)
    model = msgspec.structs.replace(MODEL, config=thinned_config(CONFIG, kept))
    return DraftModelProposerFactory(model, ThinnedTensors(_arrays(), kept), config, "thinned")


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[WorkerConfig], ProposerFactory]:
    one_layer = msgspec.structs.replace(CONFIG, num_layers=1)
    folder: Path = write_head(tmp_path_factory.mktemp("eagle"), one_layer, random_head(one_layer))
    return lambda config: EagleProposerFactory(read_eagle_head(folder), config, str(folder), _arrays())


@pytest.fixture(params=["itself", "another", "thinned", "eagle"])
def drafter(request: pytest.FixtureRequest, eagle: Any) -> Callable[[WorkerConfig], ProposerFactory]:
    return {"itself": _itself, "another": _another, "thinned": _thinned, "eagle": eagle}[request.param]


def _driver(open_drafter: Callable[[WorkerConfig], ProposerFactory] | None = None) -> Driver:
    drafter = None if open_drafter is None else open_drafter(WorkerConfig(**SETTINGS))
    return Driver(MODEL, _arrays(), drafter=drafter, **SETTINGS)


@functools.cache
def _plain(sampling: SamplingParams) -> list[list[int]]:
    outputs = []
    for prompt in PROMPTS:
        driver = _driver()
        outputs += driver.generate([driver.assign(0, prompt, room=NUM_TOKENS, sampling=sampling)], NUM_TOKENS)
    return outputs


def _alone(
    open_drafter: Callable[[WorkerConfig], ProposerFactory], sampling: SamplingParams, prompt: list[int]
) -> Spoken:
    driver = _driver(open_drafter)
    return speculate(driver, [driver.assign(3, prompt, room=NUM_TOKENS + 8, sampling=sampling)], NUM_TOKENS, 4)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "penalized"])
def test_outputs_with_drafts_equal_plain_ones_alone_and_in_a_batch(
    drafter: Callable[[WorkerConfig], ProposerFactory], sampling: SamplingParams
) -> None:
    assert _alone(drafter, sampling, PROMPTS[2]).outputs == [_plain(sampling)[2]]
    driver = _driver(drafter)
    requests = [driver.assign(i, one, room=NUM_TOKENS + 8, sampling=sampling) for i, one in enumerate(PROMPTS)]
    assert speculate(driver, requests, NUM_TOKENS, 3).outputs == _plain(sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "penalized"])
def test_a_model_that_drafts_for_itself_is_always_right(sampling: SamplingParams) -> None:
    spoken = _alone(_itself, sampling, PROMPTS[4])
    assert spoken.num_drafted > 0
    assert spoken.acceptance == 1.0
    assert spoken.num_steps == -(-NUM_TOKENS // 5)


def test_a_model_that_drafts_at_random_is_mostly_wrong_and_costs_no_token() -> None:
    spoken = _alone(_another, GREEDY, PROMPTS[4])
    assert spoken.acceptance < 0.3
    assert spoken.outputs == [_plain(GREEDY)[4]]


@pytest.mark.parametrize("num_said", [1, 9])
def test_a_request_preempted_between_drafts_goes_on_in_another_slot_as_if_nothing_had_been(
    drafter: Callable[[WorkerConfig], ProposerFactory], num_said: int
) -> None:
    sampling = SAMPLINGS[1]
    driver = _driver(drafter)
    first = driver.assign(0, PROMPTS[3], room=NUM_TOKENS + 8, sampling=sampling)
    said = speculate(driver, [first], num_said, 4).outputs[0]
    [gone] = driver.step(preempt=[PreemptSlot(0, first.slot_epoch)])
    assert isinstance(gone, SlotPreempted)
    # What the slot had said beyond is lost here, as it is when a worker dies.
    tokens = [*PROMPTS[3], *said]
    driver.give_back(first.block_ids)
    again = driver.assign(5, tokens, room=NUM_TOKENS + 8, sampling=sampling, num_prompt=len(PROMPTS[3]))
    rest = speculate(driver, [again], NUM_TOKENS - num_said, 4).outputs[0]
    assert [*said, *rest] == _plain(sampling)[3]


def test_a_prefix_hit_over_blocks_that_hold_rejected_drafts_changes_no_token(
    drafter: Callable[[WorkerConfig], ProposerFactory],
) -> None:
    driver = _driver(drafter)
    first = driver.assign(0, PROMPTS[5], room=NUM_TOKENS + 8)
    said = speculate(driver, [first], NUM_TOKENS, 4).outputs[0]
    tokens = [*PROMPTS[5], *said]
    shared = (len(tokens) - 1) // 16
    second = driver.assign(
        1, tokens, blocks=first.block_ids[:shared] + driver.blocks_for(32), num_computed=16 * shared, num_prompt=28
    )
    going_on = speculate(driver, [second], 8, 4).outputs[0]
    plain = _driver()
    events = plain.step(
        assign=[request := plain.assign(0, tokens, room=8)], run=[RunSlot(0, request.slot_epoch, len(tokens))]
    )
    events += [event for _ in range(7) for event in plain.step(run=[RunSlot(0, request.slot_epoch, 1)])]
    assert going_on == [token for event in events if isinstance(event, SlotTokens) for token in event.token_ids]
