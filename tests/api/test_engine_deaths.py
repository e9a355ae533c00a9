"""Deaths of engines are charged to requests, so that no request kills one engine after another."""

from contextlib import closing

import pytest

from onward.api.ledger import CRASHED_ENGINE, Actions, Ledger, Order
from onward.config import ServeConfig
from onward.obs.metrics import Registry
from onward.proto.control import EngineGone, RunsAlone
from onward.proto.request import CRASHES_TO_RUN_ALONE, Deltas, Submit, TokenDelta
from onward.proto.sampling import Sampling
from onward.sim.scenario import Ask, Machine, Scenario
from onward.sim.vocabulary import ENGINE_POISON
from onward.sim.world import run
from onward.supervisor.children import Role
from tests.supervisor.stand_ins import child_of, supervisor_of


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger(Registry())
    ledger.engine_up("engine-0", 0.0)
    for name in ("a-0", "b-0"):
        ledger.submit(Order(name, [1, 2], Sampling(1, max_tokens=9)), 0.0)
    return ledger


def die(ledger: Ledger, number: int, alone: str | None = None) -> tuple[Actions, dict[str, Submit]]:
    """Engine `number` dies, and the next one comes up. Returns what followed, and what was resubmitted."""
    actions = ledger.engine_gone(f"engine-{number}", float(number), alone)
    again = [one for one in ledger.engine_up(f"engine-{number + 1}", number + 0.5).send if isinstance(one, Submit)]
    return actions, {submit.request_id: submit for submit in again}


def test_requests_that_shared_an_engine_become_suspects_and_are_never_refused(ledger: Ledger) -> None:
    for number in range(20):
        actions, again = die(ledger, number)
        assert actions.deliver == [] and again.keys() == {"a-0", "b-0"}
        assert {submit.engine_deaths for submit in again.values()} == {min(number + 1, CRASHES_TO_RUN_ALONE)}


def test_a_request_under_which_two_engines_died_alone_is_refused_and_no_other_one(ledger: Ledger) -> None:
    die(ledger, 0)
    die(ledger, 1)
    actions, again = die(ledger, 2, alone="a-0")
    assert actions.deliver == [], "one such death may be a coincidence"
    assert again["b-0"].engine_deaths == CRASHES_TO_RUN_ALONE, "another one's death is not charged to it"
    actions, again = die(ledger, 3, alone="a-0")
    assert [(one.request_id, one.error) for one in actions.deliver] == [("a-0", CRASHED_ENGINE)]
    assert again.keys() == {"b-0"}
    assert not CRASHED_ENGINE.retryable, "no router tries it elsewhere"


def test_a_token_clears_a_suspect(ledger: Ledger) -> None:
    die(ledger, 0)
    die(ledger, 1)
    _, again = die(ledger, 2, alone="a-0")
    delta = TokenDelta("a-0", again["a-0"].epoch, 0, [7], 2, 0)
    ledger.receive("engine-3", Deltas(1, [delta]), 2.6)
    actions, again = die(ledger, 3, alone="a-0")
    assert actions.deliver == [] and again["a-0"].engine_deaths == 0


def test_a_request_that_waits_for_an_engine_is_not_charged_with_its_death(ledger: Ledger) -> None:
    ledger.engine_gone("engine-0", 1.0)
    ledger.submit(Order("late-0", [1], Sampling(1)), 1.5)
    assert ledger.engine_gone("engine-0", 2.0).deliver == []
    submits = {one.request_id: one for one in ledger.engine_up("engine-1", 3.0).send if isinstance(one, Submit)}
    assert (submits["late-0"].engine_deaths, submits["a-0"].engine_deaths) == (0, 1)


def test_the_supervisor_tells_the_api_processes_which_request_the_engine_ran_alone() -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        engine, engines_end = child_of(supervisor, Role.ENGINE, "engine-1")
        _, apis_end = child_of(supervisor, Role.API, "api-1")
        with closing(engines_end), closing(apis_end):
            supervisor._was_ready = True
            engines_end.send(RunsAlone("a-0"))
            engine.kill()
            supervisor._reap(0.0)
            told = [message for message in iter(apis_end.receive, None) if isinstance(message, EngineGone)]
            assert [(one.incarnation, one.alone) for one in told] == [("engine-1", "a-0")]


@pytest.mark.parametrize("num_apis", [1, 2])
def test_a_request_that_kills_every_engine_is_refused_after_four_and_all_others_complete(num_apis: int) -> None:
    asks = [Ask(f"q{i}", 2.0 + i / 100, prompt=f"the sea {i}", max_tokens=12, seed=i) for i in range(8)]
    asks[3] = Ask("q3", 2.03, prompt=f"the sea{ENGINE_POISON}", max_tokens=12, seed=3)
    scenario = Scenario(5, "engine", [Machine("m0", num_apis=num_apis)], asks, [])
    outcome = run(scenario)
    assert outcome.violation is None, outcome.violation
    assert outcome.ends == {"complete": 7, "crashed_engine": 1}
    assert outcome.fired == {"poison-engine": 4}
