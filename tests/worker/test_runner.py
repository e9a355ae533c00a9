"""What a runner does with plans, on every device: which slots run, what is answered, and which request a fault fails."""

import subprocess
import sys

import pytest

from onward.proto import SCHEMA_VERSION
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
    StepResult,
)
from tests.worker.devices import DEVICES, NewDriver
from tests.worker.devices import new_driver as driver_of
from tests.worker.driver import GREEDY, Driver

PROMPT = [5, 9, 11, 2, 60, 33, 8]
PROMPTS = [[(7 * i + j * j) % 199 for j in range(3 + 9 * i)] for i in range(6)]


@pytest.fixture(params=DEVICES)
def new_driver(request: pytest.FixtureRequest) -> NewDriver:
    return driver_of(request.param)


def _first_tokens(new_driver: NewDriver, count: int, prompt: list[int] = PROMPT) -> list[int]:
    driver = new_driver()
    return driver.generate([driver.assign(0, prompt, room=count)], count)[0]


def test_an_unfinished_prefill_advances_and_its_end_gives_a_token(new_driver: NewDriver) -> None:
    driver = new_driver()
    request = driver.assign(3, PROMPT, room=1)
    assert driver.step(assign=[request], run=[RunSlot(3, request.slot_epoch, 4)]) == [
        SlotAdvanced(3, request.slot_epoch, 4)
    ]
    token = _first_tokens(new_driver, 1)
    assert driver.step(run=[RunSlot(3, request.slot_epoch, 9)]) == [SlotTokens(3, request.slot_epoch, 0, 7, token)]


def test_a_plan_made_before_the_last_token_was_known_goes_on_from_it(new_driver: NewDriver) -> None:
    driver = new_driver()
    request = driver.assign(0, PROMPT, room=3)
    plans = [StepPlan(1, assign=[request], run=[RunSlot(0, request.slot_epoch, 7)])]
    plans += [StepPlan(n, run=[RunSlot(0, request.slot_epoch, 1)]) for n in (2, 3)]
    results = [driver.runner.step(plan) for plan in plans]
    expected = [
        SlotTokens(0, request.slot_epoch, n, 7 + n, [token]) for n, token in enumerate(_first_tokens(new_driver, 3))
    ]
    assert [result.events for result in results] == [[event] for event in expected]


def test_a_resumed_request_continues_at_its_own_position(new_driver: NewDriver) -> None:
    tokens = _first_tokens(new_driver, 6)
    driver = new_driver()
    request = driver.assign(1, PROMPT + tokens[:4], room=2, num_prompt=len(PROMPT))
    events = driver.step(assign=[request], run=[RunSlot(1, request.slot_epoch, 11)])
    assert events == [SlotTokens(1, request.slot_epoch, 4, 11, [tokens[4]])]


def test_every_plan_is_answered_also_an_empty_one(new_driver: NewDriver) -> None:
    result = new_driver().runner.step(StepPlan(77))
    assert isinstance(result, StepResult)
    assert (result.step, result.events) == (77, [])


def test_a_run_of_another_epoch_is_ignored(new_driver: NewDriver) -> None:
    driver = new_driver()
    request = driver.assign(0, PROMPT, room=1)
    driver.step(assign=[request])
    assert driver.step(run=[RunSlot(0, request.slot_epoch + 1, 7), RunSlot(1, request.slot_epoch, 7)]) == []
    assert len(driver.step(run=[RunSlot(0, request.slot_epoch, 7)])) == 1


def test_preempted_is_answered_with_the_length_of_the_list_and_ends_the_epoch(new_driver: NewDriver) -> None:
    driver = new_driver()
    request = driver.assign(2, PROMPT, room=2)
    driver.step(assign=[request], run=[RunSlot(2, request.slot_epoch, 7)])
    preempt = PreemptSlot(2, request.slot_epoch)
    assert driver.step(preempt=[preempt], run=[RunSlot(2, request.slot_epoch, 1)]) == [
        SlotPreempted(2, request.slot_epoch, 8)
    ]
    assert driver.step(preempt=[preempt]) == [SlotPreempted(2, request.slot_epoch, 0)]


def test_a_preempt_of_an_older_epoch_leaves_the_slots_new_owner_alone(new_driver: NewDriver) -> None:
    driver = new_driver()
    old, new = driver.assign(0, PROMPT), driver.assign(0, PROMPT, room=1)
    driver.step(assign=[old])
    driver.step(assign=[new])
    events = driver.step(preempt=[PreemptSlot(0, old.slot_epoch)], run=[RunSlot(0, new.slot_epoch, 7)])
    assert [type(event) for event in events] == [SlotPreempted, SlotTokens]


def test_preempt_and_assign_of_one_plan_happen_in_this_order(new_driver: NewDriver) -> None:
    driver = new_driver()
    old, new = driver.assign(0, PROMPT), driver.assign(1, PROMPT, room=1)
    driver.step(assign=[old])
    events = driver.step(
        preempt=[PreemptSlot(0, old.slot_epoch)], assign=[new], run=[RunSlot(1, new.slot_epoch, 7)]
    )  # the result lists them in the same order
    assert events == [
        SlotPreempted(0, old.slot_epoch, 7),
        SlotTokens(1, new.slot_epoch, 0, 7, _first_tokens(new_driver, 1)),
    ]


def test_a_prefix_hit_skips_what_is_computed_and_changes_no_token(new_driver: NewDriver) -> None:
    driver = new_driver()
    prompt = (PROMPT * 6)[:40]
    first = driver.assign(0, prompt, room=4)
    tokens = driver.generate([first], 4)[0]
    own = driver.blocks_for(12)
    second = driver.assign(5, prompt, blocks=first.block_ids[:2] + own, num_computed=32)
    assert driver.generate([second], 4)[0] == tokens


def test_new_blocks_extend_the_table(new_driver: NewDriver) -> None:
    driver = new_driver()
    prompt = (PROMPT * 3)[:16]
    expected = _first_tokens(new_driver, 3, prompt)
    request = driver.assign(0, prompt)
    assert len(request.block_ids) == 1
    events = driver.step(assign=[request], run=[RunSlot(0, request.slot_epoch, 16)])
    events += driver.step(run=[RunSlot(0, request.slot_epoch, 1, driver.blocks_for(1))])
    events += driver.step(run=[RunSlot(0, request.slot_epoch, 1)])
    assert [event.token_ids[0] for event in events if isinstance(event, SlotTokens)] == expected


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
def test_a_request_that_cannot_be_assigned_fails_alone(new_driver: NewDriver, change: dict, code: str) -> None:
    driver = new_driver()
    good = driver.assign(0, PROMPT, room=1)
    fields = {f: getattr(good, f) for f in AssignSlot.__struct_fields__} | {"slot": 1, "slot_epoch": 99} | change
    runs = [RunSlot(1, 99, 5), RunSlot(0, good.slot_epoch, 7)]
    events = driver.step(assign=[AssignSlot(**fields), good], run=runs)
    assert [(type(e), e.slot, e.slot_epoch) for e in events] == [(SlotFailed, 1, 99), (SlotTokens, 0, good.slot_epoch)]
    assert isinstance(events[0], SlotFailed) and events[0].code == code
    assert driver.step(run=[RunSlot(1, 99, 5)]) == []


def test_running_past_the_slots_blocks_fails_that_slot_only(new_driver: NewDriver) -> None:
    driver = new_driver()
    long, good = driver.assign(0, PROMPT * 4, blocks=driver.blocks_for(16)), driver.assign(1, PROMPT, room=1)
    events = driver.step(assign=[long, good], run=[RunSlot(0, long.slot_epoch, 28), RunSlot(1, good.slot_epoch, 7)])
    assert [(type(e), e.slot) for e in events] == [(SlotFailed, 0), (SlotTokens, 1)]


def test_logits_that_are_no_numbers_fail_their_own_request_only(new_driver: NewDriver) -> None:
    driver = new_driver(nan_token=50)
    bad, good = driver.assign(0, [1, 50, 2], room=1), driver.assign(1, PROMPT, room=1)
    runs = [RunSlot(0, bad.slot_epoch, 3), RunSlot(1, good.slot_epoch, 7)]
    events = sorted(driver.step(assign=[bad, good], run=runs), key=lambda event: event.slot)
    assert [(type(e), e.slot) for e in events] == [(SlotFailed, 0), (SlotTokens, 1)]
    assert isinstance(events[0], SlotFailed) and events[0].code == "invalid_logits"
    assert driver.step(run=[RunSlot(0, bad.slot_epoch, 1)]) == []
    # What the failed request left in its blocks must not reach the next owner of them.
    heir = driver.assign(0, PROMPT, blocks=bad.block_ids)
    assert driver.step(assign=[heir], run=[RunSlot(0, heir.slot_epoch, 7)])[0] == SlotTokens(
        0, heir.slot_epoch, 0, 7, events[1].token_ids
    )


def test_a_request_that_forbids_every_token_fails_as_its_own_fault(new_driver: NewDriver) -> None:
    driver = new_driver()
    sampling = SamplingParams(seed=1, temperature=0.0, allowed_token_ids=(5,), bad_words=((5,),))
    bad, good = driver.assign(0, PROMPT, room=1, sampling=sampling), driver.assign(1, PROMPT, room=1)
    runs = [RunSlot(0, bad.slot_epoch, 7), RunSlot(1, good.slot_epoch, 7)]
    failed, other = sorted(driver.step(assign=[bad, good], run=runs), key=lambda event: event.slot)
    assert isinstance(failed, SlotFailed) and isinstance(other, SlotTokens)
    assert failed.code == "no_token_allowed"
    assert "allowed_token_ids" in failed.message and "grammar" not in failed.message


def test_sampling_is_the_same_after_a_resume_as_without_one(new_driver: NewDriver) -> None:
    sampling = SamplingParams(seed=1234, choice_index=2, temperature=3.0, top_p=0.95)
    driver = new_driver()
    whole = driver.generate([driver.assign(0, PROMPT, room=12, sampling=sampling)], 12)[0]
    for cut in (1, 5, 11):
        again = new_driver()
        request = again.assign(6, PROMPT + whole[:cut], room=12, sampling=sampling, num_prompt=len(PROMPT))
        assert _resume(again, request, 12 - cut) == whole[cut:]


def _resume(driver: Driver, request: AssignSlot, count: int) -> list[int]:
    events = driver.step(assign=[request], run=[RunSlot(request.slot, request.slot_epoch, len(request.token_ids))])
    for _ in range(count - 1):
        events += driver.step(run=[RunSlot(request.slot, request.slot_epoch, 1)])
    return [event.token_ids[0] for event in events if isinstance(event, SlotTokens)]


def _tokens(driver: Driver, count: int, prompt: list[int] = PROMPT, sampling: SamplingParams = GREEDY) -> list[int]:
    return driver.generate([driver.assign(0, prompt, room=count, sampling=sampling)], count)[0]


@pytest.mark.parametrize("depth", [2, 4])
def test_steps_in_flight_give_the_tokens_of_single_steps(new_driver: NewDriver, depth: int) -> None:
    expected = [_tokens(new_driver(), 20, prompt) for prompt in PROMPTS[:3]]
    driver = new_driver()
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


def test_a_preempt_behind_steps_in_flight_tells_the_length_that_they_lead_to(new_driver: NewDriver) -> None:
    driver = new_driver()
    request = driver.assign(2, PROMPT, room=4)
    run = [RunSlot(2, request.slot_epoch, 1)]
    plans = [StepPlan(1, assign=[request], run=[RunSlot(2, request.slot_epoch, 7)]), StepPlan(2, run=run)]
    plans.append(StepPlan(3, preempt=[PreemptSlot(2, request.slot_epoch)], run=run))
    results = driver.overlapped(plans, depth=3)
    assert [type(event) for result in results for event in result.events] == [SlotTokens, SlotTokens, SlotPreempted]
    assert results[2].events == [SlotPreempted(2, request.slot_epoch, 9)]
    assert driver.step(preempt=[PreemptSlot(2, request.slot_epoch)]) == [SlotPreempted(2, request.slot_epoch, 0)]


def test_a_slot_is_given_on_while_its_last_owners_step_is_in_flight(new_driver: NewDriver) -> None:
    driver = new_driver()
    old, new = driver.assign(0, PROMPT, room=2), driver.assign(0, PROMPTS[1], room=2)
    plans = [StepPlan(1, assign=[old], run=[RunSlot(0, old.slot_epoch, 7)])]
    plans.append(StepPlan(2, assign=[new], run=[RunSlot(0, new.slot_epoch, 50), RunSlot(0, old.slot_epoch, 1)]))
    first, second = driver.overlapped(plans)
    assert [(e.slot_epoch, e.token_ids) for e in first.events if isinstance(e, SlotTokens)] == [
        (old.slot_epoch, _tokens(new_driver(), 1))
    ]
    assert [(e.slot_epoch, e.token_ids) for e in second.events if isinstance(e, SlotTokens)] == [
        (new.slot_epoch, _tokens(new_driver(), 1, PROMPTS[1]))
    ]


def test_logits_that_are_no_numbers_fail_their_request_and_void_what_it_has_in_flight(new_driver: NewDriver) -> None:
    driver = new_driver(nan_token=51)
    bad, good = driver.assign(0, [1, 51, 2], room=3), driver.assign(1, PROMPT, room=3)
    runs = [RunSlot(0, bad.slot_epoch, 1), RunSlot(1, good.slot_epoch, 1)]
    plans = [StepPlan(1, assign=[bad, good], run=[RunSlot(0, bad.slot_epoch, 3), RunSlot(1, good.slot_epoch, 7)])]
    plans += [StepPlan(2, run=runs), StepPlan(3, run=runs)]
    told = [[(type(e), e.slot) for e in result.events] for result in driver.overlapped(plans, depth=3)]
    assert sorted(told[0], key=lambda one: one[1]) == [(SlotFailed, 0), (SlotTokens, 1)]
    assert told[1:] == [[(SlotTokens, 1)], [(SlotTokens, 1)]]


def test_rows_with_and_without_rules_share_a_step(new_driver: NewDriver) -> None:
    kinds = [GREEDY, SamplingParams(seed=2, repetition_penalty=1.4, logprobs=1), SamplingParams(seed=3, top_k=7)]
    alone = [_tokens(new_driver(), 8, PROMPTS[i], kinds[i]) for i in range(3)]
    driver = new_driver()
    requests = [driver.assign(i, PROMPTS[i], room=8, sampling=kinds[i]) for i in range(3)]
    assert driver.generate(requests, 8) == alone


def test_hello_says_what_the_engine_must_know(new_driver: NewDriver) -> None:
    hello = new_driver().runner.hello("w1", "e1")
    assert (hello.schema_version, hello.worker_incarnation, hello.engine_incarnation) == (SCHEMA_VERSION, "w1", "e1")
    assert (hello.num_blocks, hello.block_size, hello.max_model_len, hello.vocab_size) == (64, 16, 256, 199)


def test_warming_up_leaves_no_trace(new_driver: NewDriver) -> None:
    driver = new_driver()
    said: list[str] = []
    driver.runner.warm_up(said.append)
    assert said
    assert driver.step(run=[RunSlot(0, 0, 1)]) == []
    assert driver.generate([driver.assign(0, PROMPT, room=5)], 5)[0] == _first_tokens(new_driver, 5)


def test_batches_of_any_size_give_each_request_its_own_tokens(new_driver: NewDriver) -> None:
    prompts = [[(7 * i + j) % 97 for j in range(3 + 5 * i)] for i in range(8)]
    alone = []
    for prompt in prompts:
        driver = new_driver()
        alone.append(driver.generate([driver.assign(0, prompt, room=6)], 6)[0])
    driver = new_driver()
    together = driver.generate([driver.assign(i, prompt, room=6) for i, prompt in enumerate(prompts)], 6)
    assert together == alone


@pytest.mark.parametrize(
    ("module", "left_out"),
    [
        ("onward.worker.model_runner", "torch triton numba"),
        ("onward.worker.cpu_device, onward.models.layers.int8_layers", "torch triton"),
    ],
)
def test_what_a_worker_does_not_need_is_not_imported(module: str, left_out: str) -> None:
    """The runner knows no device, and an int8 worker starts without torch."""
    code = f"import sys, {module}; sys.exit(sum(name in sys.modules for name in '{left_out}'.split()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
