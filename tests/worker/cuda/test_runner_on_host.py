"""The device's runner with plain operations, on the host: it answers plans as the CPU's runner does, and in flight too."""

import numpy as np
import pytest

from onward.proto.sampling_params import SamplingParams
from onward.proto.step import (
    AssignSlot,
    RunSlot,
    SlotTokens,
)
from tests.worker.cuda.small_model import CONFIG, DeviceDriver, cpu_driver
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
        SamplingParams(seed=8, allowed_token_ids=(3, 5, 8, 13, 21), bad_words=((5,), (8, 8))),
    ],
    ids=["plain", "cuts", "penalties", "words", "runs", "ends", "allowed"],
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
