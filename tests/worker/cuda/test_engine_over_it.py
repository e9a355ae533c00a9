"""The engine over the device's runner, two steps in flight: preemption, abort and a broken step change no tokens."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from onward.config import EngineConfig
from onward.llm import LLM, SamplingOptions
from onward.offline.engine import OfflineEngine
from onward.proto.step import StepPlan
from tests.worker.cuda.small_model import CONFIG, DeviceDriver
from tests.worker.driver import prepared

PROMPTS = [[(7 * i + j * j) % 199 for j in range(5 + 11 * i)] for i in range(7)]
GREEDY = SamplingOptions(max_tokens=60, temperature=0.0, ignore_eos=True)


def _on_host(**settings: Any) -> DeviceDriver:
    return DeviceDriver(**settings)


def _on_device(**settings: Any) -> DeviceDriver:
    from onward.kernels.triton.triton_ops import TritonOps

    return DeviceDriver(ops=TritonOps(max_model_len=256), device="cuda", **settings)


@pytest.fixture(params=["host", pytest.param("device", marks=pytest.mark.gpu)])
def new_driver(request: pytest.FixtureRequest) -> Callable[..., DeviceDriver]:
    return _on_host if request.param == "host" else _on_device


def _llm(driver: DeviceDriver) -> tuple[LLM, OfflineEngine]:
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=driver.config.max_num_batched_tokens)
    engine = OfflineEngine.from_async_runner(driver.runner, config)
    llm = LLM.__new__(LLM)
    llm._start(prepared(CONFIG), engine)
    return llm, engine


@functools.cache
def _alone(new_driver: Callable[..., DeviceDriver]) -> list[list[int]]:
    """What each prompt gives by itself: the same for every test."""
    llm, _ = _llm(new_driver())
    return [llm.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]


def test_a_batch_in_flight_gives_what_each_gives_alone(new_driver: Callable[..., DeviceDriver]) -> None:
    llm, engine = _llm(new_driver())
    together = [one.token_ids for one in llm.generate(PROMPTS, GREEDY)]
    assert together == _alone(new_driver)
    engine.audit_idle()


def test_preempted_requests_come_back_to_the_same_tokens(new_driver: Callable[..., DeviceDriver]) -> None:
    driver = new_driver(num_kv_blocks=22)
    preempted = 0
    begin = driver.runner.begin

    def counted(plan: StepPlan) -> None:
        nonlocal preempted
        preempted += len(plan.preempt)
        begin(plan)

    driver.runner.begin = counted
    llm, engine = _llm(driver)
    together = [one.token_ids for one in llm.generate(PROMPTS, GREEDY)]
    assert preempted > 0
    assert together == _alone(new_driver)
    engine.audit_idle()


def test_streams_that_are_given_up_leave_nothing_and_hurt_nobody(new_driver: Callable[..., DeviceDriver]) -> None:
    expected = _alone(new_driver)
    llm, engine = _llm(new_driver())
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS]
    for stream in streams:
        next(stream)
    for stream in streams[::2]:
        stream.close()
    kept = [list(stream)[-1].num_tokens for stream in streams[1::2]]
    assert kept == [60] * 3
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == expected[0]
    engine.audit_idle()


def test_a_step_that_breaks_loses_no_token(new_driver: Callable[..., DeviceDriver]) -> None:
    expected = _alone(new_driver)
    driver = new_driver()
    llm, engine = _llm(driver)
    finish, calls = driver.runner.finish, 0

    def breaking() -> Any:
        nonlocal calls
        calls += 1
        result = finish()
        if calls == 25:
            raise KeyboardInterrupt
        return result

    driver.runner.finish = breaking
    stream = llm.stream(PROMPTS[3], GREEDY)
    num_pieces = 0
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            num_pieces += 1
    assert num_pieces > 0
    assert [one.token_ids for one in llm.generate(PROMPTS, GREEDY)] == expected
    engine.audit_idle()
