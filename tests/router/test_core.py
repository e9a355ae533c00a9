"""The router's decisions, without sockets and under a clock of our own."""

import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from onward.config import RouterConfig
from onward.errors import Conflict, NotFound
from onward.obs.metrics import Registry
from onward.proto import SCHEMA_VERSION
from onward.proto.cursor import ChoiceCursor, Cursor
from onward.proto.engine import ErrorInfo
from onward.proto.router import Registration, StreamProgress
from onward.router.client_stream import ClientRequest, FailureCause
from onward.router.core import ABORTED, MAX_INSTANCE_WAIT_S, Dispatch, Finish, GiveUp, RouterCore, Wait
from onward.router.instance_registry import InstanceState
from onward.router.stream_routing_state import StreamRoutingState
from onward.router.upstream_events import CompleteBody, TokenEvent, UpstreamErrorEvent

NO_BLOCKS = ErrorInfo("pd_preempted", "PD Error: no blocks", 503, True)
LIVING = ErrorInfo("internal_error", "something went wrong", 500, True)
"""What an instance answers that is there."""


class World:
    """A router core with instances that register when told, and a clock."""

    def __init__(self, *instances: str, models: dict[str, str] | None = None, **config: Any) -> None:
        self.core = RouterCore(RouterConfig(**config), "router-1", Registry(), lambda n: 0)
        self.now_s = 100.0
        self.states = dict.fromkeys(instances, "ready")
        self.fingerprints = dict.fromkeys(instances, "fp")
        self.models = dict.fromkeys(instances, "m")
        self.models |= models or {}
        self._ids: Iterator[str] = (f"{number:032x}" for number in range(10**6))
        self.register()

    def register(self) -> None:
        for name, state in self.states.items():
            assert not self.core.register(self.registration(name, state), self.now_s).error

    def registration(self, name: str, state: str) -> Registration:
        return Registration(
            schema_version=SCHEMA_VERSION,
            instance=name,
            url=f"http://{name}",
            role="mixed",
            state=state,
            model=self.models[name],
            fingerprint=self.fingerprints[name],
            kv_layout=None,
        )

    def open(self, **fields: Any) -> StreamRoutingState:
        origin = ClientRequest(
            request_id=next(self._ids),
            seed=1,
            created_s=1,
            arrived_at_s=1.0,
            path="/v1/completions",
            **({"is_streaming": True, "body": b"{}"} | fields),
        )
        return self.core.open_stream(origin, self.now_s)

    def step(self, route: StreamRoutingState) -> Any:
        return self.core.next_action(route, self.now_s)

    def dispatch(self, route: StreamRoutingState) -> Dispatch:
        step = self.step(route)
        waited = 0
        while isinstance(step, Wait):
            self.pass_time(step.seconds)
            waited += 1
            assert waited < 100
            step = self.step(route)
        assert isinstance(step, Dispatch), step
        return step

    def start(self, route: StreamRoutingState, tokens: int = 0) -> str:
        dispatch = self.dispatch(route)
        self.core.on_accepted(route, self.now_s)
        for _ in range(tokens):
            self.advance(route)
        return dispatch.instance_id

    def advance(self, route: StreamRoutingState) -> None:
        stream = route.stream
        position = len(stream.choices[0].token_ids) + 1 if stream.choices else 1
        cursor = Cursor(stream.request_id, 1, stream.epoch, [ChoiceCursor(position)], {0: [position]})
        was_new = not stream.attempt_advanced
        stream.on_event(TokenEvent(b"x", cursor, True), self.now_s)
        if was_new:
            self.core.on_first_tokens(route, self.now_s)

    def fail(
        self, route: StreamRoutingState, cause: FailureCause = FailureCause.LOST, info: ErrorInfo | None = None
    ) -> None:
        if info is None:
            route.stream.fail_lost(cause, "it failed")
        else:
            route.stream.fail(cause, info)
        self.core.on_attempt_ended(route, self.now_s)

    def pass_time(self, seconds: float) -> None:
        """Instances go on registering meanwhile."""
        while seconds > 1:
            self.pass_time(1.0)
            seconds -= 1
        self.now_s += seconds
        self.register()


def test_a_lost_stream_goes_to_another_instance_with_its_tokens() -> None:
    world = World("a", "b")
    route = world.open()
    first = world.start(route, tokens=3)
    world.fail(route)
    second = world.dispatch(route)
    assert second.instance_id != first
    assert [choice.token_ids for choice in second.attempt.choices] == [[1, 2, 3]]


def test_the_size_of_a_kept_stream_includes_the_body_that_names_its_model() -> None:
    sizes: list[int] = []
    for name in ("m", "alias"):
        world = World("a", route=("alias=m",))
        route = world.open(model=name, body=b'{"model": "%s", "prompt": "%s"}' % (name.encode(), b"x" * 1000))
        world.start(route, tokens=2)
        sizes.append(route.stream.size_bytes())
    assert sizes[1] >= sizes[0] + 1000


def test_all_attempts_since_the_last_token_are_bounded() -> None:
    world = World("a", "b", preempt_retry_count=2)
    route = world.open()
    world.start(route, tokens=1)
    world.fail(route)
    for _ in range(2):
        world.start(route)
        world.fail(route)
    step = world.step(route)
    assert isinstance(step, GiveUp) and step.info.code == "upstream_lost"


def test_progress_gives_a_stream_its_attempts_back() -> None:
    world = World("a", "b", preempt_retry_count=1)
    route = world.open()
    for _ in range(20):
        world.start(route, tokens=1)
        world.fail(route)
    assert isinstance(world.dispatch(route), Dispatch)


@pytest.mark.parametrize("code", ["no_token_allowed", "grammar_failed"])
def test_what_the_request_itself_makes_impossible_does_not_count_against_the_instance(code: str) -> None:
    world = World("a")
    routes = [world.open() for _ in range(10)]
    for route in routes:
        world.start(route)
    for route in routes:
        world.fail(route, FailureCause.ERROR, ErrorInfo(code, "why", 400))
        assert isinstance(world.step(route), GiveUp), "it is not retried"
    [instance] = world.core.instances.list_instances(world.now_s)
    assert (instance.state, instance.circuit_open_until_s) == (InstanceState.READY, 0.0)


def test_attempts_without_progress_are_bounded_for_all_streams_together() -> None:
    world = World("a", "b", preempt_retry_count=100, retry_budget=0.0)
    routes = [world.open() for _ in range(30)]
    for route in routes:
        world.start(route)
    for route in routes:
        world.fail(route, FailureCause.ERROR, LIVING)
    assert world.core.metrics.budget_refusals.value() == 20, "ten are free in each minute"
    world.pass_time(1.0)
    steps = [world.step(route) for route in routes]
    assert sum(isinstance(step, Dispatch) for step in steps) == 10
    assert sum(isinstance(step, Wait) for step in steps) == 20
    world.pass_time(10.0)
    late = [world.step(route) for route, step in zip(routes, steps, strict=True) if isinstance(step, Wait)]
    assert all(isinstance(step, GiveUp) for step in late)


def test_a_stream_goes_on_as_soon_as_the_budget_has_something_for_it() -> None:
    world = World("a", "b", preempt_retry_count=100, retry_budget=0.0)
    for _ in range(10):
        route = world.open()
        world.start(route)
        world.fail(route, FailureCause.ERROR, LIVING)
    world.pass_time(55.0)
    late = world.open()
    world.start(late)
    world.fail(late, FailureCause.ERROR, LIVING)
    refused_s = world.now_s
    assert isinstance(world.dispatch(late), Dispatch)
    assert 4.0 < world.now_s - refused_s < 7.0, "the first ten are a minute old"


def test_the_first_resume_after_progress_is_never_refused_but_paced() -> None:
    world = World("a", "b", retry_budget=0.0)
    routes = [world.open() for _ in range(60)]
    for route in routes:
        world.start(route, tokens=1)
    for route in routes:
        world.fail(route)
    steps = [world.step(route) for route in routes]
    assert not any(isinstance(step, GiveUp) for step in steps)
    assert any(isinstance(step, Wait) for step in steps), "so many at once are spread out"
    late = world.open()
    assert isinstance(world.step(late), Wait), "new requests come after them"


@pytest.mark.parametrize("cause", [FailureCause.LOST, FailureCause.STALL, FailureCause.RESTART, FailureCause.GONE])
def test_every_stream_of_an_instance_that_dies_goes_on_also_without_a_token(cause: FailureCause) -> None:
    world = World("a", "b", retry_budget=0.0)
    routes = [world.open() for _ in range(60)]
    for route in routes:
        world.start(route)
    for route in routes:
        world.fail(route, cause)
    for route in routes:
        world.start(route)
    assert world.core.metrics.budget_refusals.value() == 0


def test_what_loses_every_instance_it_is_given_costs_the_budget_from_the_second_time_on() -> None:
    world = World("a", "b", preempt_retry_count=100, retry_budget=0.0)
    routes = [world.open() for _ in range(30)]
    for _ in range(2):
        for route in routes:
            world.start(route)
        for route in routes:
            world.fail(route)
    assert world.core.metrics.budget_refusals.value() == 20, "ten are free in each minute"


def test_when_the_budget_is_spent_a_preempted_request_gets_its_tokens_in_its_own_form() -> None:
    world = World("a", preempt_retry_count=100, retry_budget=0.0)
    route = world.open()
    world.start(route, tokens=2)
    world.fail(route, FailureCause.ERROR, NO_BLOCKS)
    for _ in range(30):
        dispatch = world.dispatch(route)
        world.core.on_accepted(route, world.now_s)
        if dispatch.attempt.is_final:
            break
        world.fail(route, FailureCause.ERROR, NO_BLOCKS)
    else:
        raise AssertionError("no attempt was final")
    world.fail(route, FailureCause.ERROR, NO_BLOCKS)
    assert isinstance(world.step(route), GiveUp)


def test_without_retries_every_attempt_is_final() -> None:
    world = World("a", "b", preempt_retry_count=0)
    route = world.open()
    assert world.dispatch(route).attempt.is_final
    world.core.on_accepted(route, world.now_s)
    world.advance(route)
    world.fail(route)
    assert isinstance(world.step(route), GiveUp)


def test_an_error_that_is_not_retryable_is_the_end() -> None:
    world = World("a", "b")
    route = world.open()
    world.start(route, tokens=1)
    route.stream.on_event(UpstreamErrorEvent(ErrorInfo("crashed_worker", "three crashes", 500)), world.now_s)
    world.core.on_attempt_ended(route, world.now_s)
    step = world.step(route)
    assert isinstance(step, GiveUp) and step.info.code == "crashed_worker"


def test_exclude_decode_keeps_the_last_instance_out_unless_it_is_the_only_one() -> None:
    for policy in ("round_robin", "least_loaded", "random", "session"):
        world = World("a", "b", policy=policy, preempt_retry_exclude_decode=True)
        route = world.open(session_key="s")
        for _ in range(6):
            last = world.start(route, tokens=1)
            world.fail(route, FailureCause.ERROR, NO_BLOCKS)
            assert world.dispatch(route).instance_id != last
            world.core.on_accepted(route, world.now_s)
            world.advance(route)
            world.fail(route, FailureCause.ERROR, NO_BLOCKS)
    alone = World("a", preempt_retry_exclude_decode=True)
    route = alone.open()
    alone.start(route, tokens=1)
    alone.fail(route, FailureCause.ERROR, NO_BLOCKS)
    assert alone.dispatch(route).instance_id == "a"


@pytest.mark.parametrize("cause", [FailureCause.REFUSED, FailureCause.UNREACHABLE])
def test_a_refused_connection_is_no_attempt_and_the_stream_waits(cause: FailureCause) -> None:
    world = World("a", preempt_retry_count=0)
    route = world.open()
    for _ in range(20):
        world.dispatch(route)
        world.fail(route, cause)
    assert route.stream.num_failures == 0
    assert isinstance(world.step(route), Wait)


def test_waiting_for_an_instance_ends_after_a_bound() -> None:
    world = World()
    route = world.open()
    assert isinstance(world.step(route), Wait)
    world.now_s += MAX_INSTANCE_WAIT_S
    step = world.step(route)
    assert isinstance(step, GiveUp) and step.info.status == 503


def test_waiting_ends_with_the_clients_deadline() -> None:
    world = World()
    route = world.open(deadline_at_s=world.now_s + 0.3)
    step = world.step(route)
    assert isinstance(step, Wait) and step.seconds <= 0.3
    world.now_s += 0.3
    step = world.step(route)
    assert isinstance(step, GiveUp) and step.info.status == 504


def test_a_deadline_cuts_a_running_stream_that_its_instance_does_not_end() -> None:
    world = World("a", "b")
    route = world.open(deadline_at_s=world.now_s + 5)
    world.start(route, tokens=1)
    world.now_s += 5.5
    assert world.core.tick(world.now_s) == []
    world.now_s += 1
    world.advance(route)
    assert world.core.tick(world.now_s) == [route]
    world.core.on_attempt_ended(route, world.now_s)
    step = world.step(route)
    assert isinstance(step, GiveUp) and step.info.code == "deadline_exceeded"


def test_too_many_waiting_requests_are_told_to_come_back() -> None:
    world = World(max_queue=2)
    waiting = [world.open() for _ in range(2)]
    assert all(isinstance(world.step(route), Wait) for route in waiting)
    step = world.step(world.open())
    assert isinstance(step, GiveUp) and (step.info.status, step.info.retry_after_s) == (429, 1.0)
    world.core.close_stream(waiting[0], world.now_s, keep=False)
    assert isinstance(world.step(world.open()), Wait), "one place is free again"


def test_the_status_counts_the_requests_that_wait_by_model() -> None:
    world = World("a", route=("alias=m",))
    waiting = [world.open(model="m"), world.open(model="alias")]
    world.states["a"] = "starting"
    world.register()
    assert all(isinstance(world.step(route), Wait) for route in waiting)
    assert world.core.status(world.now_s)["waiting"] == {"m": 2}
    world.states["a"] = "ready"
    world.register()
    world.start(waiting[0])
    assert world.core.status(world.now_s)["waiting"] == {"m": 1}


def test_a_new_request_is_not_retried_where_all_are_overloaded() -> None:
    world = World("a", "b")
    route = world.open()
    full = ErrorInfo("overloaded", "full", 429, True, retry_after_s=3.0)
    tried = set()
    for _ in range(2):
        tried.add(world.dispatch(route).instance_id)
        world.fail(route, FailureCause.OVERLOADED, full)
    assert tried == {"a", "b"}
    step = world.step(route)
    assert isinstance(step, GiveUp) and step.info == full


def test_where_all_are_overloaded_the_client_is_told_the_shortest_time() -> None:
    world = World("a", "b", "c")
    route = world.open()
    for retry_after_s in (3.0, 2.0, None):
        world.dispatch(route)
        world.fail(
            route, FailureCause.OVERLOADED, ErrorInfo("overloaded", "full", 429, True, retry_after_s=retry_after_s)
        )
    step = world.step(route)
    assert isinstance(step, GiveUp) and (step.info.status, step.info.retry_after_s) == (429, 2.0)


def test_a_resume_waits_as_long_as_an_overloaded_instance_says() -> None:
    world = World("a")
    route = world.open()
    world.start(route, tokens=1)
    world.fail(route)
    world.dispatch(route)
    world.fail(route, FailureCause.OVERLOADED, ErrorInfo("overloaded", "full", 429, True, retry_after_s=3.0))
    begun_s = world.now_s
    assert world.dispatch(route).instance_id == "a"
    assert world.now_s - begun_s == pytest.approx(3.0, abs=0.1)


def test_a_resume_that_is_rejected_goes_to_another_instance_and_never_back() -> None:
    world = World("a", "b")
    route = world.open()
    first = world.start(route, tokens=1)
    world.fail(route)
    second = world.dispatch(route).instance_id
    world.fail(route, FailureCause.REJECTED, ErrorInfo("invalid_request", "too long", 400))
    assert world.dispatch(route).instance_id == first
    world.fail(route, FailureCause.REJECTED, ErrorInfo("invalid_request", "too long", 400))
    step = world.step(route)
    assert second != first and isinstance(step, GiveUp) and step.info.status == 400


def test_a_first_rejection_is_the_clients_to_see() -> None:
    world = World("a", "b")
    route = world.open()
    world.dispatch(route)
    route.stream.fail(FailureCause.REJECTED, ErrorInfo("invalid_request", "n: wrong", 400, param="n"), b"as it came")
    world.core.on_attempt_ended(route, world.now_s)
    assert world.step(route) == GiveUp(ErrorInfo("invalid_request", "n: wrong", 400, param="n"), b"as it came")


def test_a_stall_is_when_nothing_moves_and_a_queue_or_a_long_prefill_is_none() -> None:
    world = World("a", "b", stall_timeout_s=10.0)
    queued, stalled = world.open(), world.open()
    world.start(queued)
    world.start(stalled)
    cut, second = [], 0
    for second in range(40):
        world.pass_time(1.0)
        queued.stream.on_event(StreamProgress("e", 7, 0, 100 - second), world.now_s)
        stalled.stream.on_event(StreamProgress("e", 7, 0, 3), world.now_s)
        cut = world.core.tick(world.now_s)
        if cut:
            break
    assert cut == [stalled] and stalled.stream.failure is not None
    assert stalled.stream.failure.cause is FailureCause.STALL
    assert second == 10, "the first line that is like the one before does not count"


def test_a_slow_client_is_no_stall() -> None:
    world = World("a", "b", stall_timeout_s=10.0)
    route = world.open()
    world.start(route, tokens=1)
    route.stream.is_sending = True
    world.pass_time(60)
    assert world.core.tick(world.now_s) == []
    assert world.core.streams_with_stalled_client(world.now_s) == []
    world.pass_time(60)
    assert world.core.streams_with_stalled_client(world.now_s) == [route], "but after a while it counts as gone"


def test_a_drained_instance_loses_its_streams_to_others_and_that_is_no_attempt() -> None:
    world = World("a", "b", preempt_retry_count=0)
    route = world.open()
    first = world.start(route, tokens=2)
    world.states[first] = "draining"
    world.register()
    assert world.core.tick(world.now_s) == [route]
    world.core.on_attempt_ended(route, world.now_s)
    second = world.dispatch(route)
    assert second.instance_id != first and route.stream.num_failures == 0


def test_a_stream_may_return_to_an_instance_that_was_taken_back_into_service() -> None:
    world = World("a", "b")
    route = world.open()
    first = world.start(route, tokens=2)
    other = "b" if first == "a" else "a"
    world.states[first] = "draining"
    world.register()
    assert world.core.tick(world.now_s) == [route]
    world.core.on_attempt_ended(route, world.now_s)
    world.states[other], world.states[first] = "draining", "ready"
    world.register()
    world.pass_time(2.0)
    assert world.dispatch(route).instance_id == first


def test_an_instance_is_told_how_many_others_could_take_its_streams() -> None:
    world = World("a", "b", "c")
    world.states["c"] = "draining"
    world.register()
    told = {name: world.core.register(world.registration(name, state), 100.0) for name, state in world.states.items()}
    assert {name: answer.num_other_instances for name, answer in told.items()} == {"a": 1, "b": 1, "c": 2}


def test_the_only_instance_keeps_its_streams_while_it_drains() -> None:
    world = World("a")
    route = world.open()
    world.start(route, tokens=2)
    world.states["a"] = "draining"
    world.register()
    assert world.core.tick(world.now_s) == []


def test_a_connection_lost_while_draining_counts_as_drain() -> None:
    world = World("a", preempt_retry_count=0)
    route = world.open()
    world.start(route, tokens=2)
    world.states["a"] = "draining"
    world.register()
    world.fail(route)
    assert isinstance(world.step(route), Wait), "it waits for another one"


def test_a_stream_waits_for_an_instance_that_restarts_a_process() -> None:
    world = World("a", "b", restart_grace_s=5.0)
    route = world.open()
    first = world.start(route, tokens=1)
    other = "b" if first == "a" else "a"
    world.states[first] = "restarting"
    world.register()
    world.fail(route)
    assert isinstance(world.step(route), Wait)
    world.pass_time(4.0)
    assert isinstance(world.step(route), Wait)
    world.pass_time(1.5)
    assert world.dispatch(route).instance_id == other


def test_a_stream_whose_instance_reports_a_restart_moves_after_the_grace() -> None:
    world = World("a", "b", restart_grace_s=3.0, stall_timeout_s=100.0)
    route = world.open()
    world.start(route, tokens=1)
    route.stream.on_event(StreamProgress("-", 0, 0, 0), world.now_s)
    world.pass_time(2.0)
    assert world.core.tick(world.now_s) == []
    world.pass_time(1.5)
    assert world.core.tick(world.now_s) == [route]
    assert route.stream.failure is not None and route.stream.failure.cause is FailureCause.RESTART


def test_a_restart_is_waited_for_where_there_is_no_other_instance() -> None:
    world = World("a", restart_grace_s=3.0, stall_timeout_s=10.0)
    route = world.open()
    world.start(route, tokens=1)
    route.stream.on_event(StreamProgress("-", 0, 0, 0), world.now_s)
    world.pass_time(30.0)
    assert world.core.tick(world.now_s) == []


def test_streams_of_an_instance_that_is_gone_move_unless_they_move_by_themselves() -> None:
    world = World("a", "b")
    silent, lively = world.open(), world.open()
    for route in (silent, lively):
        world.start(route, tokens=1)
    gone = lively.stream.instance_id
    while silent.stream.instance_id != gone:
        world.fail(silent)
        world.start(silent, tokens=1)
    assert gone is not None
    del world.states[gone]
    cut = []
    for _ in range(9):
        world.pass_time(1.0)
        world.advance(lively)
        cut = world.core.tick(world.now_s)
        if cut:
            break
    assert cut == [silent] and silent.stream.failure is not None
    assert silent.stream.failure.cause is FailureCause.GONE


def test_a_live_label_is_taken_and_free_after_its_stream() -> None:
    world = World("a")
    route = world.open(client_request_id="mine")
    with pytest.raises(Conflict):
        world.open(client_request_id="mine")
    world.core.close_stream(route, world.now_s, keep=True)
    world.open(client_request_id="mine")


def test_an_aborted_stream_ends_once_and_cannot_come_back() -> None:
    world = World("a", "b")
    route = world.open(client_request_id="mine")
    world.start(route, tokens=1)
    aborted = world.core.abort(["mine", "other"], world.now_s)
    assert (aborted.running, aborted.known_names) == ([route], {"mine"})
    world.fail(route)
    assert world.step(route) == GiveUp(ABORTED, None)
    world.core.close_stream(route, world.now_s, keep=True)
    assert len(world.core.resumable_streams) == 0
    with pytest.raises(NotFound):
        world.core.check_not_aborted(route.stream.request_id, world.now_s)


@pytest.mark.parametrize(
    ("reason", "is_told"), [("stop", True), ("abort", True), ("pd_reschedule", False), (None, False)]
)
def test_a_whole_answer_that_came_before_an_abort_is_told(reason: str | None, is_told: bool) -> None:
    """With all of its choices ended. One that was given up is not: the client would send it again."""
    world = World("a")
    route = world.open(is_streaming=False)
    world.start(route, tokens=1)
    route.stream.choices[0].finish_reason = reason
    route.stream.on_event(CompleteBody(b"{}"), world.now_s)
    world.core.abort(None, world.now_s)
    world.core.on_attempt_ended(route, world.now_s)
    assert world.step(route) == (Finish() if is_told else GiveUp(ABORTED, None))


def test_an_abort_reaches_a_stream_whose_client_has_gone() -> None:
    world = World("a")
    route = world.open(client_request_id="mine")
    world.start(route, tokens=1)
    world.core.close_stream(route, world.now_s, keep=True)
    aborted = world.core.abort(["mine"], world.now_s)
    assert (aborted.running, aborted.ids, aborted.known_names) == ([], [route.stream.request_id], {"mine"})
    assert len(world.core.resumable_streams) == 0
    with pytest.raises(NotFound):
        world.core.check_not_aborted(route.stream.request_id, world.now_s)


def test_an_abort_of_all_means_streams_whose_client_has_gone_too() -> None:
    world = World("a")
    gone, running = world.open(client_request_id="gone"), world.open(client_request_id="running")
    world.start(gone, tokens=1)
    world.core.close_stream(gone, world.now_s, keep=True)
    aborted = world.core.abort(None, world.now_s)
    assert aborted.running == [running]
    assert aborted.known_names == {gone.stream.request_id, running.stream.request_id}
    assert len(world.core.resumable_streams) == 0


def test_records_end_with_their_time() -> None:
    world = World("a", detach_ttl_s=5.0)
    route = world.open()
    world.start(route, tokens=1)
    world.core.close_stream(route, world.now_s, keep=True)
    request_id = route.stream.request_id
    assert world.core.resumable_streams.find(request_id, world.now_s + 4.9) is not None
    world.core.tick(world.now_s + 5.0)
    assert len(world.core.resumable_streams) == 0


def test_bookings_are_given_back_however_an_attempt_ends() -> None:
    world = World("a")
    for end in (
        FailureCause.LOST,
        FailureCause.REFUSED,
        FailureCause.UNREACHABLE,
        FailureCause.REJECTED,
        FailureCause.DRAIN,
    ):
        route = world.open()
        world.dispatch(route)
        assert world.core.instances.list_instances(world.now_s)[0].num_reserved == 1
        world.fail(route, end)
        assert world.core.instances.list_instances(world.now_s)[0].num_reserved == 0
    route = world.open()
    world.dispatch(route)
    world.core.close_stream(route, world.now_s, keep=True)
    assert world.core.instances.list_instances(world.now_s)[0].num_reserved == 0


def test_resumes_are_counted_by_cause_and_by_whether_they_can_be_exact() -> None:
    world = World("a", "b")
    world.fingerprints["b"] = "other"
    world.register()
    route = world.open()
    assert world.start(route, tokens=1) == "a"
    world.states["a"] = "starting"
    world.register()
    world.fail(route)
    assert world.start(route, tokens=1) == "b"
    assert world.core.metrics.resumes.value("lost", "inexact") == 1
    shown = world.core.status(world.now_s)["resumes"]
    assert [(one["cause"], one["from"], one["to"]) for one in shown] == [("lost", "a", "b")]


def test_the_log_says_which_streams_were_carried_on_and_which_were_not(caplog: pytest.LogCaptureFixture) -> None:
    world = World("a", "b", preempt_retry_count=1)
    route, doomed = world.open(), world.open()
    left = world.start(route, tokens=3)
    world.start(doomed, tokens=1)
    with caplog.at_level(logging.INFO, "onward.router.resume_log"):
        world.fail(route)
        other = world.start(route, tokens=1)
        world.fail(doomed)
        world.core.close_stream(doomed, world.now_s, keep=False)
    resumed, failed = caplog.records
    assert (resumed.levelname, failed.levelname) == ("INFO", "WARNING")
    for fact in (route.stream.request_id, "cause=lost", "outcome=exact", f"from={left} to={other}", "pause_s="):
        assert fact in resumed.message
    assert doomed.stream.request_id in failed.message and "outcome=failed" in failed.message


def test_the_log_says_which_instances_were_lost_or_replaced(caplog: pytest.LogCaptureFixture) -> None:
    world = World("a", "b")
    world.states = {"a": "ready"}
    world.pass_time(9.0)
    world.core.tick(world.now_s)
    heir = msgspec.structs.replace(world.registration("a", "ready"), instance="heir")
    assert not world.core.register(heir, world.now_s).error
    lost, replaced = caplog.messages
    assert lost.startswith("instance lost id=b url=http://b silent_s=")
    assert replaced == "instance replaced id=a url=http://a by=heir"


def test_a_stream_that_lacks_only_its_end_needs_no_instance() -> None:
    world = World("a")
    route = world.open()
    world.start(route)
    cursor = Cursor(route.stream.request_id, 1, 1, [ChoiceCursor(1, "stop")], {0: [5]})
    route.stream.on_event(TokenEvent(b"x", cursor, True), world.now_s)
    world.fail(route)
    assert world.step(route) == Finish()


def two_versions(**config: Any) -> World:
    return World("a", "b", models={"a": "v1", "b": "v2"}, route=("m=v1:0.5,v2:0.5",), **config)


def test_a_stream_waits_for_its_version_and_then_its_error_names_it_and_may_be_tried_again() -> None:
    world = two_versions(preempt_retry_count=1000)
    route = world.open(model="m")
    owner = world.start(route, tokens=3)
    world.fail(route)
    world.states[owner] = "draining"
    world.register()
    waited_s = 0.0
    step = world.step(route)
    while isinstance(step, Wait):
        world.pass_time(step.seconds)
        waited_s += step.seconds
        assert waited_s < 2 * MAX_INSTANCE_WAIT_S
        step = world.step(route)
    assert isinstance(step, GiveUp)
    assert (step.info.code, step.info.retryable) == ("unavailable", True)
    assert f"no instance of {world.models[owner]!r} could take the request" in step.info.message


def test_a_stream_without_a_token_goes_to_another_version_when_no_instance_of_its_own_is_alive() -> None:
    world = two_versions()
    route = world.open(model="m")
    owner = world.start(route)
    world.fail(route)
    world.states[owner] = "draining"
    world.register()
    other = world.dispatch(route)
    assert other.instance_id != owner
    assert other.attempt.body == f'{{"model":"{world.models[other.instance_id]}"}}'.encode()


def test_retries_at_one_version_use_up_none_of_the_other() -> None:
    world = two_versions(retry_budget=0.0, preempt_retry_count=1000)
    spent = 0
    route = world.open(model="v1")
    while route.budget_refused_error is None:
        world.start(route)
        world.fail(route, FailureCause.ERROR, LIVING)
        spent += 1
        assert spent < 100
    assert spent > 1
    other = world.open(model="v2")
    world.start(other)
    world.fail(other, FailureCause.ERROR, LIVING)
    assert other.budget_refused_error is None


def test_resumes_of_one_model_hold_back_no_new_request_for_another() -> None:
    world = two_versions()
    routes = [world.open(model="v1") for _ in range(60)]
    for route in routes:
        world.start(route, tokens=1)
    for route in routes:
        world.fail(route)
    world.states["a"] = "ready"
    assert isinstance(world.step(world.open(model="v1")), Wait)
    assert isinstance(world.step(world.open(model="v2")), Dispatch)


def test_the_only_model_is_chosen_once_every_instance_has_had_time_to_register() -> None:
    core = RouterCore(RouterConfig(), "router-1", Registry(), lambda n: 0, settled_at_s=104.0)
    world = World("a")
    assert not core.register(world.registration("a", "ready"), 100.0).error
    route = core.open_stream(ClientRequest("1", 1, 1, 1.0, "/v1/completions", b"{}", is_streaming=True), 100.0)
    assert isinstance(core.next_action(route, 103.0), Wait), "a second model may appear"
    step = core.next_action(route, 104.0)
    assert isinstance(step, Dispatch)
    assert msgspec.json.decode(step.attempt.body) == {"model": world.registration("a", "ready").model}


def test_an_unknown_model_is_refused_once_every_instance_has_had_time_to_register() -> None:
    core = RouterCore(RouterConfig(), "router-1", Registry(), lambda n: 0, settled_at_s=104.0)
    world = World("a")
    assert not core.register(world.registration("a", "ready"), 100.0).error
    route = core.open_stream(
        ClientRequest("1", 1, 1, 1.0, "/v1/completions", b"{}", is_streaming=True, model="later"), 100.0
    )
    assert isinstance(core.next_action(route, 103.0), Wait)
    step = core.next_action(route, 104.0)
    assert isinstance(step, GiveUp) and (step.info.code, step.info.param) == ("model_not_found", "model")
