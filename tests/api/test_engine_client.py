"""The engine client around the request tracker, on a wire of lists: no sockets, no processes."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from onward.api.engine_link import engine_client
from onward.api.engine_link.engine_client import MAX_OPEN_REQUESTS, EngineClient
from onward.api.engine_link.request_tracker import RequestTracker
from onward.clock import SystemClock
from onward.errors import Conflict, Overloaded, Unavailable
from onward.obs.metrics import Registry
from onward.proto.control import EngineGone, EngineUp
from onward.proto.engine import (
    Abort,
    AbortByName,
    AbortReply,
    FromEngine,
    KvEventsReply,
    QueryKvEvents,
    RequestAccepted,
    Submit,
    ToEngine,
    TokenDelta,
    TokenDeltas,
)
from onward.proto.kv_events import KvEvents
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import WorkerHello
from onward.web.error_format import RequestFailed


class ListWire:
    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.arriving: asyncio.Queue[FromEngine] = asyncio.Queue()
        self.closed = False

    def send(self, message: ToEngine) -> bool:
        self.sent.append(message)
        return True

    async def receive(self) -> FromEngine:
        return await self.arriving.get()

    def close(self) -> None:
        self.closed = True


class Setting:
    def __init__(self) -> None:
        self.wires: list[ListWire] = []
        self.faults = 0
        self.client = EngineClient(RequestTracker(Registry()), SystemClock(), self._connect, self._on_fault)

    def up(self, incarnation: str) -> ListWire:
        hello = WorkerHello(1, "w", incarnation, 1, "fp", 10, 16, 100, 320)
        self.client.engine_up(EngineUp(incarnation, f"address-of-{incarnation}", hello))
        return self.wires[-1]

    def _connect(self, address: str) -> ListWire:
        self.wires.append(ListWire())
        return self.wires[-1]

    def _on_fault(self) -> None:
        self.faults += 1


def run(scenario: Callable[[Setting], Awaitable[None]]) -> Setting:
    async def play() -> Setting:
        setting = Setting()
        try:
            await asyncio.wait_for(scenario(setting), 20)
        finally:
            await setting.client.close()
        return setting

    return asyncio.run(play())


def order(name: str = "a-0") -> Submit:
    return Submit(0, name, 0, [1], SamplingParams(seed=1, max_tokens=5))


def tokens(position: int, *ids: int, epoch: int = 1, reason: str | None = None) -> TokenDeltas:
    return TokenDeltas(1, [TokenDelta("a-0", epoch, position, list(ids), 1, 0, reason)])


def test_what_comes_while_the_stream_is_busy_is_taken_at_once() -> None:
    async def scenario(setting: Setting) -> None:
        wire = setting.up("engine-1")
        mailbox = setting.client.submit([order()])
        for message in (RequestAccepted("a-0", 1), tokens(0, 5), tokens(1, 6), tokens(2, 7, reason="stop")):
            wire.arriving.put_nowait(message)
        await mailbox.wait_accepted()
        while wire.arriving.qsize():
            await asyncio.sleep(0)
        taken = await mailbox.next_outputs()
        assert [token for one in taken for token in one.token_ids] == [5, 6, 7]
        assert taken[-1].finish_reason == "stop"

    run(scenario)


def test_another_engine_gets_a_wire_of_its_own_and_the_same_one_does_not() -> None:
    async def scenario(setting: Setting) -> None:
        first = setting.up("engine-1")
        setting.client.submit([order()])
        assert setting.up("engine-1") is first
        second = setting.up("engine-2")
        assert first.closed and not second.closed
        [submit] = second.sent
        assert isinstance(submit, Submit) and submit.epoch == 2

    run(scenario)


def test_an_engine_that_is_gone_is_not_written_to() -> None:
    async def scenario(setting: Setting) -> None:
        wire = setting.up("engine-1")
        setting.client.engine_gone(EngineGone("engine-0", "long ago"))
        assert setting.client.engine == "engine-1"
        setting.client.engine_gone(EngineGone("engine-1", "killed"))
        assert setting.client.engine is None and wire.closed
        setting.client.submit([order()])
        assert wire.sent == []
        assert len(setting.up("engine-2").sent) == 1

    run(scenario)


def test_an_abort_is_sent_once_however_often_it_is_asked_for() -> None:
    async def scenario(setting: Setting) -> None:
        wire = setting.up("engine-1")
        mailbox = setting.client.submit([order("a-0"), order("a-1")])
        setting.client.stop("a-1", 3)
        for _ in range(2):
            setting.client.abort(mailbox)
        aborts = [(one.request_id, one.reason) for one in wire.sent if isinstance(one, Abort)]
        assert aborts == [("a-1", "stop"), ("a-0", "abort")]

    run(scenario)


def test_open_requests_have_a_bound_and_those_that_end_make_room() -> None:
    async def scenario(setting: Setting) -> None:
        setting.up("engine-1")
        mailboxes = [setting.client.submit([order(f"{i}-0")]) for i in range(MAX_OPEN_REQUESTS)]
        with pytest.raises(Overloaded) as refused:
            setting.client.submit([order()])
        assert refused.value.retry_after_s
        setting.client.abort(mailboxes[0])
        setting.client.submit([order()])

    run(scenario)


def test_the_limits_are_known_once_an_engine_has_been_there() -> None:
    async def scenario(setting: Setting) -> None:
        waiting = asyncio.ensure_future(setting.client.wait_worker(None))
        await asyncio.sleep(0)
        assert not waiting.done()
        setting.up("engine-1")
        assert (await waiting).max_model_len == 100
        setting.client.engine_gone(EngineGone("engine-1", "killed"))
        assert (await setting.client.wait_worker(None)).max_model_len == 100

    run(scenario)


@pytest.mark.parametrize(("deadline", "code"), [(True, "deadline_exceeded"), (False, "unavailable")])
def test_the_wait_for_the_first_engine_has_an_end(monkeypatch: pytest.MonkeyPatch, deadline: bool, code: str) -> None:
    monkeypatch.setattr(engine_client, "ENGINE_WAIT_S", 60.0 if deadline else 0.01)

    async def scenario(setting: Setting) -> None:
        with pytest.raises(RequestFailed) as failed:
            await setting.client.wait_worker(SystemClock().now_s() + 0.01 if deadline else None)
        assert failed.value.info.code == code

    run(scenario)


def test_after_the_grace_everything_ends_and_nothing_begins() -> None:
    async def scenario(setting: Setting) -> None:
        setting.up("engine-1")
        mailbox = setting.client.submit([order()])
        setting.client.fail_all()
        with pytest.raises(RequestFailed):
            await mailbox.wait_accepted()
        with pytest.raises(RequestFailed):
            setting.client.submit([order("b-0")])

    run(scenario)


def test_a_message_that_breaks_the_reader_is_not_survived_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(setting: Setting) -> None:
        wire = setting.up("engine-1")
        wire.arriving.put_nowait(TokenDeltas(1, None))  # type: ignore[arg-type]
        while not setting.faults:
            await asyncio.sleep(0)

    assert run(scenario).faults == 1


def asked(wire: ListWire) -> AbortByName:
    message = wire.sent[-1]
    assert isinstance(message, AbortByName)
    return message


def test_who_asks_for_an_abort_gets_the_answer_to_that_question() -> None:
    async def scenario(setting: Setting) -> None:
        wire = setting.up("engine-1")
        first = asyncio.ensure_future(setting.client.abort_by_name(["a", "b"]))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(setting.client.abort_by_name([], abort_all=True))
        await asyncio.sleep(0)
        one, other = wire.sent
        assert isinstance(one, AbortByName) and isinstance(other, AbortByName)
        assert (one.names, one.abort_all, other.abort_all) == (["a", "b"], False, True)
        wire.arriving.put_nowait(AbortReply(other.query_id, ["z"], []))
        wire.arriving.put_nowait(AbortReply(one.query_id, ["b"], ["a"]))
        wire.arriving.put_nowait(AbortReply(99, [], []))
        assert await first == {"b"}
        assert await second == {"z"}

    run(scenario)


def test_an_engine_that_does_not_say_what_it_has_aborted_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "ABORT_ANSWER_S", 0.01)

    async def scenario(setting: Setting) -> None:
        with pytest.raises(Unavailable):
            await setting.client.abort_by_name([], abort_all=True)
        wire = setting.up("engine-1")
        with pytest.raises(Unavailable):
            await setting.client.abort_by_name(["a"])
        wire.arriving.put_nowait(AbortReply(asked(wire).query_id, ["a"], []))
        await asyncio.sleep(0)
        assert setting.faults == 0, "an answer that comes too late is nobody's"

    run(scenario)


def test_what_waits_for_an_engine_is_aborted_without_one() -> None:
    async def scenario(setting: Setting) -> None:
        mailbox = setting.client.submit([order()])
        assert await setting.client.abort_by_name(["a"]) == {"a"}
        await mailbox.wait_accepted()
        assert [(one.finish_reason, one.token_ids) for one in await mailbox.next_outputs()] == [("abort", [])]

    run(scenario)


def test_a_label_is_taken_until_its_request_has_left() -> None:
    async def scenario(setting: Setting) -> None:
        setting.up("engine-1")
        labelled = [
            Submit(0, name, 0, [1], SamplingParams(seed=1), client_request_id="mine") for name in ("a-0", "a-1", "b-0")
        ]
        first = setting.client.submit(labelled[:2])
        with pytest.raises(Conflict):
            setting.client.submit(labelled[2:])
        setting.client.abort(first)
        second = setting.client.submit(labelled[2:])
        setting.client.abort(first)
        with pytest.raises(Conflict):
            setting.client.submit(labelled[:1])
        setting.client.abort(second)

    run(scenario)


def test_what_the_cache_has_learnt_is_asked_for_and_waited_for() -> None:
    async def scenario(setting: Setting) -> None:
        wire = setting.up("engine-1")
        asking = asyncio.create_task(setting.client.kv_events(7))
        await asyncio.sleep(0)
        (question,) = wire.sent
        assert isinstance(question, QueryKvEvents) and question.next_event == 7
        wire.arriving.put_nowait(KvEventsReply(question.query_id + 1, KvEvents(0)))
        wire.arriving.put_nowait(KvEventsReply(question.query_id, KvEvents(7, [(True, b"name")])))
        assert await asking == KvEvents(7, [(True, b"name")])

    run(scenario)


def test_an_engine_that_does_not_say_what_it_has_cached_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "KV_EVENTS_ANSWER_S", 0.01)

    async def scenario(setting: Setting) -> None:
        assert await setting.client.kv_events(-1) is None
        setting.up("engine-1")
        assert await setting.client.kv_events(-1) is None

    run(scenario)


def test_what_an_engine_had_cached_that_is_gone_counts_no_more() -> None:
    async def scenario(setting: Setting) -> None:
        wire = setting.up("engine-1")
        asking = asyncio.create_task(setting.client.kv_events(-1))
        await asyncio.sleep(0)
        (question,) = wire.sent
        assert isinstance(question, QueryKvEvents)
        wire.arriving.put_nowait(KvEventsReply(question.query_id, KvEvents(0, [(True, b"name")])))
        setting.up("engine-2")
        setting.client.engine_gone(EngineGone("engine-2", "killed"))
        assert await asking is None

    run(scenario)
