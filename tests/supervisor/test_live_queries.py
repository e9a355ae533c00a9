"""A look at the engine is answered once: by the engine, or without it when it is not there, dies or is silent."""

from onward.proto.live import LiveSnapshot, QueryLive
from onward.supervisor.children import ProcessRole
from onward.supervisor.core import AnswerLiveQuery
from onward.supervisor.live_queries import LIVE_TIMEOUT_S
from tests.supervisor.instance_of_core import InstanceOfCore

ENGINE, API = ProcessRole.ENGINE, ProcessRole.API


def asked() -> tuple[InstanceOfCore, QueryLive]:
    """An api process has asked, and the engine was asked for it."""
    instance = InstanceOfCore()
    instance.make_ready()
    instance.receive(API, QueryLive(7))
    [query] = instance.take_messages(ENGINE, QueryLive)
    return instance, query


def answers(instance: InstanceOfCore) -> list[tuple[int, bool]]:
    taken = [action for action in instance.take() if isinstance(action, AnswerLiveQuery)]
    assert all(action.child.role is API for action in taken)
    return [(action.query_id, action.engine is not None) for action in taken]


def test_the_engine_s_answer_goes_to_the_api_process_that_asked() -> None:
    instance, query = asked()
    instance.receive(ENGINE, LiveSnapshot(query.query_id, None))
    assert answers(instance) == [(7, False)]
    instance.receive(ENGINE, LiveSnapshot(query.query_id, None))
    assert answers(instance) == [], "once"


def test_a_silent_engine_is_left_out_after_a_while() -> None:
    instance, query = asked()
    instance.advance(LIVE_TIMEOUT_S / 2)
    assert answers(instance) == []
    assert instance.core.next_tick_s() <= instance.now_s + LIVE_TIMEOUT_S / 2
    instance.advance(LIVE_TIMEOUT_S / 2)
    assert answers(instance) == [(7, False)]
    instance.receive(ENGINE, LiveSnapshot(query.query_id, None))
    assert answers(instance) == [], "too late"


def test_a_dead_engine_is_left_out_at_once_and_one_that_starts_is_not_asked() -> None:
    instance, _ = asked()
    instance.die(ENGINE)
    assert answers(instance) == [(7, False)]
    instance.receive(API, QueryLive(8))
    assert answers(instance) == [(8, False)]


def test_an_api_process_has_one_look_under_way_and_a_dead_one_none() -> None:
    instance, _ = asked()
    instance.receive(API, QueryLive(8))
    instance.take()
    instance.advance(LIVE_TIMEOUT_S)
    assert answers(instance) == [(8, False)]
    instance.receive(API, QueryLive(9))
    instance.take()
    instance.die(API)
    instance.advance(LIVE_TIMEOUT_S)
    assert answers(instance) == []
