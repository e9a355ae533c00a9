"""Messages over many seeds: typed events in order, resumed behind any of them, cut and continued."""

import msgspec
import pytest

from onward.sim.message_check import PATH, MessageChecker
from onward.sim.reply_check import InvariantError
from onward.sim.scenario import Scenario, Shape, SimRequest
from onward.sim.scenario_generator import FaultSelection, generate_scenario
from onward.sim.simulation import run_scenario

NUM_SEEDS: dict[Shape, int] = {"engine": 12, "pd": 4, "cluster": 4}


def only_messages(scenario: Scenario) -> Scenario:
    """Every request that no other test is about, as one for a message."""
    requests = [
        msgspec.structs.replace(request, path=PATH, prompt_token_ids=None, n=1, logprobs=None, structure="", pooling="")
        for request in scenario.requests
        if request.path in ("/v1/chat/completions", "/v1/completions", PATH) and request.prompt
    ]
    return msgspec.structs.replace(scenario, requests=requests)


@pytest.mark.parametrize("shape", NUM_SEEDS)
def test_whatever_fails_each_message_is_exact(shape: Shape) -> None:
    outcomes = [
        run_scenario(only_messages(generate_scenario(seed, shape, FaultSelection())))
        for seed in range(NUM_SEEDS[shape])
    ]
    assert [one.violation for one in outcomes if one.violation] == []
    assert sum(one.end_reasons.get("complete", 0) for one in outcomes) > len(outcomes)
    assert sum(one.triggered.get("disconnect", 0) for one in outcomes) > 0


def test_generated_scenarios_have_messages() -> None:
    paths = [request.path for seed in range(30) for request in generate_scenario(seed, "engine").requests]
    assert paths.count(PATH) > 3


WORD = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": ""}}
START = {"type": "message_start", "message": {"id": "msg_1"}}
OPEN = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}


@pytest.mark.parametrize(
    "events",
    [[WORD], [START, START], [START, WORD], [START, {"type": "ping"}, WORD], [START, {"type": "ping"}, OPEN, OPEN]],
)
def test_events_out_of_order_are_a_violation(events: list[dict[str, object]]) -> None:
    checker = MessageChecker(SimRequest("q", 0.0, path=PATH, prompt="a", max_tokens=2, seed=1), [1])
    with pytest.raises(InvariantError):
        for event in events:
            checker.take_event(None, event)
