"""What an engine's prefix cache has learnt reaches the routers that want it, each from where it stands."""

import contextlib
from collections.abc import Iterator

import httpx
import msgspec

from onward.config import ApiConfig
from onward.proto.kv_events import KvEvents
from onward.proto.model import PreparedModel
from onward.proto.router import PROBE_PATH, Registration, RegistrationReply
from onward.router.prefix_index import PrefixIndex
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.routed import MSGPACK_BODY
from tests.api.stand_in_engine import StandInEngine
from tests.api.test_router_registration import Router

FIRST, SECOND = (True, b"first block"), (True, b"second block")


class FollowingRouter(Router):
    """Keeps an index for the engine that it hears of, and says what it expects next."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        super().__init__(RegistrationReply("router-1", 0.1, wants_kv_events=True))

    def answer_to(self, told: Registration) -> RegistrationReply:
        expected = self.index.next_event_number(told.engine)
        if told.kv_events is not None:
            expected = self.index.apply(told.engine, told.kv_events)
        return msgspec.structs.replace(self.answer, next_kv_event=expected)

    def learns(self, engine: StandInEngine, *changes: tuple[bool, bytes]) -> None:
        names = [name for _, name in changes]
        self.hears(lambda _: self.index.matched_blocks(engine.incarnation, names) == len(names))


@contextlib.contextmanager
def following() -> Iterator[FollowingRouter]:
    one = FollowingRouter()
    try:
        yield one
    finally:
        one.close()


def learn(instance: Instance, *changes: tuple[bool, bytes]) -> None:
    with instance.news.changed:
        instance.engine.cache_changes.extend(changes)


def probed(instance: Instance, question: RegistrationReply) -> KvEvents | None:
    body = msgspec.msgpack.encode(question)
    answer = httpx.post(instance.url + PROBE_PATH, content=body, headers=MSGPACK_BODY, verify=NO_CERTIFICATES)
    return msgspec.msgpack.decode(answer.content, type=Registration).kv_events


def test_each_router_hears_of_every_change_once_from_where_it_stands(model: PreparedModel) -> None:
    with following() as first, following() as second:
        with running(model, ApiConfig(routers=(first.url, second.url))) as instance:
            learn(instance, FIRST)
            for one in (first, second):
                one.learns(instance.engine, FIRST)
            learn(instance, SECOND)
            for one in (first, second):
                one.learns(instance.engine, FIRST, SECOND)
        for one in (first, second):
            events = [told.kv_events for told in one.told if told.kv_events is not None]
            assert sum(told.reset for told in events) == 1
            assert sum(change == SECOND for told in events for change in told.changes) == 1


def test_a_new_engine_is_followed_from_its_own_beginning(model: PreparedModel) -> None:
    with following() as one, running(model, ApiConfig(routers=(one.url,))) as instance:
        learn(instance, FIRST, SECOND)
        one.learns(instance.engine, FIRST, SECOND)
        instance.restart_engine(lambda engine: engine.cache_changes.append(SECOND))
        one.learns(instance.engine, SECOND)


def test_a_router_that_wants_none_gets_none(model: PreparedModel) -> None:
    router = Router(RegistrationReply("router-1", 0.1))
    try:
        with running(model, ApiConfig(routers=(router.url,))) as instance:
            learn(instance, FIRST)
            router.hears(lambda _: len(router.told) > 3)
    finally:
        router.close()
    assert all(told.kv_events is None for told in router.told)


def test_a_probe_is_answered_with_the_changes_it_asks_for(model: PreparedModel) -> None:
    with running(model) as instance:
        learn(instance, FIRST, SECOND)
        asked = RegistrationReply("r", 1.0, wants_kv_events=True, next_kv_event=-1)
        assert probed(instance, asked) == KvEvents(0, [FIRST, SECOND], reset=True)
        assert probed(instance, msgspec.structs.replace(asked, next_kv_event=1)) == KvEvents(1, [SECOND])
        assert probed(instance, RegistrationReply("r", 1.0)) is None


def test_without_an_engine_an_instance_registers_all_the_same(model: PreparedModel) -> None:
    with following() as one, running(model, ApiConfig(routers=(one.url,))) as instance:
        instance.kill_engine()
        one.hears(lambda told: (told.state, told.engine, told.kv_events) == ("restarting", "", None))
        instance.start_engine()
        one.hears(lambda told: told.state == "ready")
