"""A stream whose instance is replaced by a new server at the same address, which has adopted its blocks."""

import msgspec

from onward.proto.engine import ErrorInfo
from onward.router.client_stream import FailureCause
from onward.router.core import Dispatch, Wait
from onward.router.stream_routing_state import StreamRoutingState
from onward.router.upstream_events import UpstreamErrorEvent
from tests.router.test_core import World

REPLACED = ErrorInfo("replaced", "a new server takes over at this address", 503, True)
GRACE_S = 5.0


def replaced_world() -> World:
    """Two instances, of which the policy would choose the other one next."""
    return World("a", "b", restart_grace_s=GRACE_S, policy="round_robin")


def cut_stream(world: World) -> StreamRoutingState:
    route = world.open()
    assert world.start(route, tokens=3) == "a"
    route.stream.on_event(UpstreamErrorEvent(REPLACED), world.now_s)
    world.core.on_attempt_ended(route, world.now_s)
    return route


def register_successor(world: World, state: str) -> None:
    world.states.pop("a", None)
    world.fingerprints["new"], world.models["new"] = "fp", world.models["a"]
    registration = msgspec.structs.replace(world.registration("new", state), url="http://a")
    assert not world.core.register(registration, world.now_s).error


def test_a_stream_waits_for_the_new_server_although_another_instance_is_ready() -> None:
    world = replaced_world()
    route = cut_stream(world)
    assert isinstance(world.step(route), Wait)
    register_successor(world, "starting")
    assert isinstance(world.step(route), Wait)
    register_successor(world, "ready")
    step = world.step(route)
    assert isinstance(step, Dispatch)
    assert step.instance_id == "new"


def test_a_stream_goes_elsewhere_if_no_new_server_comes_within_the_grace() -> None:
    world = replaced_world()
    route = cut_stream(world)
    del world.states["a"]
    began_s = world.now_s
    assert world.dispatch(route).instance_id == "b"
    assert world.now_s - began_s >= GRACE_S


def test_being_replaced_counts_neither_as_an_attempt_nor_against_the_instance() -> None:
    world = replaced_world()
    route = cut_stream(world)
    assert route.stream.num_failures == 0
    assert world.core.instances.list_instances(world.now_s)[0].circuit_open_until_s == 0.0


def test_a_stream_that_fails_at_the_new_server_is_not_bound_to_it() -> None:
    world = replaced_world()
    route = cut_stream(world)
    register_successor(world, "ready")
    assert world.start(route) == "new"
    world.fail(route, FailureCause.LOST)
    assert world.dispatch(route).instance_id == "b"
