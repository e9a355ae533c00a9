"""The default model with models that draft for it: itself, and copies of it with layers left out."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from onward import LLM
from onward.config import EngineConfig, WorkerConfig
from onward.models.loader.weights import open_weights
from onward.models.thinned import ThinnedTensors, all_but_every_nth, every_nth, thinned_config
from onward.offline.sampling_options import SamplingOptions
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import PreemptSlot
from onward.worker.cpu_device import CpuDevice
from onward.worker.model_runner import ModelRunner
from onward.worker.speculation.draft_model_proposer import DraftModelProposerFactory
from onward.worker.speculation.eagle_proposer import EagleProposerFactory, create_eagle_factory
from onward.worker.speculation.proposer import Proposer, ProposerContext, ProposerFactory
from tests.models.default_model import PROMPTS, default_model, driver, prompt_ids
from tests.worker.driver import GREEDY, Driver
from tests.worker.speculation.plain_eagle import random_head, write_head
from tests.worker.speculation.speculating import Spoken, speculate
from tests.worker.speculation.texts import FIFTY

full = pytest.mark.full
SAMPLED = SamplingParams(seed=2024, temperature=0.8, top_p=0.95)
BOTH = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
DRAFTERS = {"itself": range(30), "thirds": every_nth(30, 3), "most": all_but_every_nth(30, 10)}
EVERYBODY = [*DRAFTERS, "eagle"]


def _opening(kept: Sequence[int]) -> DraftModelProposerFactory:
    model = default_model("int8")
    thin = msgspec.structs.replace(model, config=thinned_config(model.config, kept))
    return DraftModelProposerFactory(thin, ThinnedTensors(open_weights(model), kept), WorkerConfig(), "a copy")


def _eagle(folder: Path) -> EagleProposerFactory:
    layer = msgspec.structs.replace(default_model("int8").config, num_layers=1)
    return create_eagle_factory(str(write_head(folder, layer, random_head(layer))), WorkerConfig())


def _drafting(drafter: ProposerFactory, max_num_seqs: int) -> Driver:
    return driver("int8", drafter=drafter, max_num_seqs=max_num_seqs, num_kv_blocks=512)


def _open(who: str, folder: Path) -> ProposerFactory:
    return _eagle(folder) if who == "eagle" else _opening(DRAFTERS[who])


@functools.cache
def _plain(texts: tuple[str, ...], num_tokens: int, sampling: SamplingParams) -> list[list[int]]:
    ours = driver("int8", max_num_seqs=len(texts), num_kv_blocks=512)
    requests = [ours.assign(i, prompt_ids(text), room=num_tokens, sampling=sampling) for i, text in enumerate(texts)]
    return ours.generate(requests, num_tokens)


def _plain_fifty(sampling: SamplingParams) -> list[list[int]]:
    return [*_plain(tuple(FIFTY[:32]), 48, sampling), *_plain(tuple(FIFTY[32:]), 48, sampling)]


def _together(ours: Driver, texts: Sequence[str], num_tokens: int, sampling: SamplingParams) -> Spoken:
    requests = [
        ours.assign(i, prompt_ids(text), room=num_tokens + 8, sampling=sampling) for i, text in enumerate(texts)
    ]
    spoken = speculate(ours, requests, num_tokens, 4)
    for request in requests:
        ours.give_back(request.block_ids)
    return spoken


def _interrupted(ours: Driver, texts: Sequence[str], num_tokens: int, sampling: SamplingParams) -> Spoken:
    """After every eighth token all lose their places, and go on in other slots, over blocks that others had."""
    prompts, told, random = [prompt_ids(text) for text in texts], Spoken([[] for _ in texts]), np.random.default_rng(3)
    for _ in range(0, num_tokens, 8):
        slots = random.permutation(len(texts)).tolist()
        requests = [
            ours.assign(slot, [*prompt, *said], room=16, sampling=sampling, num_prompt=len(prompt))
            for slot, prompt, said in zip(slots, prompts, told.outputs, strict=True)
        ]
        spoken = speculate(ours, requests, 8, 4)
        ours.step(preempt=[PreemptSlot(request.slot, request.slot_epoch) for request in requests])
        for request, said, more in zip(requests, told.outputs, spoken.outputs, strict=True):
            ours.give_back(request.block_ids)
            said += more
        told.num_drafted += spoken.num_drafted
        told.num_accepted += spoken.num_accepted
    return told


def _check_acceptance(who: str, rate: float) -> None:
    """Noise and rules are the same for both, so that at a temperature as many are right."""
    match who:
        case "itself":
            assert rate == 1.0
        case "most":
            assert 0.05 < rate < 0.9
        case _:
            assert rate < 0.1


@BOTH
@pytest.mark.parametrize("who", DRAFTERS)
def test_a_batch_says_the_same_with_drafts(who: str, sampling: SamplingParams) -> None:
    texts = tuple(PROMPTS[:4])
    spoken = _together(_drafting(_opening(DRAFTERS[who]), 4), texts, 16, sampling)
    assert spoken.outputs == _plain(texts, 16, sampling)
    _check_acceptance(who, spoken.acceptance)


@full
@BOTH
@pytest.mark.parametrize("who", EVERYBODY)
def test_fifty_prompts_say_the_same_with_drafts_alone_and_in_batches_of_32(
    tmp_path: Path, who: str, sampling: SamplingParams
) -> None:
    plain = _plain_fifty(sampling)
    alone, many = _drafting(_open(who, tmp_path), 1), _drafting(_open(who, tmp_path), 32)
    runs = [_together(alone, [text], 48, sampling) for text in FIFTY]
    batches = [_together(many, texts, 48, sampling) for texts in (FIFTY[:32], FIFTY[32:])]
    for told in (runs, batches):
        assert [output for run in told for output in run.outputs] == plain
        drafted, accepted = sum(run.num_drafted for run in told), sum(run.num_accepted for run in told)
        print(f"\n{who}, temperature {sampling.temperature}: {accepted / drafted:.3f} of {drafted} accepted")
        _check_acceptance(who, accepted / drafted)


@full
@pytest.mark.parametrize("who", EVERYBODY)
def test_fifty_prompts_say_the_same_however_often_a_batch_of_32_is_preempted(tmp_path: Path, who: str) -> None:
    ours = _drafting(_open(who, tmp_path), 32)
    runs = [_interrupted(ours, texts, 48, SAMPLED) for texts in (FIFTY[:32], FIFTY[32:])]
    assert [output for run in runs for output in run.outputs] == _plain_fifty(SAMPLED)
    drafted, accepted = sum(run.num_drafted for run in runs), sum(run.num_accepted for run in runs)
    _check_acceptance(who, accepted / drafted)


@dataclass(frozen=True, slots=True)
class _FreeOfCharge:
    """So that the engine asks for drafts that are not worth it."""

    opening: ProposerFactory
    draft_cost: float = 0.0

    @property
    def bytes_per_block(self) -> int:
        return self.opening.bytes_per_block

    def create(self, context: ProposerContext) -> Proposer:
        return self.opening.create(context)


def _answers(prompts: list[str], drafter: ProposerFactory | None, num_kv_blocks: int) -> tuple[list[list[int]], LLM]:
    model = default_model("int8")
    config = WorkerConfig(num_kv_blocks=num_kv_blocks, max_num_seqs=32)
    runner = ModelRunner(model, config, CpuDevice(model, config, open_weights(model), drafter))
    llm = LLM.from_runner(model, runner, EngineConfig(max_num_seqs=32, num_draft_tokens=0 if drafter is None else 4))
    options = [
        SamplingOptions(seed=i, temperature=0.7 * (i % 2), max_tokens=48, ignore_eos=True) for i in range(len(prompts))
    ]
    return [one.token_ids for one in llm.generate([prompt_ids(prompt) for prompt in prompts], options)], llm


@pytest.mark.parametrize("who", ["itself", *(pytest.param(who, marks=full) for who in ("thirds", "most")), "eagle"])
@pytest.mark.parametrize("prompts", [FIFTY[-6:], pytest.param(FIFTY, marks=full)], ids=["six", "fifty"])
def test_preempted_requests_are_answered_as_without_drafts(tmp_path: Path, who: str, prompts: list[str]) -> None:
    expected, _ = _answers(prompts, None, 512)
    told, llm = _answers(prompts, _FreeOfCharge(_open(who, tmp_path)), 16)
    assert told == expected
    metrics = llm._engine._core.metrics
    assert metrics.preemptions.value() > 0
    drafted, accepted, _ = metrics.drafts.totals
    assert drafted > 0
    if who == "itself":
        assert accepted == drafted, "whatever was in its blocks before"
