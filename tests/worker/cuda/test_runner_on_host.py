"""The device's runner with plain operations, on the host: it answers plans as the CPU's runner does, and in flight too."""

from typing import Any

import numpy as np
import pytest

from onward.proto.sampling_params import SamplingParams
from onward.proto.step import (
    AssignSlot,
    PreemptSlot,
    RunSlot,
    SlotAdvanced,
    SlotFailed,
    SlotPreempted,
    SlotTokens,
    StepPlan,
)
from tests.worker.cuda.small_model import CONFIG, DeviceDriver, cpu_driver, random_weights
from tests.worker.driver import GREEDY, Driver

PROMPT = [5, 9, 11, 2, 60, 33, 8]
PROMPTS = [[(7 * i + j * j) % 199 for j in range(3 + 9 * i)] for i in range(6)]


def _tokens(driver: Driver, count: int, prompt: list[int] = PROMPT, sampling: SamplingParams = GREEDY) -> list[int]:
    return driver.generate([driver.assign(0, prompt, room=count, sampling=sampling)], count)[0]


def test_batches_of_any_size_give_the_cpus_tokens() -> None:
    cpu = cpu_driver()
    expected = cpu.generate([cpu.assign(i, prompt, room=12) for i, prompt in enumerate(PROMPTS)], 12)
    for count in (1, 2, 6):
        driver = DeviceDriver()
        requests = [driver.assign(i, PROMPTS[i], room=12) for i in range(count)]
        assert driver.generate(requests, 12) == expected[:count]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=3, temperature=0.8),
        SamplingParams(seed=2**63 + 5, choice_index=2, temperature=1.0, top_k=20, top_p=0.9, min_p=0.01),
        SamplingParams(seed=4, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        SamplingParams(seed=5, logit_bias=((3, 4.0), (8, -100.0)), bad_words=((5,), (7, 9))),
        SamplingParams(seed=6, temperature=0.0, bad_words=((167, 167), (191, 3, 4))),
        SamplingParams(seed=7, min_tokens=6, end_token_ids=tuple(range(0, 199, 2))),
    ],
    ids=["plain", "cuts", "penalties", "words", "runs", "ends"],
)
def test_every_way_of_sampling_draws_the_cpus_tokens(sampling: SamplingParams) -> None:
    assert _tokens(DeviceDriver(), 16, PROMPTS[3], sampling) == _tokens(cpu_driver(), 16, PROMPTS[3], sampling)


def test_logprobs_of_prompt_and_output_are_the_cpus() -> None:
    sampling = SamplingParams(seed=6, temperature=0.7, logprobs=3, prompt_logprobs=2)
    told = []
    for driver in (cpu_driver(), DeviceDriver()):
        request = driver.assign(0, PROMPTS[2], room=4, sampling=sampling)
        events = driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, 8)])
        events += driver.step(run=[RunSlot(0, request.slot_epoch, 50)])
        events += driver.step(run=[RunSlot(0, request.slot_epoch, 1)])
        told.append(
            [one for e in events for one in [*(e.prompt_logprobs or []), *(getattr(e, "logprobs", None) or [])]]
        )
    assert len(told[0]) == len(told[1]) == len(PROMPTS[2]) - 1 + 2
    for theirs, ours in zip(*told, strict=True):
        assert (ours.rank, [t for t, _ in ours.top]) == (theirs.rank, [t for t, _ in theirs.top])
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_given_tokens_are_scored_again_where_that_is_asked_for() -> None:
    told = []
    for driver in (cpu_driver(), DeviceDriver()):
        sampling = SamplingParams(seed=1, temperature=0.0, logprobs=1)
        fields = driver.assign(0, PROMPTS[2], room=4, sampling=sampling, num_prompt=10)
        request = AssignSlot(**{f: getattr(fields, f) for f in AssignSlot.__struct_fields__} | {"rescore_from": 15})
        driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, 14)])
        (event,) = driver.step(run=[RunSlot(0, request.slot_epoch, 50)])
        assert isinstance(event, SlotTokens) and event.prompt_logprobs is not None
        told.append([one.rank for one in event.prompt_logprobs])
    assert told[0] == told[1]
    assert len(told[0]) == len(PROMPTS[2]) - 15


def test_rows_with_and_without_rules_share_a_step() -> None:
    kinds = [GREEDY, SamplingParams(seed=2, repetition_penalty=1.4, logprobs=1), SamplingParams(seed=3, top_k=7)]
    alone = [_tokens(DeviceDriver(), 8, PROMPTS[i], kinds[i]) for i in range(3)]
    driver = DeviceDriver()
    requests = [driver.assign(i, PROMPTS[i], room=8, sampling=kinds[i]) for i in range(3)]
    assert driver.generate(requests, 8) == alone


@pytest.mark.parametrize("depth", [2, 4])
def test_steps_in_flight_give_the_tokens_of_single_steps(depth: int) -> None:
    expected = [_tokens(DeviceDriver(), 20, prompt) for prompt in PROMPTS[:3]]
    driver = DeviceDriver()
    requests = [driver.assign(i, PROMPTS[i], room=0) for i in range(3)]
    plans = [StepPlan(1, assign=requests, run=[RunSlot(r.slot, r.slot_epoch, len(r.token_ids)) for r in requests])]
    room = [len(r.block_ids) * 16 for r in requests]
    lengths = [len(r.token_ids) for r in requests]
    for number in range(2, 21):
        runs = []
        for i, request in enumerate(requests):
            lengths[i] += 1
            grows = lengths[i] > room[i]
            room[i] += 16 * grows
            runs.append(RunSlot(request.slot, request.slot_epoch, 1, driver.blocks_for(1) if grows else []))
        plans.append(StepPlan(number, run=runs))
    found: dict[int, list[int]] = {i: [] for i in range(3)}
    for number, result in enumerate(driver.overlapped(plans, depth), 1):
        assert result.step == number
        for event in result.events:
            assert isinstance(event, SlotTokens)
            found[event.slot] += event.token_ids
    assert [found[i] for i in range(3)] == expected


def test_an_unfinished_prefill_advances_and_its_end_gives_a_token() -> None:
    driver = DeviceDriver()
    request = driver.assign(3, PROMPT, room=1)
    assert driver.step(assign=[request], run=[RunSlot(3, request.slot_epoch, 4)]) == [
        SlotAdvanced(3, request.slot_epoch, 4)
    ]
    assert driver.step(run=[RunSlot(3, request.slot_epoch, 9)]) == [
        SlotTokens(3, request.slot_epoch, 0, 7, _tokens(DeviceDriver(), 1))
    ]


def test_a_preempt_behind_steps_in_flight_tells_the_length_that_they_lead_to() -> None:
    driver = DeviceDriver()
    request = driver.assign(2, PROMPT, room=4)
    run = [RunSlot(2, request.slot_epoch, 1)]
    plans = [StepPlan(1, assign=[request], run=[RunSlot(2, request.slot_epoch, 7)]), StepPlan(2, run=run)]
    plans.append(StepPlan(3, preempt=[PreemptSlot(2, request.slot_epoch)], run=run))
    results = driver.overlapped(plans, depth=3)
    assert [type(event) for result in results for event in result.events] == [SlotTokens, SlotTokens, SlotPreempted]
    assert results[2].events == [SlotPreempted(2, request.slot_epoch, 9)]
    assert driver.step(preempt=[PreemptSlot(2, request.slot_epoch)]) == [SlotPreempted(2, request.slot_epoch, 0)]


def test_a_slot_is_given_on_while_its_last_owners_step_is_in_flight() -> None:
    driver = DeviceDriver()
    old, new = driver.assign(0, PROMPT, room=2), driver.assign(0, PROMPTS[1], room=2)
    plans = [StepPlan(1, assign=[old], run=[RunSlot(0, old.slot_epoch, 7)])]
    plans.append(StepPlan(2, assign=[new], run=[RunSlot(0, new.slot_epoch, 50), RunSlot(0, old.slot_epoch, 1)]))
    first, second = driver.overlapped(plans)
    assert [(e.slot_epoch, e.token_ids) for e in first.events if isinstance(e, SlotTokens)] == [
        (old.slot_epoch, _tokens(DeviceDriver(), 1))
    ]
    assert [(e.slot_epoch, e.token_ids) for e in second.events if isinstance(e, SlotTokens)] == [
        (new.slot_epoch, _tokens(DeviceDriver(), 1, PROMPTS[1]))
    ]


def test_logits_that_are_no_numbers_fail_their_request_and_void_what_it_has_in_flight() -> None:
    weights = dict(random_weights())
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][51] = np.nan
    driver = DeviceDriver(weights=weights)
    bad, good = driver.assign(0, [1, 51, 2], room=3), driver.assign(1, PROMPT, room=3)
    runs = [RunSlot(0, bad.slot_epoch, 1), RunSlot(1, good.slot_epoch, 1)]
    plans = [StepPlan(1, assign=[bad, good], run=[RunSlot(0, bad.slot_epoch, 3), RunSlot(1, good.slot_epoch, 7)])]
    plans += [StepPlan(2, run=runs), StepPlan(3, run=runs)]
    told = [[(type(e), e.slot) for e in result.events] for result in driver.overlapped(plans, depth=3)]
    assert sorted(told[0], key=lambda one: one[1]) == [(SlotFailed, 0), (SlotTokens, 1)]
    assert told[1:] == [[(SlotTokens, 1)], [(SlotTokens, 1)]]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"token_ids": [5, 199]}, "invalid_request"),
        ({"token_ids": [-1]}, "invalid_request"),
        ({"token_ids": [1] * 257}, "invalid_request"),
        ({"token_ids": []}, "invalid_request"),
        ({"num_computed": 7}, "internal_error"),
        ({"block_ids": [64]}, "internal_error"),
        ({"block_ids": list(range(17))}, "internal_error"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_assigned_fails_alone(change: dict[str, Any], code: str) -> None:
    driver = DeviceDriver()
    good = driver.assign(0, PROMPT, room=1)
    fields = {f: getattr(good, f) for f in AssignSlot.__struct_fields__} | {"slot": 1, "slot_epoch": 99} | change
    events = driver.step(assign=[AssignSlot(**fields), good], run=[RunSlot(1, 99, 5), RunSlot(0, good.slot_epoch, 7)])
    assert [(type(e), e.slot, e.slot_epoch) for e in events] == [(SlotFailed, 1, 99), (SlotTokens, 0, good.slot_epoch)]
    assert isinstance(events[0], SlotFailed) and events[0].code == code
    assert driver.step(run=[RunSlot(1, 99, 5)]) == []


def test_running_past_the_slots_blocks_fails_that_slot_only() -> None:
    driver = DeviceDriver()
    long, good = driver.assign(0, PROMPT * 4, blocks=driver.blocks_for(16)), driver.assign(1, PROMPT, room=1)
    events = driver.step(assign=[long, good], run=[RunSlot(0, long.slot_epoch, 28), RunSlot(1, good.slot_epoch, 7)])
    assert [(type(e), e.slot) for e in events] == [(SlotFailed, 0), (SlotTokens, 1)]


def test_every_plan_is_answered_also_an_empty_one() -> None:
    driver = DeviceDriver()
    assert driver.runner.step(StepPlan(77)).step == 77
    assert driver.runner.finish() is None


def test_warming_up_leaves_no_trace() -> None:
    driver = DeviceDriver()
    said: list[str] = []
    driver.runner.warm_up(said.append)
    driver.rehearse()
    assert said
    assert _tokens(driver, 5) == _tokens(DeviceDriver(), 5)


def test_a_deterministic_runner_gives_the_same_tokens_as_any() -> None:
    driver = DeviceDriver(deterministic=True)
    requests = [driver.assign(i, prompt, room=8) for i, prompt in enumerate(PROMPTS)]
    cpu = cpu_driver()
    assert driver.generate(requests, 8) == cpu.generate([cpu.assign(i, p, room=8) for i, p in enumerate(PROMPTS)], 8)


def test_fp8_weights_change_the_logits_a_little() -> None:
    wide, narrow = DeviceDriver(), DeviceDriver(quantization="fp8")
    expected, found = wide.logits(0, PROMPTS[4], [39]), narrow.logits(0, PROMPTS[4], [39])
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    assert 0.005 < error < 0.3


def test_hello_names_no_kv_that_a_peer_could_write() -> None:
    hello = DeviceDriver().runner.hello("w1", "e1")
    assert (hello.num_blocks, hello.block_size, hello.max_model_len, hello.vocab_size) == (
        64,
        16,
        256,
        CONFIG.vocab_size,
    )
    assert (hello.kv_layout, hello.kv_endpoint) == (None, None)
