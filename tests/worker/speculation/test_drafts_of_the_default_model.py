"""The default model with models that draft for it: itself, and copies of it with layers left out."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from onward import LLM
from onward.config import EngineConfig, WorkerConfig
from onward.models.loading import open_weights
from onward.models.thinned import ThinnedTensors, all_but_every_nth, every_nth, thinned_config
from onward.offline.sampling_options import SamplingOptions
from onward.proto.sampling import Sampling
from onward.worker.runner import Runner
from onward.worker.speculation.draft_opening import DraftOpening
from onward.worker.speculation.eagle import EagleOpening, open_eagle
from onward.worker.speculation.proposer import Proposer, ProposerOpening, Surroundings
from tests.models.default_model import PROMPTS, default_model, driver, prompt_ids
from tests.worker.driver import GREEDY, Driver
from tests.worker.speculation.plain_eagle import random_head, write_head
from tests.worker.speculation.speculating import Spoken, speculate
from tests.worker.speculation.texts import FIFTY

SAMPLED = Sampling(seed=2024, temperature=0.8, top_p=0.95)
DRAFTERS = {"itself": range(30), "thirds": every_nth(30, 3), "most": all_but_every_nth(30, 10)}


def _opening(kept: Sequence[int]) -> DraftOpening:
    model = default_model("int8")
    thin = msgspec.structs.replace(model, config=thinned_config(model.config, kept))
    return DraftOpening(thin, ThinnedTensors(open_weights(model), kept), WorkerConfig(), "a copy")


def _eagle(folder: Path) -> EagleOpening:
    layer = msgspec.structs.replace(default_model("int8").config, num_layers=1)
    return open_eagle(str(write_head(folder, layer, random_head(layer))), WorkerConfig())


def _drafting(kept: Sequence[int], max_num_seqs: int) -> Driver:
    return driver("int8", drafter=_opening(kept), max_num_seqs=max_num_seqs, num_kv_blocks=512)


@functools.cache
def _plain(texts: tuple[str, ...], num_tokens: int, sampling: Sampling) -> list[list[int]]:
    ours = driver("int8", max_num_seqs=len(texts), num_kv_blocks=512)
    requests = [ours.assign(i, prompt_ids(text), room=num_tokens, sampling=sampling) for i, text in enumerate(texts)]
    return ours.generate(requests, num_tokens)


def _together(ours: Driver, texts: Sequence[str], num_tokens: int, sampling: Sampling) -> Spoken:
    requests = [
        ours.assign(i, prompt_ids(text), room=num_tokens + 8, sampling=sampling) for i, text in enumerate(texts)
    ]
    spoken = speculate(ours, requests, num_tokens, 4)
    for request in requests:
        ours.give_back(request.block_ids)
    return spoken


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kept", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_a_batch_says_the_same_with_drafts(kept: Sequence[int], sampling: Sampling) -> None:
    texts = tuple(PROMPTS[:4])
    spoken = _together(_drafting(kept, 4), texts, 16, sampling)
    assert spoken.outputs == _plain(texts, 16, sampling)
    if len(kept) == 30:
        assert spoken.acceptance == 1.0
    elif len(kept) == 10:
        assert spoken.acceptance < 0.1
    else:
        assert 0.05 < spoken.acceptance < 0.9


@pytest.mark.full
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kept", DRAFTERS.values(), ids=DRAFTERS.keys())
def test_fifty_prompts_say_the_same_with_drafts_alone_and_in_batches_of_32(
    kept: Sequence[int], sampling: Sampling
) -> None:
    plain = [*_plain(tuple(FIFTY[:32]), 48, sampling), *_plain(tuple(FIFTY[32:]), 48, sampling)]
    alone = _drafting(kept, 1)
    assert [_together(alone, [text], 48, sampling).outputs[0] for text in FIFTY] == plain
    many = _drafting(kept, 32)
    runs = [_together(many, texts, 48, sampling) for texts in (FIFTY[:32], FIFTY[32:])]
    assert [output for run in runs for output in run.outputs] == plain
    rates = ", ".join(f"{run.acceptance:.3f}" for run in runs)
    print(f"\n{len(kept)} of 30 layers, temperature {sampling.temperature}: accepted {rates}")


@pytest.mark.full
def test_fifty_prompts_say_the_same_with_a_draft_layer_of_random_weights(tmp_path: Path) -> None:
    plain = [*_plain(tuple(FIFTY[:32]), 48, SAMPLED), *_plain(tuple(FIFTY[32:]), 48, SAMPLED)]
    many = driver("int8", drafter=_eagle(tmp_path), max_num_seqs=32, num_kv_blocks=512)
    runs = [_together(many, texts, 48, SAMPLED) for texts in (FIFTY[:32], FIFTY[32:])]
    assert [output for run in runs for output in run.outputs] == plain
    assert all(run.num_drafted for run in runs)


@dataclass(frozen=True, slots=True)
class _FreeOfCharge:
    """So that the engine asks for drafts that are not worth it."""

    opening: ProposerOpening
    draft_cost: float = 0.0

    @property
    def bytes_per_block(self) -> int:
        return self.opening.bytes_per_block

    def open(self, surroundings: Surroundings) -> Proposer:
        return self.opening.open(surroundings)


def _answers(prompts: list[str], drafter: ProposerOpening | None, num_kv_blocks: int) -> tuple[list[list[int]], LLM]:
    model = default_model("int8")
    runner = Runner(
        model, WorkerConfig(num_kv_blocks=num_kv_blocks, max_num_seqs=32), open_weights(model), None, drafter
    )
    llm = LLM.over(model, runner, EngineConfig(max_num_seqs=32, num_drafts=0 if drafter is None else 4))
    options = [
        SamplingOptions(seed=i, temperature=0.7 * (i % 2), max_tokens=48, ignore_eos=True) for i in range(len(prompts))
    ]
    return [one.token_ids for one in llm.generate([prompt_ids(prompt) for prompt in prompts], options)], llm


@pytest.mark.parametrize("who", ["itself", pytest.param("most", marks=pytest.mark.full), "eagle"])
def test_preempted_requests_are_answered_as_without_drafts(tmp_path: Path, who: str) -> None:
    prompts = FIFTY[-6:]
    expected, _ = _answers(prompts, None, 512)
    opening = _eagle(tmp_path) if who == "eagle" else _opening(DRAFTERS[who])
    told, llm = _answers(prompts, _FreeOfCharge(opening), 16)
    assert told == expected
    metrics = llm._engine._core.metrics
    assert metrics.preemptions.value() > 0
    assert metrics.drafts.totals[0] > 0
