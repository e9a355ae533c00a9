"""An api process's way to the shelf, with a shelf that does what a test wants."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from onward.api import shelf_link
from onward.api.shelf_link import MAX_ASKS, MAX_UNHEARD_BYTES, ShelfLink
from onward.errors import Unavailable
from onward.obs.metrics import Registry
from onward.proto.control import ShelfGone, ShelfUp
from onward.proto.shelf import (
    Claim,
    Claimed,
    DropNamed,
    Dropped,
    Find,
    Found,
    FromShelf,
    Heard,
    Hello,
    Put,
    Release,
    Released,
    ShelfRecord,
    Show,
    Shown,
    ToShelf,
)
from tests.shelf.records import record_of

BIG = record_of("big", data=bytes(MAX_UNHEARD_BYTES // 4))


class Shelf:
    """A wire whose other end is the test."""

    def __init__(self) -> None:
        self.heard: list[ToShelf] = []
        self.is_closed = False
        self.answer: Callable[[ToShelf], FromShelf | None] = lambda _: None
        self._outbox: asyncio.Queue[FromShelf] = asyncio.Queue()

    def send(self, message: ToShelf) -> bool:
        self.heard.append(message)
        if (answer := self.answer(message)) is not None:
            self.say(answer)
        return True

    def say(self, message: FromShelf) -> None:
        self._outbox.put_nowait(message)

    async def receive(self) -> FromShelf:
        return await self._outbox.get()

    def close(self) -> None:
        self.is_closed = True


class Runs:
    """One stream, or none."""

    def __init__(self, record: ShelfRecord | None = None) -> None:
        self.record = record

    def show(self, record_id: str) -> ShelfRecord | None:
        return self.record

    def release(self, record_id: str, epoch: int, caller: str) -> ShelfRecord | int | None:
        record, self.record = self.record, None
        return record


def lost(registry: Registry) -> float:
    return registry.snapshot()[0].series[0].value


def with_link(scenario: Callable[[ShelfLink, Shelf, Registry], Awaitable[None]], runs: Runs | None = None) -> None:
    async def run() -> None:
        registry, shelf = Registry(), Shelf()
        link = ShelfLink(lambda _: shelf, pytest.fail, registry)
        link.attach(runs or Runs())
        link.shelf_up(ShelfUp("shelf-1", "somewhere"))
        try:
            await scenario(link, shelf, registry)
        finally:
            await link.close()

    asyncio.run(run())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_link, "ANSWER_S", 0.01)


def test_a_record_that_is_found_is_given(impatient: None) -> None:
    async def scenario(link: ShelfLink, shelf: Shelf, registry: Registry) -> None:
        shelf.answer = lambda message: Found(message.ask_id, BIG) if isinstance(message, Find) else None
        assert await link.find("big", 3, "anna") == BIG
        assert shelf.heard[-1] == Find(1, "big", 3, "anna")

    with_link(scenario)


def test_silence_means_unknown_and_that_an_attempt_may_start(impatient: None) -> None:
    async def scenario(link: ShelfLink, shelf: Shelf, registry: Registry) -> None:
        assert await link.find("r", 1, None) is None
        assert await link.claim("r", 2, "") is None
        shelf.say(Found(1, BIG))  # too late
        await asyncio.sleep(0)
        assert await link.find("r", 1, None) is None

    with_link(scenario)


def test_who_has_just_started_waits_for_its_shelf() -> None:
    async def run() -> None:
        shelf = Shelf()
        shelf.answer = lambda message: Found(message.ask_id, BIG) if isinstance(message, Find) else None
        link = ShelfLink(lambda _: shelf, pytest.fail, Registry())
        link.attach(Runs())
        asking = asyncio.ensure_future(link.find("big", 0, None))
        await asyncio.sleep(0)
        link.shelf_up(ShelfUp("shelf-1", "somewhere"))
        assert await asking == BIG
        await link.close()

    asyncio.run(run())


def test_a_shelf_that_never_comes_is_not_waited_for_long(impatient: None) -> None:
    async def run() -> None:
        link = ShelfLink(lambda _: Shelf(), pytest.fail, Registry())
        assert await link.find("r", 0, None) is None

    asyncio.run(run())


def test_a_shelf_that_is_gone_is_not_waited_for() -> None:
    async def scenario(link: ShelfLink, shelf: Shelf, registry: Registry) -> None:
        asking = asyncio.ensure_future(link.find("r", 1, None))
        await asyncio.sleep(0)
        link.shelf_gone(ShelfGone("shelf-0"))  # another one
        assert not shelf.is_closed
        link.shelf_gone(ShelfGone("shelf-1"))
        assert shelf.is_closed and await asking is None
        assert await link.claim("r", 2, "") is None
        assert (await link.drop_named(["r"], False, None)).names == []
        link.put(BIG)
        assert lost(registry) == 1

    with_link(scenario)


def test_records_on_their_way_are_bounded_in_bytes_until_the_shelf_has_heard_of_them() -> None:
    async def scenario(link: ShelfLink, shelf: Shelf, registry: Registry) -> None:
        for _ in range(6):
            link.put(BIG)
        assert sum(isinstance(message, Put) for message in shelf.heard) == 4 and lost(registry) == 2
        hellos = [message for message in shelf.heard if isinstance(message, Hello)]
        assert hellos[-1] == Hello(4 * len(BIG.data)), "not only each second"
        shelf.say(Heard(len(BIG.data)))
        await asyncio.sleep(0)
        link.put(BIG)
        link.put(BIG)
        assert sum(isinstance(message, Put) for message in shelf.heard) == 5 and lost(registry) == 3

    with_link(scenario)


def test_questions_are_bounded_in_number() -> None:
    async def scenario(link: ShelfLink, shelf: Shelf, registry: Registry) -> None:
        asking = [asyncio.ensure_future(link.find("r", 1, None)) for _ in range(MAX_ASKS)]
        await asyncio.sleep(0)
        assert await link.find("r", 1, None) is None
        assert sum(isinstance(message, Find) for message in shelf.heard) == MAX_ASKS
        link.shelf_gone(ShelfGone("shelf-1"))
        await asyncio.wait(asking)

    with_link(scenario)


def test_an_abort_is_repeated_and_then_said_to_have_failed(impatient: None) -> None:
    async def scenario(link: ShelfLink, shelf: Shelf, registry: Registry) -> None:
        with pytest.raises(Unavailable):
            await link.drop_named(["r"], False, None)
        asks = [message.ask_id for message in shelf.heard if isinstance(message, DropNamed)]
        assert len(asks) == 3
        shelf.answer = lambda message: (
            Dropped(message.ask_id, ["r"]) if isinstance(message, DropNamed) and message.ask_id > asks[-1] + 1 else None
        )
        assert (await link.drop_named(["r"], False, None)).names == ["r"], "at the second try"

    with_link(scenario)


def test_it_says_what_runs_here_and_gives_it_up() -> None:
    async def scenario(link: ShelfLink, shelf: Shelf, registry: Registry) -> None:
        shelf.say(Show(1, "big"))
        shelf.say(Release(2, "big", 2, ""))
        shelf.say(Release(3, "big", 2, ""))
        while len(shelf.heard) < 4:
            await asyncio.sleep(0)
        assert shelf.heard[-3:] == [Shown(1, BIG), Released(2, BIG), Released(3)]

    with_link(scenario, Runs(BIG))


def test_an_attempt_that_may_start_and_does_not_run_yet_is_not_overtaken_by_its_equal() -> None:
    async def scenario(link: ShelfLink, shelf: Shelf, registry: Registry) -> None:
        shelf.answer = lambda message: Claimed(message.ask_id) if isinstance(message, Claim) else None
        claiming = asyncio.ensure_future(link.claim("r", 2, ""))
        await asyncio.sleep(0)
        shelf.say(Release(1, "r", 2, ""))  # before whoever waits is awake
        assert await claiming is None
        assert shelf.heard[-1] == Released(1, held_epoch=2)

    with_link(scenario)


def test_an_attempt_that_may_start_is_overtaken_by_a_later_one() -> None:
    async def scenario(link: ShelfLink, shelf: Shelf, registry: Registry) -> None:
        shelf.answer = lambda message: Claimed(message.ask_id) if isinstance(message, Claim) else None
        claiming = asyncio.ensure_future(link.claim("r", 2, ""))
        await asyncio.sleep(0)
        shelf.say(Release(1, "r", 3, ""))
        assert await claiming == 3
        assert shelf.heard[-1] == Released(1)

    with_link(scenario)


def test_an_attempt_that_another_process_has_overtaken_is_refused() -> None:
    async def scenario(link: ShelfLink, shelf: Shelf, registry: Registry) -> None:
        shelf.answer = lambda message: Claimed(message.ask_id, 5) if isinstance(message, Claim) else None
        assert await link.claim("r", 2, "") == 5

    with_link(scenario)
