"""What an api process is started with, and how an instance with handoffs stops: it completes those that it accepted."""

from onward.config import ServeConfig
from onward.proto.control import MetricsSnapshot, QueryMetrics, StopChild
from onward.proto.stats import EngineStats
from onward.supervisor.children import ProcessRole
from onward.supervisor.core import HANDOFF_POLL_S, KILL_AFTER_S, Phase, SendMessage
from tests.supervisor.instance_of_core import InstanceOfCore
from tests.supervisor.stand_ins import supervisor_of

DRAIN_S = 30.0


def stats(*, sending: int = 0, waiting: int = 0) -> EngineStats:
    return EngineStats(1, True, 0.0, {"waiting": waiting, "running": 0}, {"free": 10, "sending": sending}, 4)


def stopping_engine_instance(*, serves_handoffs: bool = True, drain_s: float = DRAIN_S) -> InstanceOfCore:
    """Its api processes and its stream store have ended."""
    instance = InstanceOfCore(serves_handoffs=serves_handoffs, drain_s=drain_s)
    instance.make_ready()
    instance.receive(ProcessRole.ENGINE, MetricsSnapshot(1, [], stats()))  # what it said before does not count
    instance.stop()
    for role in (ProcessRole.API, ProcessRole.STREAM_STORE):
        instance.die(role)
    return instance


def num_answers_waited_for(instance: InstanceOfCore, answers: list[EngineStats]) -> int:
    for number, answer in enumerate(answers):
        if instance.core.phase is not Phase.COMPLETING_HANDOFFS:
            return number
        [query] = instance.take_messages(ProcessRole.ENGINE, QueryMetrics)
        instance.receive(ProcessRole.ENGINE, MetricsSnapshot(query.query_id, [], answer))
        instance.advance(HANDOFF_POLL_S)
    return len(answers)


def test_an_api_process_learns_its_routers_and_what_they_call_it() -> None:
    config = ServeConfig(router="http://127.0.0.1:8080", detach_ttl_s=7.0)
    with supervisor_of(config) as supervisor:
        start = supervisor._api_start_message("api-1", 0)
        assert (start.config.routers, start.config.detach_ttl_s) == (("http://127.0.0.1:8080",), 7.0)
        assert start.config.url == "http://127.0.0.1:4711"
        assert (start.config.handoff_address, start.config.cluster_key) == ("tcp://127.0.0.1:7000", "ab" * 32)


def test_the_engine_stays_until_its_kv_has_been_read() -> None:
    instance = stopping_engine_instance()
    assert num_answers_waited_for(instance, [stats(waiting=1), stats(sending=3), stats(sending=1)]) == 3
    assert instance.core.phase is Phase.COMPLETING_HANDOFFS
    assert num_answers_waited_for(instance, [stats()]) == 1
    assert instance.core.phase is Phase.STOPPING_ENGINE
    assert instance.take_messages(ProcessRole.ENGINE, StopChild) == [StopChild(0.0)]


def test_an_engine_that_sends_for_ever_is_not_waited_for_longer_than_the_drain() -> None:
    instance = stopping_engine_instance(drain_s=0.3)
    num_answers_waited_for(instance, [stats(sending=1)] * 9)
    assert instance.core.phase is Phase.STOPPING_ENGINE


def test_an_engine_that_does_not_answer_is_not_waited_for_longer_than_the_drain() -> None:
    instance = stopping_engine_instance()
    instance.advance(DRAIN_S)
    assert instance.core.phase is Phase.STOPPING_ENGINE
    instance.advance(KILL_AFTER_S)
    assert instance.core.phase is Phase.STOPPING_WORKER


def test_an_instance_that_nobody_asks_for_prefills_has_nothing_to_wait_for() -> None:
    instance = stopping_engine_instance(serves_handoffs=False)
    assert instance.core.phase is Phase.STOPPING_ENGINE
    queries = [a for a in instance.actions if isinstance(a, SendMessage) and isinstance(a.message, QueryMetrics)]
    assert not queries
