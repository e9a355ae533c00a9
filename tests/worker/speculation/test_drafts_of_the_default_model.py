"""The default model with models that draft for it: itself, and copies of it with layers left out."""

import functools
from collections.abc import Sequence

import msgspec
import pytest

from onward.config import WorkerConfig
from onward.models.loading import open_weights
from onward.models.thinned import ThinnedTensors, all_but_every_nth, every_nth, thinned_config
from onward.proto.sampling import Sampling
from onward.worker.speculation.draft_opening import DraftOpening
from tests.models.default_model import PROMPTS, default_model, driver, prompt_ids
from tests.worker.driver import GREEDY, Driver
from tests.worker.speculation.speculating import Spoken, speculate

SAMPLED = Sampling(seed=2024, temperature=0.8, top_p=0.95)
DRAFTERS = {"itself": range(30), "thirds": every_nth(30, 3), "most": all_but_every_nth(30, 10)}
FIFTY = [*PROMPTS, *(f"{text} Answer briefly." for text in PROMPTS), *(text.upper() for text in PROMPTS)][:50]


def _drafting(kept: Sequence[int], max_num_seqs: int) -> Driver:
    model = default_model("int8")
    thin = msgspec.structs.replace(model, config=thinned_config(model.config, kept))
    weights = ThinnedTensors(open_weights(model), kept)
    opening = DraftOpening(thin, weights, WorkerConfig(), "a copy")
    return driver("int8", drafter=opening, max_num_seqs=max_num_seqs, num_kv_blocks=512)


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
