"""The device's runner with plain operations under grammars, budgets and pooling: it says what the CPU's runner says."""

import re
from typing import Any

import numpy as np
import pytest

from onward.proto.reasoning_params import ReasoningParams
from onward.proto.sampling_params import Grammar, SamplingParams
from onward.proto.step import (
    RunSlot,
    SlotAdvanced,
    SlotEmbedding,
    SlotEvent,
    SlotFailed,
    SlotTokens,
    StepPlan,
)
from onward.sim.oracle import STRUCTURES
from onward.worker.logits_processors.mask_executor import MaskExecutor
from tests.worker.cuda.small_model import DeviceDriver, cpu_driver, random_weights, spoken_cpu_driver, spoken_driver
from tests.worker.driver import Driver
from tests.worker.spoken import END, PROMPT, AtOnce, InThreads, output, resumed, sampling, text_of

BEGIN, STOP, LEAD = 40, 41, 10
OBJECT = STRUCTURES["object"].grammar
RULE = ReasoningParams((BEGIN,), (STOP,), starts_in_reasoning=True, budget=4, forced_prefix_token_ids=(LEAD,))
KINDS: dict[str, SamplingParams] = {
    **{name: sampling(structure.grammar) for name, structure in STRUCTURES.items()},
    "penalties": sampling(OBJECT, repetition_penalty=1.3, logprobs=2, top_p=0.9),
    "eager": sampling(STRUCTURES["open-regex"].grammar, logit_bias=((END, 100.0),), min_tokens=9),
    "budget": sampling(None, reasoning=RULE, bad_words=((STOP,),)),
    "no budget": sampling(None, reasoning=ReasoningParams((BEGIN,), (STOP,), starts_in_reasoning=True)),
    "thoughtful": sampling(OBJECT, reasoning=RULE, bad_words=((STOP,),)),
    "opened": sampling(
        OBJECT,
        reasoning=ReasoningParams((BEGIN,), (STOP,), budget=3),
        logit_bias=((BEGIN, 20.0),),
        bad_words=((STOP,),),
    ),
}


@pytest.fixture(scope="module")
def driver() -> DeviceDriver:
    return spoken_driver(AtOnce())


def test_answers_under_rules_are_the_cpus(driver: DeviceDriver) -> None:
    cpu = spoken_cpu_driver(AtOnce())
    for name, kind in KINDS.items():
        assert _short(driver, kind) == _short(cpu, kind), name


def _short(driver: Driver, kind: SamplingParams) -> tuple[list[int], bool]:
    request = driver.assign(0, PROMPT, room=30, sampling=kind)
    made = output(driver, request, max_tokens=20)
    driver.give_back(request.block_ids)
    return made


def test_an_output_that_is_gone_on_with_anywhere_is_the_same(driver: DeviceDriver) -> None:
    whole = resumed(driver, KINDS["thoughtful"])
    for position in (1, 5, 6, len(whole[0]) - 2):
        assert resumed(driver, KINDS["thoughtful"], whole[0][:position]) == whole


def _in_flight(driver: DeviceDriver, kinds: list[SamplingParams], num_steps: int, depth: int) -> list[list[int]]:
    """Each one's tokens, until it ends or that many steps are done."""
    requests = [driver.assign(slot, PROMPT, room=120, sampling=kind) for slot, kind in enumerate(kinds)]
    plans = [StepPlan(1, assign=requests, run=[RunSlot(r.slot, r.slot_epoch, len(PROMPT)) for r in requests])]
    plans += [StepPlan(n, run=[RunSlot(r.slot, r.slot_epoch, 1) for r in requests]) for n in range(2, num_steps + 1)]
    found: list[list[int]] = [[] for _ in kinds]
    ended: set[int] = set()
    for result in driver.overlapped(plans, depth):
        for event in result.events:
            if isinstance(event, SlotTokens) and event.slot not in ended:
                assert event.position == len(found[event.slot])
                found[event.slot] += event.token_ids
                if event.grammar_done or event.token_ids[-1] == END:
                    ended.add(event.slot)
    return found


@pytest.mark.parametrize(("depth", "masks"), [(2, AtOnce), (3, AtOnce), (2, InThreads)])
def test_steps_in_flight_give_the_tokens_of_single_steps(depth: int, masks: type[MaskExecutor]) -> None:
    kinds = [KINDS[name] for name in ("object", "budget", "thoughtful", "penalties")]
    kinds.append(SamplingParams(seed=3, temperature=0.8))
    expected = _in_flight(spoken_driver(AtOnce()), kinds, 16, depth=1)
    driver = spoken_driver(masks())
    found = _in_flight(driver, kinds, 20, depth)
    for ours, theirs in zip(found, expected, strict=True):
        common = min(len(ours), len(theirs))
        assert common > 4
        assert ours[:common] == theirs[:common]


def test_with_two_steps_in_flight_every_step_gives_a_token_under_a_grammar() -> None:
    found = _in_flight(spoken_driver(AtOnce()), [sampling(Grammar("regex", "[a-f]{200}"))], 30, depth=2)
    assert len(found[0]) == 30
    assert re.fullmatch("[a-f]*", text_of(found[0]))


def test_an_end_tag_that_min_tokens_forbids_is_a_fault_of_the_request_and_not_of_the_model() -> None:
    driver = spoken_driver(AtOnce())
    made = sampling(None, reasoning=RULE, min_tokens=40, end_token_ids=(END, STOP))
    [event] = driver.step(assign=[driver.assign(0, PROMPT, room=8, sampling=made)])
    assert isinstance(event, SlotFailed)
    assert event.code == "invalid_request"


def _embedded(driver: Any, kind: str, prompt: list[int], chunks: list[int]) -> tuple[list[SlotEvent], np.ndarray]:
    request = driver.assign(0, prompt, sampling=SamplingParams(seed=0, pooling=kind))
    driver.step(assign=[request])
    events = [event for count in chunks for event in driver.step(run=[RunSlot(0, request.slot_epoch, count)])]
    assert isinstance(events[-1], SlotEmbedding)
    driver.give_back(request.block_ids)
    return events, np.frombuffer(events[-1].vector, "<f4")


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_vectors_are_the_cpus_and_do_not_depend_on_chunks(kind: str) -> None:
    prompt = [(7 * i * i + 3) % 199 for i in range(50)]
    _, expected = _embedded(cpu_driver(), kind, prompt, [50])
    driver = DeviceDriver(deterministic=True)
    events, whole = _embedded(driver, kind, prompt, [50])
    assert [type(event) for event in events] == [SlotEmbedding]
    assert np.abs(whole - expected).max() <= 1e-5 * np.abs(expected).max()
    events, parts = _embedded(driver, kind, prompt, [1, 30, 19])
    assert [type(event) for event in events] == [SlotAdvanced, SlotAdvanced, SlotEmbedding]
    assert np.array_equal(parts, whole)


def test_who_wants_a_vector_shares_steps_with_who_wants_tokens() -> None:
    prompt = [(7 * i * i + 3) % 199 for i in range(40)]
    _, expected = _embedded(DeviceDriver(deterministic=True), "mean", prompt, [40])
    driver = DeviceDriver(deterministic=True)
    alone = driver.generate([driver.assign(1, PROMPT, room=4)], 3)[0]
    speaking = driver.assign(1, PROMPT, room=4)
    asking = driver.assign(0, prompt, sampling=SamplingParams(seed=0, pooling="mean"))
    driver.step(assign=[speaking, asking])
    events = driver.step(run=[RunSlot(1, speaking.slot_epoch, 7), RunSlot(0, asking.slot_epoch, 15)])
    events += driver.step(run=[RunSlot(1, speaking.slot_epoch, 1), RunSlot(0, asking.slot_epoch, 24)])
    events += driver.step(run=[RunSlot(0, asking.slot_epoch, 1), RunSlot(1, speaking.slot_epoch, 1)])
    [vector] = [np.frombuffer(event.vector, "<f4") for event in events if isinstance(event, SlotEmbedding)]
    assert np.array_equal(vector, expected)
    assert [event.token_ids[0] for event in events if isinstance(event, SlotTokens)] == alone


def test_a_mean_of_a_prompt_that_is_cached_in_part_is_refused() -> None:
    driver = DeviceDriver()
    request = driver.assign(0, PROMPT, sampling=SamplingParams(seed=0, pooling="mean"), num_computed=3)
    [event] = driver.step(assign=[request])
    assert isinstance(event, SlotFailed)
    assert event.code == "internal_error"


def test_a_vector_that_is_no_number_fails_its_request() -> None:
    weights = dict(random_weights())
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][51] = np.nan
    driver = DeviceDriver(weights=weights)
    request = driver.assign(0, [1, 51, 2], sampling=SamplingParams(seed=0, pooling="mean"))
    driver.step(assign=[request])
    [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 3)])
    assert isinstance(event, SlotFailed)
    assert event.code == "invalid_logits"
