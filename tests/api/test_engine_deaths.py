"""Deaths of engines are charged to requests, so that no request kills one engine after another."""

from contextlib import closing

import pytest

from onward.api.engine_link.request_tracker import CRASHED_ENGINE, RequestTracker, TrackerActions
from onward.config import ServeConfig
from onward.obs.metrics import Registry
from onward.proto.control import EngineGone, IsolatedRequestRunning
from onward.proto.engine import CRASHES_TO_ISOLATE, Submit, TokenDelta, TokenDeltas
from onward.proto.sampling_params import SamplingParams
from onward.sim.scenario import Scenario, SimInstanceSpec, SimRequest
from onward.sim.simulation import run_scenario
from onward.sim.vocabulary import ENGINE_POISON
from onward.supervisor.children import ProcessRole
from tests.supervisor.stand_ins import child_of, kill_and_reap, supervisor_of


@pytest.fixture
def tracker() -> RequestTracker:
    tracker = RequestTracker(Registry())
    tracker.engine_up("engine-0", 0.0)
    for name in ("a-0", "b-0"):
        tracker.submit(Submit(0, name, 0, [1, 2], SamplingParams(1, max_tokens=9)), 0.0)
    return tracker


def die(tracker: RequestTracker, number: int, alone: str | None = None) -> tuple[TrackerActions, dict[str, Submit]]:
    """Engine `number` dies, and the next one comes up. Returns what followed, and what was resubmitted."""
    actions = tracker.engine_gone(f"engine-{number}", float(number), alone)
    again = [one for one in tracker.engine_up(f"engine-{number + 1}", number + 0.5).send if isinstance(one, Submit)]
    return actions, {submit.request_id: submit for submit in again}


def test_requests_that_shared_an_engine_become_suspects_and_are_never_refused(tracker: RequestTracker) -> None:
    for number in range(20):
        actions, again = die(tracker, number)
        assert actions.deliver == [] and again.keys() == {"a-0", "b-0"}
        assert {submit.engine_crashes for submit in again.values()} == {min(number + 1, CRASHES_TO_ISOLATE)}


def test_a_request_under_which_two_engines_died_alone_is_refused_and_no_other_one(tracker: RequestTracker) -> None:
    die(tracker, 0)
    die(tracker, 1)
    actions, again = die(tracker, 2, alone="a-0")
    assert actions.deliver == [], "one such death may be a coincidence"
    assert again["b-0"].engine_crashes == CRASHES_TO_ISOLATE, "another one's death is not charged to it"
    actions, again = die(tracker, 3, alone="a-0")
    assert [(one.request_id, one.error) for one in actions.deliver] == [("a-0", CRASHED_ENGINE)]
    assert again.keys() == {"b-0"}
    assert not CRASHED_ENGINE.retryable, "no router tries it elsewhere"


def test_a_token_clears_a_suspect(tracker: RequestTracker) -> None:
    die(tracker, 0)
    die(tracker, 1)
    _, again = die(tracker, 2, alone="a-0")
    delta = TokenDelta("a-0", again["a-0"].epoch, 0, [7], 2, 0)
    tracker.receive("engine-3", TokenDeltas(1, [delta]), 2.6)
    actions, again = die(tracker, 3, alone="a-0")
    assert actions.deliver == [] and again["a-0"].engine_crashes == 0


def test_a_request_that_waits_for_an_engine_is_not_charged_with_its_death(tracker: RequestTracker) -> None:
    tracker.engine_gone("engine-0", 1.0)
    tracker.submit(Submit(0, "late-0", 0, [1], SamplingParams(1)), 1.5)
    assert tracker.engine_gone("engine-0", 2.0).deliver == []
    submits = {one.request_id: one for one in tracker.engine_up("engine-1", 3.0).send if isinstance(one, Submit)}
    assert (submits["late-0"].engine_crashes, submits["a-0"].engine_crashes) == (0, 1)


def test_the_supervisor_tells_the_api_processes_which_request_the_engine_ran_alone() -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        engine, engines_end = child_of(supervisor, ProcessRole.ENGINE, "engine-1")
        _, apis_end = child_of(supervisor, ProcessRole.API, "api-1")
        with closing(engines_end), closing(apis_end):
            supervisor._core.was_ready = supervisor._has_announced_readiness = True
            engines_end.send(IsolatedRequestRunning("a-0"))
            kill_and_reap(supervisor, engine)
            told = [message for message in iter(apis_end.receive, None) if isinstance(message, EngineGone)]
            assert [(one.incarnation, one.isolated_request_id) for one in told] == [("engine-1", "a-0")]


@pytest.mark.parametrize("num_apis", [1, 2])
def test_a_request_that_kills_every_engine_is_refused_after_four_and_all_others_complete(num_apis: int) -> None:
    asks = [SimRequest(f"q{i}", 2.0 + i / 100, prompt=f"the sea {i}", max_tokens=12, seed=i) for i in range(8)]
    asks[3] = SimRequest("q3", 2.03, prompt=f"the sea{ENGINE_POISON}", max_tokens=12, seed=3)
    scenario = Scenario(5, "engine", [SimInstanceSpec("m0", num_api_processes=num_apis)], asks, [])
    outcome = run_scenario(scenario)
    assert outcome.violation is None, outcome.violation
    assert outcome.end_reasons == {"complete": 7, "crashed_engine": 1}
    assert outcome.triggered == {"poison-engine": 4}
