"""Grammars, budgets and pooling on a real device. The oracle is the same runner with plain operations."""

from typing import Any

import numpy as np
import pytest

from onward.proto.reasoning_params import ReasoningParams
from onward.proto.sampling_params import Grammar, SamplingParams
from onward.proto.step import RunSlot, SlotAdvanced, SlotEmbedding, SlotTokens, StepPlan
from onward.sim.oracle import STRUCTURES
from tests.worker.cuda.small_model import DeviceDriver, spoken_driver
from tests.worker.cuda.test_on_device import WIDE, on_device
from tests.worker.spoken import END, PROMPT, AtOnce, InThreads, resumed, sampling, text_of

pytestmark = pytest.mark.gpu

BEGIN, STOP, LEAD = 40, 41, 10
RULE = ReasoningParams((BEGIN,), (STOP,), starts_in_reasoning=True, budget=4, forced_prefix_token_ids=(LEAD,))
OBJECT = STRUCTURES["object"].grammar
KINDS: list[SamplingParams] = [
    *(sampling(structure.grammar) for structure in STRUCTURES.values()),
    sampling(OBJECT, repetition_penalty=1.3, logprobs=2, top_p=0.9),
    sampling(None, reasoning=RULE, bad_words=((STOP,),)),
    sampling(OBJECT, reasoning=RULE, bad_words=((STOP,),)),
    sampling(None),
]


def _ops() -> Any:
    from onward.kernels.triton.triton_ops import TritonOps

    return TritonOps(max_model_len=256)


def _on_device(masks: Any = None, **settings: Any) -> DeviceDriver:
    return spoken_driver(masks, ops=_ops(), device="cuda", **settings)


def test_answers_under_rules_are_the_plain_ones() -> None:
    plain, fast = spoken_driver(AtOnce()), _on_device(AtOnce())
    for kind in KINDS:
        assert resumed(fast, kind) == resumed(plain, kind)


def test_answers_in_flight_are_those_of_single_steps() -> None:
    expected = [resumed(_on_device(AtOnce()), kind)[0] for kind in KINDS]
    driver = _on_device(InThreads(), max_num_seqs=16, num_kv_blocks=256)
    requests = [driver.assign(slot, PROMPT, room=120, sampling=kind) for slot, kind in enumerate(KINDS)]
    plans = [StepPlan(1, assign=requests, run=[RunSlot(r.slot, r.slot_epoch, len(PROMPT)) for r in requests])]
    plans += [StepPlan(n, run=[RunSlot(r.slot, r.slot_epoch, 1) for r in requests]) for n in range(2, 120)]
    found: list[list[int]] = [[] for _ in KINDS]
    ended: set[int] = set()
    for result in driver.overlapped(plans):
        for event in result.events:
            if isinstance(event, SlotTokens) and event.slot not in ended:
                assert event.position == len(found[event.slot])
                found[event.slot] += event.token_ids
                if event.grammar_done or event.token_ids[-1] == END:
                    ended.add(event.slot)
    for ours, theirs in zip(found, expected, strict=True):
        common = min(len(ours), len(theirs))
        assert common == len(theirs) or common > 50
        assert ours[:common] == theirs[:common]


def test_a_grammar_costs_no_step_where_its_masks_are_ready() -> None:
    driver = _on_device(AtOnce())
    request = driver.assign(0, PROMPT, room=120, sampling=sampling(Grammar("regex", "[a-f]{200}")))
    plans = [StepPlan(1, assign=[request], run=[RunSlot(0, request.slot_epoch, len(PROMPT))])]
    plans += [StepPlan(n, run=[RunSlot(0, request.slot_epoch, 1)]) for n in range(2, 51)]
    events = [event for result in driver.overlapped(plans) for event in result.events]
    tokens = [event.token_ids[0] for event in events if isinstance(event, SlotTokens)]
    assert len(tokens) == 50
    assert set(text_of(tokens)) <= set("abcdef")


def _embedded(driver: DeviceDriver, kind: Any, prompt: list[int], chunks: list[int]) -> np.ndarray:
    request = driver.assign(0, prompt, sampling=SamplingParams(seed=0, pooling=kind))
    driver.step(assign=[request])
    events = [event for count in chunks for event in driver.step(run=[RunSlot(0, request.slot_epoch, count)])]
    assert all(isinstance(event, SlotAdvanced) for event in events[:-1])
    assert isinstance(events[-1], SlotEmbedding)
    driver.give_back(request.block_ids)
    return np.frombuffer(events[-1].vector, "<f4")


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_vectors_are_the_plain_ones_and_do_not_depend_on_chunks(kind: str) -> None:
    prompt = [(7 * i * i + 3) % 199 for i in range(90)]
    expected, found = _embedded(DeviceDriver(), kind, prompt, [90]), _embedded(on_device(), kind, prompt, [90])
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    driver = on_device(WIDE, dtype="bfloat16", deterministic=True, max_num_batched_tokens=128)
    whole = _embedded(driver, kind, prompt, [90])
    for chunks in ([1, 63, 26], [40, 50], [1] * 20 + [70]):
        assert np.array_equal(_embedded(driver, kind, prompt, chunks), whole)
