"""The cost of an event does not grow with the number of requests that are live. Instructions are counted, not time."""

from collections.abc import Sized

import pytest

from benchmarks.engine import engine_scale
from benchmarks.engine.engine_scale import LOADS
from onward.engine.live_requests import LiveRequests
from onward.timers import Timers
from tests.engine.harness import Harness
from tests.work import num_instructions

FEW, MANY = 20, 160


def cost(name: str, num_live: int) -> int:
    """Returns the cost of some events, without summaries that are due once per second: they may grow with `num_live`."""
    load = LOADS[name](num_live)
    load.event()
    return min(num_instructions(load.event) for _ in range(8))


@pytest.mark.parametrize("name", LOADS, ids=["refusals", "unreachable", "away"])
def test_an_event_costs_the_same_however_many_requests_are_live(name: str) -> None:
    few, many = cost(name, FEW), cost(name, MANY)
    assert few > 100, "the counter counts"
    assert many < 1.5 * few, f"{few} instructions with {FEW} live requests, {many} with {MANY}"


def test_a_peer_that_cannot_be_reached_is_sent_one_message_in_a_turn() -> None:
    load = engine_scale.UnreachablePeer(50)
    sent: list[int] = []
    for _ in range(20):
        load.now_s += 0.02
        load.core.plan(load.now_s)
        load.core.tick(load.now_s)
        messages = load.core.take_handoff_messages().to_prefill
        sent.append(len(messages))
        for peer, _ in messages:
            load.core.on_peer_send(peer, False, load.now_s)
    assert max(sent) <= 2, "a prompt and a ping"
    assert sum(sent) >= 10, "it is tried again and again"
    load.core.on_peer_send("peer", True, load.now_s)
    load.core.tick(load.now_s)
    assert len(load.core.take_handoff_messages().to_prefill) >= 50, "then everything that it lacks follows"


def test_nothing_is_left_in_the_indexes_when_all_requests_have_ended() -> None:
    harness = Harness()
    for index in range(4):
        harness.submit(f"r{index}-0", [1, 2, 3], client_request_id=f"label-{index}", caller="ann", deadline_in_s=100.0)
    harness.run_until_idle()
    live = harness.core._live
    indexes = {name: value for name, value in vars(live).items() if isinstance(value, Sized) and len(value)}
    assert indexes == {}


def test_deadlines_of_ended_requests_take_no_memory() -> None:
    timers: Timers[int] = Timers()
    for key in range(10_000):
        timers.set_earliest(key, 1e9)
        timers.cancel(key)
    assert len(timers) == 0
    assert len(timers._heap) <= 65


def test_a_timer_wakes_at_the_earliest_of_its_times_and_once() -> None:
    timers: Timers[str] = Timers()
    timers.set_earliest("a", 3.0)
    timers.set_earliest("a", 1.0)
    timers.set_earliest("a", 2.0)
    timers.set_earliest("b", 1.5)
    assert timers.take_due(0.9) == []
    assert timers.take_due(2.5) == ["a", "b"]
    assert timers.take_due(4.0) == []


def test_a_request_is_found_by_its_name_by_its_label_and_by_its_caller() -> None:
    harness = Harness()
    harness.submit("r-0", [1, 2, 3], client_request_id="mine", caller="ann")
    harness.submit("r-1", [1, 2, 3], client_request_id="mine", caller="ann")
    live: LiveRequests = harness.core._live
    both = {"r-0", "r-1"}
    assert {r.request_id for r in live.find_by_name("r", None)} == both
    assert {r.request_id for r in live.find_by_name("mine", "ann")} == both
    assert live.find_by_name("mine", "bob") == [] and live.find_by_name("", None) == []
    assert {r.request_id for r in live.of_caller("ann")} == both
    harness.run_until_idle()
