"""How an instance leaves: told over HTTP, all its api processes know; told by a signal, it keeps its word to peers."""

import select
import socket
import threading
from collections.abc import Iterable
from contextlib import closing

from onward.config import ServeConfig
from onward.proto.control import Drain, MetricsSnapshot, QueryMetrics, RequestDrain, RequestUndrain, StartApi, Undrain
from onward.proto.stats import EngineStats
from onward.supervisor.child_process import ProcessRole
from onward.supervisor.supervisor import Supervisor
from onward.transport.control_channel import ChannelClosed, ControlChannel
from tests.supervisor.stand_ins import child_of, supervisor_of

LONG_S = 30.0


def stats(*, sending: int = 0, waiting: int = 0) -> EngineStats:
    return EngineStats(1, True, 0.0, {"waiting": waiting, "running": 0}, {"free": 10, "sending": sending}, 4)


class StandInEngine(threading.Thread):
    """Says of itself what it is given, one after the other; the last one again and again."""

    def __init__(self, channel: ControlChannel, answers: Iterable[EngineStats]) -> None:
        super().__init__()
        self._channel, self._answers = channel, list(answers)
        self.num_answers = 0
        self.start()

    def run(self) -> None:
        try:
            while select.select([self._channel], [], [], LONG_S)[0]:
                message = self._channel.receive()
                if isinstance(message, QueryMetrics):
                    answer = self._answers[min(self.num_answers, len(self._answers) - 1)]
                    self.num_answers += 1
                    self._channel.send(MetricsSnapshot(message.query_id, [], answer))
        except ChannelClosed:
            self._channel.close()


def waits_for(supervisor: Supervisor, answers: list[EngineStats]) -> int:
    """How many answers of its engine an ending supervisor has asked for before it went on."""
    engine, channel = child_of(supervisor, ProcessRole.ENGINE, "engine-1")
    supervisor._snapshots.record(engine, MetricsSnapshot(1, [], stats()), 0.0)  # what it said before does not count
    stand_in = StandInEngine(channel, answers)
    with closing(socket.socket()) as wakeup:
        supervisor._wait_for_handoffs(wakeup)
    engine.kill()
    supervisor._remove_child(engine)
    stand_in.join()
    return stand_in.num_answers


def test_one_api_process_asks_and_all_are_told_to_drain_also_those_that_start_later() -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        first, firsts_end = child_of(supervisor, ProcessRole.API, "api-1")
        _, seconds_end = child_of(supervisor, ProcessRole.API, "api-2")
        _, engines_end = child_of(supervisor, ProcessRole.ENGINE, "engine-1")
        with closing(firsts_end), closing(seconds_end), closing(engines_end):
            supervisor._on_message(first, RequestDrain())
            assert [end.receive() for end in (firsts_end, seconds_end)] == [Drain(), Drain()]
            assert engines_end.receive() is None
            supervisor._send_start_api(first)
            assert isinstance(firsts_end.receive(), StartApi)
            assert firsts_end.receive() == Drain()
            supervisor._on_message(first, RequestUndrain())
            assert [end.receive() for end in (firsts_end, seconds_end)] == [Undrain(), Undrain()]
            supervisor._send_start_api(first)
            assert isinstance(firsts_end.receive(), StartApi)
            assert firsts_end.receive() is None


def test_an_api_process_learns_its_routers_and_what_they_call_it() -> None:
    config = ServeConfig(router="http://127.0.0.1:8080", detach_ttl_s=7.0)
    with supervisor_of(config) as supervisor:
        api, apis_end = child_of(supervisor, ProcessRole.API, "api-1")
        with closing(apis_end):
            supervisor._send_start_api(api)
            told = apis_end.receive()
            assert isinstance(told, StartApi)
            assert (told.config.routers, told.config.detach_ttl_s) == (("http://127.0.0.1:8080",), 7.0)
            assert told.config.url == "http://127.0.0.1:4711"
            assert (told.config.handoff_address, told.config.cluster_key) == ("tcp://127.0.0.1:7000", "ab" * 32)
            assert apis_end.receive() is None, "nobody has asked for a drain"


def test_the_engine_stays_until_its_kv_has_been_read() -> None:
    with supervisor_of(ServeConfig(role="prefill", drain_s=LONG_S), with_handoff=True) as supervisor:
        assert waits_for(supervisor, [stats(waiting=1), stats(sending=3), stats(sending=1), stats()]) == 4


def test_an_engine_that_sends_for_ever_is_not_waited_for_longer_than_the_drain() -> None:
    with supervisor_of(ServeConfig(role="prefill", drain_s=0.3), with_handoff=True) as supervisor:
        assert waits_for(supervisor, [stats(sending=1)]) >= 1


def test_an_instance_that_nobody_asks_for_prefills_has_nothing_to_wait_for() -> None:
    with supervisor_of(ServeConfig(drain_s=LONG_S)) as supervisor:
        assert waits_for(supervisor, [stats(sending=1)]) == 0
