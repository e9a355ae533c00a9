"""An api process's client of the stream store, with a stream store that does what a test wants."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from onward.api.lifecycle import stream_store_client
from onward.api.lifecycle.stream_store_client import MAX_OPEN_QUERIES, MAX_UNACKNOWLEDGED_BYTES, StreamStoreClient
from onward.errors import Unavailable
from onward.obs.metrics import Registry
from onward.proto.control import StreamStoreGone, StreamStoreUp
from onward.proto.stream_store import (
    ClaimAttempt,
    ClaimReply,
    DropByName,
    DropReply,
    FindEntry,
    FindReply,
    FromStreamStore,
    LiveStreamReply,
    PutEntry,
    QueryLiveStream,
    ReleaseAttempt,
    ReleaseReply,
    StoreEntry,
    StoreHeartbeat,
    StoreHeartbeatReply,
    ToStreamStore,
)
from tests.stream_store.store_entries import record_of

BIG = record_of("big", data=bytes(MAX_UNACKNOWLEDGED_BYTES // 4))


class Shelf:
    """A wire whose other end is the test."""

    def __init__(self) -> None:
        self.heard: list[ToStreamStore] = []
        self.is_closed = False
        self.answer: Callable[[ToStreamStore], FromStreamStore | None] = lambda _: None
        self._outbox: asyncio.Queue[FromStreamStore] = asyncio.Queue()

    def send(self, message: ToStreamStore) -> bool:
        self.heard.append(message)
        if (answer := self.answer(message)) is not None:
            self.say(answer)
        return True

    def say(self, message: FromStreamStore) -> None:
        self._outbox.put_nowait(message)

    async def receive(self) -> FromStreamStore:
        return await self._outbox.get()

    def close(self) -> None:
        self.is_closed = True


class Runs:
    """One stream, or none."""

    def __init__(self, record: StoreEntry | None = None) -> None:
        self.record = record

    def live_entry(self, record_id: str) -> StoreEntry | None:
        return self.record

    def release_attempt(self, record_id: str, epoch: int, caller: str) -> StoreEntry | int | None:
        record, self.record = self.record, None
        return record


def lost(registry: Registry) -> float:
    return registry.snapshot()[0].series[0].value


def with_link(
    scenario: Callable[[StreamStoreClient, Shelf, Registry], Awaitable[None]], runs: Runs | None = None
) -> None:
    async def run() -> None:
        registry, shelf = Registry(), Shelf()
        link = StreamStoreClient(lambda _: shelf, pytest.fail, registry)
        link.attach(runs or Runs())
        link.store_up(StreamStoreUp("shelf-1", "somewhere"))
        try:
            await scenario(link, shelf, registry)
        finally:
            await link.close()

    asyncio.run(run())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_store_client, "REPLY_TIMEOUT_S", 0.01)


def test_a_record_that_is_found_is_given(impatient: None) -> None:
    async def scenario(link: StreamStoreClient, shelf: Shelf, registry: Registry) -> None:
        shelf.answer = lambda message: FindReply(message.query_id, BIG) if isinstance(message, FindEntry) else None
        assert await link.find("big", 3, "anna") == BIG
        assert shelf.heard[-1] == FindEntry(1, "big", 3, "anna")

    with_link(scenario)


def test_silence_means_unknown_and_that_an_attempt_may_start(impatient: None) -> None:
    async def scenario(link: StreamStoreClient, shelf: Shelf, registry: Registry) -> None:
        assert await link.find("r", 1, None) is None
        assert await link.claim("r", 2, "") is None
        shelf.say(FindReply(1, BIG))  # too late
        await asyncio.sleep(0)
        assert await link.find("r", 1, None) is None

    with_link(scenario)


def test_a_process_that_has_just_started_waits_for_its_stream_store() -> None:
    async def run() -> None:
        shelf = Shelf()
        shelf.answer = lambda message: FindReply(message.query_id, BIG) if isinstance(message, FindEntry) else None
        link = StreamStoreClient(lambda _: shelf, pytest.fail, Registry())
        link.attach(Runs())
        asking = asyncio.ensure_future(link.find("big", 0, None))
        await asyncio.sleep(0)
        link.store_up(StreamStoreUp("shelf-1", "somewhere"))
        assert await asking == BIG
        await link.close()

    asyncio.run(run())


def test_a_stream_store_that_never_comes_is_not_waited_for_long(impatient: None) -> None:
    async def run() -> None:
        link = StreamStoreClient(lambda _: Shelf(), pytest.fail, Registry())
        assert await link.find("r", 0, None) is None

    asyncio.run(run())


def test_a_stream_store_that_is_gone_is_not_waited_for() -> None:
    async def scenario(link: StreamStoreClient, shelf: Shelf, registry: Registry) -> None:
        asking = asyncio.ensure_future(link.find("r", 1, None))
        await asyncio.sleep(0)
        link.store_gone(StreamStoreGone("shelf-0"))  # another one
        assert not shelf.is_closed
        link.store_gone(StreamStoreGone("shelf-1"))
        assert shelf.is_closed and await asking is None
        assert await link.claim("r", 2, "") is None
        assert (await link.drop_by_name(["r"], False, None)).names == []
        link.put(BIG)
        assert lost(registry) == 1

    with_link(scenario)


def test_records_on_their_way_are_bounded_in_bytes_until_the_stream_store_has_heard_of_them() -> None:
    async def scenario(link: StreamStoreClient, shelf: Shelf, registry: Registry) -> None:
        for _ in range(6):
            link.put(BIG)
        assert sum(isinstance(message, PutEntry) for message in shelf.heard) == 4 and lost(registry) == 2
        hellos = [message for message in shelf.heard if isinstance(message, StoreHeartbeat)]
        assert hellos[-1] == StoreHeartbeat(4 * len(BIG.data)), "not only each second"
        shelf.say(StoreHeartbeatReply(len(BIG.data)))
        await asyncio.sleep(0)
        link.put(BIG)
        link.put(BIG)
        assert sum(isinstance(message, PutEntry) for message in shelf.heard) == 5 and lost(registry) == 3

    with_link(scenario)


def test_questions_are_bounded_in_number() -> None:
    async def scenario(link: StreamStoreClient, shelf: Shelf, registry: Registry) -> None:
        asking = [asyncio.ensure_future(link.find("r", 1, None)) for _ in range(MAX_OPEN_QUERIES)]
        await asyncio.sleep(0)
        assert await link.find("r", 1, None) is None
        assert sum(isinstance(message, FindEntry) for message in shelf.heard) == MAX_OPEN_QUERIES
        link.store_gone(StreamStoreGone("shelf-1"))
        await asyncio.wait(asking)

    with_link(scenario)


def test_an_abort_is_repeated_and_then_said_to_have_failed(impatient: None) -> None:
    async def scenario(link: StreamStoreClient, shelf: Shelf, registry: Registry) -> None:
        with pytest.raises(Unavailable):
            await link.drop_by_name(["r"], False, None)
        asks = [message.query_id for message in shelf.heard if isinstance(message, DropByName)]
        assert len(asks) == 3
        shelf.answer = lambda message: (
            DropReply(message.query_id, ["r"])
            if isinstance(message, DropByName) and message.query_id > asks[-1] + 1
            else None
        )
        assert (await link.drop_by_name(["r"], False, None)).names == ["r"], "at the second try"

    with_link(scenario)


def test_it_says_what_runs_here_and_gives_it_up() -> None:
    async def scenario(link: StreamStoreClient, shelf: Shelf, registry: Registry) -> None:
        shelf.say(QueryLiveStream(1, "big"))
        shelf.say(ReleaseAttempt(2, "big", 2, ""))
        shelf.say(ReleaseAttempt(3, "big", 2, ""))
        while len(shelf.heard) < 4:
            await asyncio.sleep(0)
        assert shelf.heard[-3:] == [LiveStreamReply(1, BIG), ReleaseReply(2, BIG), ReleaseReply(3)]

    with_link(scenario, Runs(BIG))


def test_an_attempt_that_may_start_and_does_not_run_yet_is_not_overtaken_by_its_equal() -> None:
    async def scenario(link: StreamStoreClient, shelf: Shelf, registry: Registry) -> None:
        shelf.answer = lambda message: ClaimReply(message.query_id) if isinstance(message, ClaimAttempt) else None
        claiming = asyncio.ensure_future(link.claim("r", 2, ""))
        await asyncio.sleep(0)
        shelf.say(ReleaseAttempt(1, "r", 2, ""))  # before the waiting task is awake
        assert await claiming is None
        assert shelf.heard[-1] == ReleaseReply(1, blocking_epoch=2)

    with_link(scenario)


def test_an_attempt_that_may_start_is_overtaken_by_a_later_one() -> None:
    async def scenario(link: StreamStoreClient, shelf: Shelf, registry: Registry) -> None:
        shelf.answer = lambda message: ClaimReply(message.query_id) if isinstance(message, ClaimAttempt) else None
        claiming = asyncio.ensure_future(link.claim("r", 2, ""))
        await asyncio.sleep(0)
        shelf.say(ReleaseAttempt(1, "r", 3, ""))
        assert await claiming == 3
        assert shelf.heard[-1] == ReleaseReply(1)

    with_link(scenario)


def test_an_attempt_that_another_process_has_overtaken_is_refused() -> None:
    async def scenario(link: StreamStoreClient, shelf: Shelf, registry: Registry) -> None:
        shelf.answer = lambda message: ClaimReply(message.query_id, 5) if isinstance(message, ClaimAttempt) else None
        assert await link.claim("r", 2, "") == 5

    with_link(scenario)
