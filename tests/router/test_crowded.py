"""Instances that take a request and then have no room for its prompt: another one is tried, and it is no failed attempt."""

from onward.proto.engine import ErrorInfo
from onward.router.core import MAX_INSTANCE_WAIT_S, Dispatch, GiveUp, Wait
from onward.router.stream_routing_state import StreamRoutingState
from onward.router.upstream_events import UpstreamErrorEvent
from tests.router.test_core import World

NO_ROOM = ErrorInfo("pd_no_decode_blocks", "PD Error: no free blocks", 503, True)


def turn_away(world: World, route: StreamRoutingState) -> str:
    """The selected instance accepts the request, and then has no room for it."""
    instance = world.start(route)
    route.stream.on_event(UpstreamErrorEvent(NO_ROOM), world.now_s)
    world.core.on_attempt_ended(route, world.now_s)
    return instance


def test_another_instance_is_tried_at_once_and_the_same_one_after_a_rest() -> None:
    world = World("a", "b")
    route = world.open()
    assert {turn_away(world, route), turn_away(world, route)} == {"a", "b"}
    assert isinstance(world.step(route), Wait)
    assert world.dispatch(route).instance_id in ("a", "b")


def test_it_costs_none_of_the_attempts_and_nothing_of_the_budget() -> None:
    world = World("a", preempt_retry_count=0, retry_budget=0.0)
    routes = [world.open() for _ in range(20)]
    for _ in range(5):
        for route in routes:
            turn_away(world, route)
    for route in routes:
        world.start(route, tokens=1)


def test_it_ends_after_a_bound_that_begins_anew_with_each_token() -> None:
    world = World("a")
    route = world.open()
    started_s = world.now_s
    turn_away(world, route)
    world.start(route, tokens=1)
    route.stream.on_event(UpstreamErrorEvent(NO_ROOM), world.now_s)
    world.core.on_attempt_ended(route, world.now_s)
    since_s = world.now_s
    while isinstance(step := world.step(route), Wait | Dispatch):
        assert world.now_s - since_s <= MAX_INSTANCE_WAIT_S
        if isinstance(step, Wait):
            world.pass_time(step.seconds)
        else:
            world.core.on_accepted(route, world.now_s)
            route.stream.on_event(UpstreamErrorEvent(NO_ROOM), world.now_s)
            world.core.on_attempt_ended(route, world.now_s)
    assert isinstance(step, GiveUp)
    assert step.info == NO_ROOM
    assert world.now_s - started_s > MAX_INSTANCE_WAIT_S
