"""Which processes of an instance are started, killed and informed, and when: `SupervisorCore`, without any process."""

import pytest

from onward.proto.control import (
    ApiGone,
    Drain,
    EngineGone,
    EngineUp,
    IsolatedRequestRunning,
    MetricsSnapshot,
    QueryInstance,
    QueryMetrics,
    ReplaceWorker,
    RequestDrain,
    RequestUndrain,
    StopChild,
    StreamStoreGone,
    StreamStoreUp,
    Undrain,
    WorkerGone,
)
from onward.proto.stats import EngineStats
from onward.supervisor.children import ChildState, ProcessRole
from onward.supervisor.core import KILL_AFTER_S, SUSPENDED_AFTER_S, AnswerQuery, KillProcess, Phase, RemoveProcess
from onward.supervisor.restart_policy import COOL_DOWN_S, DELAYS_S
from onward.supervisor.snapshots import SNAPSHOT_TIMEOUT_S
from tests.supervisor.instance_of_core import InstanceOfCore

ENGINE, WORKER, API, STORE = ProcessRole.ENGINE, ProcessRole.WORKER, ProcessRole.API, ProcessRole.STREAM_STORE


def ready_instance(**settings: float) -> InstanceOfCore:
    instance = InstanceOfCore(**settings)  # type: ignore[arg-type]
    instance.make_ready()
    return instance


def snapshot(step: int, stalled_s: float = 0.0, worker_ready: bool = True) -> MetricsSnapshot:
    return MetricsSnapshot(1, [], EngineStats(step, worker_ready, stalled_s, {}, {}, 1))


# Starts.


def test_the_stream_store_and_the_engine_start_before_the_api_processes() -> None:
    instance = InstanceOfCore(num_apis=2)
    instance._carry_out(instance.core.start())
    assert instance.starts == [STORE, ENGINE, WORKER, API, API]


def test_an_instance_is_ready_when_all_of_its_processes_are() -> None:
    instance = InstanceOfCore(num_apis=1)
    instance._carry_out(instance.core.start())
    for role in (STORE, API):
        instance.ready(role)
        assert not instance.core.was_ready
    instance.ready(ENGINE)
    assert instance.core.was_ready


def test_an_api_process_that_starts_later_is_told_of_stream_store_engine_and_drain() -> None:
    instance = ready_instance()
    instance.receive(API, RequestDrain())
    instance.die(API)
    store, engine, drain = instance.take_messages(API)[-3:]
    assert isinstance(store, StreamStoreUp) and store.incarnation == instance.child(STORE).incarnation
    assert isinstance(engine, EngineUp) and engine.incarnation == instance.child(ENGINE).incarnation
    assert drain == Drain()


def test_one_api_process_asks_and_all_are_told_to_drain_and_to_serve_again() -> None:
    instance = ready_instance(num_apis=2)
    instance.receive(API, RequestDrain())
    assert instance.take_messages(API, Drain) == [Drain(), Drain()]
    instance.receive(API, RequestUndrain())
    assert instance.take_messages(API, Undrain) == [Undrain(), Undrain()]
    instance.die(API)
    assert not instance.take_messages(API, Drain)


# Deaths.


def test_the_engine_is_informed_of_a_dead_worker_before_the_next_one_starts() -> None:
    instance = ready_instance()
    dead = instance.die(WORKER)
    assert instance.take_messages(ENGINE, WorkerGone) == [WorkerGone(dead.incarnation, "killed")]
    assert instance.starts == [WORKER] and instance.core.restarts[WORKER] == 1


def test_the_worker_of_a_dead_engine_is_gone_before_the_next_engine_starts() -> None:
    instance = ready_instance()
    worker = instance.child(WORKER)
    instance.receive(ENGINE, IsolatedRequestRunning("suspect-0"))
    engine = instance.die(ENGINE)
    taken = instance.take()
    assert RemoveProcess(worker) in taken
    gone = [a.message for a in taken if hasattr(a, "message") and isinstance(a.message, EngineGone)]
    assert gone == [EngineGone(engine.incarnation, "killed", "suspect-0")]
    assert instance.starts == [ENGINE, WORKER]
    assert instance.core.engine_up is None, "an engine is announced when its worker is ready"
    instance.ready(ENGINE)
    [up] = instance.take_messages(API, EngineUp)
    assert up.incarnation == instance.child(ENGINE).incarnation != engine.incarnation
    assert up.address == f"address of {up.incarnation}"


def test_a_worker_whose_restart_is_pending_is_started_once_when_the_engine_dies_too() -> None:
    instance = ready_instance()
    instance.die(WORKER)
    instance.die(WORKER)
    assert not instance.core.children_of(WORKER), "its restart is delayed"
    instance.starts.clear()
    instance.die(ENGINE)
    instance.advance(COOL_DOWN_S)
    assert instance.starts == [ENGINE, WORKER]


def test_engine_and_stream_store_are_informed_of_a_dead_api_process() -> None:
    instance = ready_instance()
    dead = instance.die(API)
    told = [(a.child.role, a.message) for a in instance.take() if hasattr(a, "message")]
    assert {role for role, message in told if message == ApiGone(dead.incarnation)} == {ENGINE, STORE}


def test_api_processes_are_informed_of_a_dead_stream_store_and_of_the_next_one() -> None:
    instance = ready_instance()
    dead = instance.die(STORE)
    gone, up = instance.take_messages(API)
    assert gone == StreamStoreGone(dead.incarnation)
    assert isinstance(up, StreamStoreUp) and up.incarnation != dead.incarnation
    assert up.address != f"address of {dead.incarnation}", "nothing meant for the dead one can reach it"


def test_restarts_are_delayed_more_and_more_and_progress_ends_the_delay() -> None:
    instance = ready_instance()
    for delay_s in DELAYS_S:
        instance.starts.clear()
        instance.die(WORKER)
        assert bool(instance.starts) == (delay_s == 0.0)
        instance.advance(delay_s)
        assert instance.starts == [WORKER]
    instance.starts.clear()
    instance.die(WORKER)
    instance.advance(COOL_DOWN_S / 2)
    assert instance.starts == []
    instance.receive(ENGINE, snapshot(step=7))  # the engine reports steps of the worker that died
    assert instance.starts == [WORKER]


def test_progress_that_was_counted_before_a_death_does_not_end_its_delay_nor_that_of_the_stream_store() -> None:
    instance = ready_instance()
    instance.receive(ENGINE, snapshot(step=7))
    for role in (WORKER, STORE):
        instance.die(role)
        instance.die(role)
    instance.starts.clear()
    instance.receive(ENGINE, snapshot(step=7))
    assert instance.starts == []
    instance.receive(ENGINE, snapshot(step=8))
    assert instance.starts == [WORKER]


@pytest.mark.parametrize("role", [ENGINE, WORKER])
def test_deaths_of_engine_or_worker_under_isolated_requests_bring_no_cool_down(role: ProcessRole) -> None:
    """The cool-down lasts as long as clients wait. They would repeat all requests afterwards, without the charges of
    earlier deaths, and the requests that kill processes would never be found."""
    instance = ready_instance()
    for isolated_request_id in (None, None, "a-0", "a-0", None, None, "b-0", "b-0"):
        instance.receive(ENGINE, IsolatedRequestRunning(isolated_request_id))
        instance.starts.clear()
        instance.die(role)
        instance.advance(DELAYS_S[-1])
        assert instance.starts[0] is role
        instance.ready(ENGINE)


def test_a_stream_store_that_dies_often_does_not_delay_the_others() -> None:
    instance = ready_instance()
    for delay_s in DELAYS_S[:3]:
        instance.die(STORE)
        instance.advance(delay_s)
    instance.starts.clear()
    instance.die(ENGINE)
    assert instance.starts == [ENGINE, WORKER]


def test_a_death_that_was_reported_already_is_not_reported_twice() -> None:
    instance = ready_instance()
    worker = instance.child(WORKER)
    instance.die(ENGINE)
    instance.take()
    instance._carry_out(instance.core.on_exit(worker, -9, "killed", instance.now_s))
    assert instance.take() == []


# Silence.


def test_the_engine_may_ask_for_another_worker_and_only_for_its_present_one() -> None:
    instance = ready_instance()
    instance.receive(ENGINE, ReplaceWorker("worker-0", "said too late"))
    assert instance.take_killed() == []
    instance.receive(ENGINE, ReplaceWorker(instance.child(WORKER).incarnation, "too much is quarantined"))
    assert instance.take_killed() == [instance.child(WORKER)]


@pytest.mark.parametrize("role", [ENGINE, API, STORE])
def test_a_process_that_stops_answering_is_killed(role: ProcessRole) -> None:
    instance = ready_instance(stall_timeout_s=5.0)
    others = [other for other in (ENGINE, API, STORE) if other is not role]
    for second in range(1, 8):
        for other in others:
            instance.receive(other, MetricsSnapshot(second, []))
        instance.advance(1.0)
        assert instance.take_killed() == ([instance.child(role)] if second > 5 else [])


def test_a_worker_is_killed_for_its_own_stall_and_not_for_that_of_the_one_before() -> None:
    instance = ready_instance(stall_timeout_s=5.0)
    instance.advance(4.0)
    instance.die(WORKER)
    for _ in range(2):
        instance.advance(3.0)
        instance.receive(STORE, MetricsSnapshot(1, []))
        instance.receive(API, MetricsSnapshot(1, []))
        instance.take()
        instance.receive(ENGINE, snapshot(7, stalled_s=5.5))
    assert instance.take_killed() == [], "it is younger than the stall timeout"
    instance.advance(1.0)
    assert instance.take_killed() == [instance.child(WORKER)]


def test_a_supervisor_that_was_suspended_kills_no_process_for_its_silence_meanwhile() -> None:
    """As by Ctrl-Z and fg, or where a whole container is paused."""
    instance = ready_instance(stall_timeout_s=60.0)
    for second in range(62):
        for role in (ENGINE, API, STORE):
            instance.receive(role, snapshot(7) if role is ENGINE else MetricsSnapshot(second, []))
        instance.advance(1.0)
    instance.advance(100 * SUSPENDED_AFTER_S)
    instance.receive(ENGINE, snapshot(7, stalled_s=500.0))
    instance.advance(1.0)
    assert instance.take_killed() == []
    for _ in range(60):
        instance.advance(1.0)
    assert {child.role for child in instance.take_killed()} == {ENGINE, WORKER, API, STORE}


def test_a_worker_that_does_not_complete_its_start_is_killed_and_the_next_one_has_more_time() -> None:
    """A device that hangs, or a disk: without a bound every stream would wait for ever."""
    instance = InstanceOfCore(stall_timeout_s=60.0)
    instance._carry_out(instance.core.start())
    instance.advance(20.0)
    for role in (STORE, API, ENGINE):
        instance.ready(role)

    def advance_and_answer(seconds: float) -> None:
        while seconds > 0:
            instance.advance(min(4.0, seconds))
            seconds -= 4.0
            for role in (STORE, API, ENGINE):
                instance.receive(role, MetricsSnapshot(1, []))

    for allowed_s in (10 * 20.0, 2 * 10 * 20.0):
        instance.die(WORKER)
        advance_and_answer(COOL_DOWN_S if not instance.core.children_of(WORKER) else 0.0)
        assert instance.child(WORKER).state is ChildState.STARTING
        instance.take()
        advance_and_answer(allowed_s - 8.0)
        assert instance.take_killed() == [], "a start may take long"
        advance_and_answer(12.0)
        assert instance.take_killed()[:1] == [instance.child(WORKER)]


# Queries.


def test_a_query_is_answered_when_every_process_has_reported_or_after_a_while() -> None:
    instance = ready_instance()
    instance.receive(API, QueryInstance(5))
    api, number = instance.child(API), instance.take_messages(ENGINE, QueryMetrics)[-1].query_id
    for role in (ENGINE, STORE, API):
        assert AnswerQuery(api, 5) not in instance.take()
        instance.receive(role, MetricsSnapshot(number, []))
    assert AnswerQuery(api, 5) in instance.take()
    instance.receive(API, QueryInstance(6))
    instance.advance(SNAPSHOT_TIMEOUT_S)
    assert AnswerQuery(api, 6) in instance.take()


# Shutdown.


def test_processes_stop_in_an_order_that_lets_streams_end() -> None:
    instance = ready_instance(drain_s=7.0)
    instance.stop()
    assert instance.take_messages(API) == [StopChild(7.0)]
    for role, following in ((API, STORE), (STORE, ENGINE), (ENGINE, WORKER)):
        instance.take()
        instance.die(role)
        assert instance.take_messages(following, StopChild) == [StopChild(0.0)]
    assert not instance.core.is_stopped
    instance.die(WORKER)
    assert instance.core.is_stopped and instance.starts == []


def test_a_process_that_is_still_starting_is_killed_instead_of_asked() -> None:
    instance = InstanceOfCore()
    instance._carry_out(instance.core.start())
    instance.take()
    instance.stop()
    assert instance.take() == [KillProcess(instance.child(API), "stopped while it was starting")]


def test_a_second_signal_leaves_the_api_processes_no_grace() -> None:
    instance = ready_instance(drain_s=1000.0)
    instance.stop()
    instance.stop()
    assert instance.take_messages(API) == [StopChild(1000.0), StopChild(0.0)]
    assert instance.core.phase is Phase.ENDING_STREAMS
    instance.stop()
    assert instance.core.phase is Phase.STOPPING_STREAM_STORE, "a third one leaves no more time"


def test_a_process_that_does_not_stop_is_not_waited_for_longer_than_its_grace() -> None:
    instance = ready_instance(drain_s=7.0)
    instance.stop()
    instance.advance(7.0 + KILL_AFTER_S)
    assert instance.core.phase is Phase.STOPPING_STREAM_STORE
    for _ in range(3):
        instance.advance(KILL_AFTER_S)
    assert instance.core.is_stopped, "what is left is killed by the caller"


def test_a_death_during_a_shutdown_restarts_nothing_and_the_engine_learns_of_api_processes() -> None:
    instance = ready_instance(num_apis=2)
    instance.stop()
    instance.take()
    dead = instance.die(API)
    assert instance.take_messages(ENGINE, ApiGone) == [ApiGone(dead.incarnation)]
    instance.die(WORKER)
    instance.advance(1.0)
    assert instance.starts == []
