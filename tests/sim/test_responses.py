"""Responses over many seeds: made without a waiting client, read from any number on, cancelled, kept for a limited time."""

import msgspec
import pytest

from onward.sim.response_check import ConflictingEndError, ResponseChecker
from onward.sim.scenario import FaultSpec, RunResult, Scenario, Shape, SimInstanceSpec, SimRequest
from onward.sim.scenario_generator import FaultSelection, generate_scenario
from onward.sim.simulation import run_scenario

NUM_SEEDS: dict[Shape, int] = {"engine": 40, "pd": 10, "cluster": 8}
CLIENTS = FaultSelection(kinds=frozenset({"detach", "cancel", "disconnect", "leave"}))


def only_responses(scenario: Scenario, chance: int) -> Scenario:
    """Each request of a drawn scenario as one for a response."""
    is_routed = scenario.num_routers > 0
    asks = [_as_response(ask, index + chance, is_routed=is_routed) for index, ask in enumerate(scenario.requests)]
    return msgspec.structs.replace(scenario, requests=asks)


def _as_response(ask: SimRequest, number: int, *, is_routed: bool) -> SimRequest:
    return SimRequest(
        ask.name,
        ask.at_s,
        path="/v1/responses",
        prompt=ask.prompt,
        is_streaming=number % 2 == 0,
        max_tokens=ask.max_tokens,
        seed=number,
        temperature=ask.temperature,
        ignore_eos=ask.ignore_eos,
        logprobs=None if is_routed else ask.logprobs,
        background=number % 4 != 0,
        detach_s=0.1 * (number % 30) if number % 4 == 1 else None,
        cancel_at_s=0.05 * (number % 20) if number % 8 == 3 else None,
        disconnect_at_s=ask.disconnect_at_s if number % 2 == 0 else [],
    )


def runs(shape: Shape, choice: FaultSelection) -> list[RunResult]:
    return [
        run_scenario(only_responses(generate_scenario(seed, shape, choice), seed)) for seed in range(NUM_SEEDS[shape])
    ]


@pytest.mark.parametrize("shape", NUM_SEEDS)
def test_where_clients_alone_disturb_each_response_is_exact_and_none_is_forgotten(shape: Shape) -> None:
    outcomes = runs(shape, CLIENTS)
    assert [one.violation for one in outcomes if one.violation] == []
    assert sum(one.end_reasons.get("cancelled", 0) for one in outcomes) > 0
    assert sum(one.triggered.get("detach", 0) for one in outcomes) > len(outcomes)


@pytest.mark.parametrize("shape", NUM_SEEDS)
def test_whatever_fails_each_response_is_exact_or_made_again(shape: Shape) -> None:
    outcomes = runs(shape, FaultSelection())
    assert [one.violation for one in outcomes if one.violation] == []
    assert sum(one.end_reasons.get("complete", 0) for one in outcomes) > 2 * len(outcomes)


def test_a_response_in_the_background_outlives_the_process_that_runs_it() -> None:
    asks = [
        SimRequest(
            "q0",
            2.0,
            "/v1/responses",
            prompt="the sea",
            is_streaming=False,
            max_tokens=30,
            seed=1,
            background=True,
            detach_s=4.0,
        )
    ]
    faults = [FaultSpec(f"kill-{role}", "m0", at_s) for role, at_s in (("api", 2.2), ("worker", 2.4), ("engine", 2.6))]
    outcome = run_scenario(Scenario(1, "engine", [SimInstanceSpec("m0", step_s=0.05)], asks, faults), keeps_lines=True)
    assert outcome.violation is None
    assert outcome.end_reasons == {"complete": 1}
    assert not [line for line in outcome.trace if "response_not_found" in line]
    assert {"kill-api", "kill-worker", "kill-engine", "detach"} <= outcome.triggered.keys()


def test_an_end_that_conflicts_with_the_one_before_is_not_judged_with_its_events() -> None:
    """Where records may be lost, a response may be shown with another end, which the client's events then lack."""
    checker = ResponseChecker(SimRequest("q", 0.0, path="/v1/responses", prompt="a", max_tokens=2, seed=1), [1])
    cancelled = {"id": "resp_1", "status": "cancelled", "output": [], "usage": None}
    checker.take_shown(cancelled)
    other_end = {"type": "response.failed", "sequence_number": 0, "response": {**cancelled, "status": "failed"}}
    with pytest.raises(ConflictingEndError):
        checker.take_event(None, other_end)
    assert checker.events == []
