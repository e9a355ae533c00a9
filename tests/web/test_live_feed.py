"""The live view's feed: one look for all viewers, none without viewers, bounded, and ended by a shutdown."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest
import uvloop
from starlette.types import Message

from onward.clock import SystemClock
from onward.errors import Unavailable
from onward.web.error_format import RequestFailed
from onward.web.ui.live_feed import MAX_VIEWERS, MAX_VIEWERS_PER_CALLER, LiveFeed

INTERVAL_S = 0.01


class Looks:
    def __init__(self) -> None:
        self.number = 0
        self.fault: Exception | None = None

    async def look(self) -> bytes:
        self.number += 1
        if self.fault is not None:
            raise self.fault
        return json.dumps({"number": self.number}).encode()


class Viewer:
    """Reads until it has so many events, then goes."""

    def __init__(self, feed: LiveFeed, caller: str = "", num_events: int = 3) -> None:
        self.events: list[Any] = []
        self.status: int | None = None
        self._num_events, self._done = num_events, asyncio.Event()
        self._task = asyncio.create_task(feed.stream(caller, self._send))

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self.events.append(json.loads(message["body"].removeprefix(b"data: ")))
        if len(self.events) >= self._num_events or not message.get("more_body", True):
            self._done.set()

    async def wait(self) -> None:
        done = asyncio.create_task(self._done.wait())
        await asyncio.wait((done, self._task), return_when=asyncio.FIRST_COMPLETED)
        done.cancel()

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(scenario, 30))


def test_all_viewers_share_one_look_and_without_viewers_there_is_none() -> None:
    async def scenario() -> None:
        looks = Looks()
        feed = LiveFeed(looks.look, SystemClock(), INTERVAL_S)
        assert looks.number == 0
        viewers = [Viewer(feed) for _ in range(5)]
        for viewer in viewers:
            await viewer.wait()
        assert looks.number < 2 * 3, "not one for each viewer"
        assert all([event["number"] for event in viewer.events[:3]] == [1, 2, 3] for viewer in viewers)
        for viewer in viewers:
            await viewer.leave()
        assert feed.num_viewers == 0
        number = looks.number
        await asyncio.sleep(5 * INTERVAL_S)
        assert looks.number == number, "the last viewer has gone"

    run(scenario())


def test_viewers_are_bounded_in_all_and_for_each_caller() -> None:
    async def scenario() -> None:
        feed = LiveFeed(Looks().look, SystemClock(), INTERVAL_S)
        viewers = [Viewer(feed, f"caller-{index % 8}") for index in range(MAX_VIEWERS)]
        for viewer in viewers:
            await viewer.wait()
        with pytest.raises(RequestFailed) as refused:
            await feed.stream("another", viewers[0]._send)
        assert (refused.value.info.status, refused.value.info.code) == (429, "too_many_viewers")
        for viewer in viewers:
            await viewer.leave()
        own = [Viewer(feed, "greedy") for _ in range(MAX_VIEWERS_PER_CALLER)]
        for viewer in own:
            await viewer.wait()
        with pytest.raises(RequestFailed, match="this caller"):
            await feed.stream("greedy", own[0]._send)
        other = Viewer(feed, "modest")
        await other.wait()
        assert other.status == 200
        for viewer in [*own, other]:
            await viewer.leave()

    run(scenario())


def test_a_look_that_fails_is_told_and_the_next_one_is_made() -> None:
    async def scenario() -> None:
        looks = Looks()
        looks.fault = Unavailable("the supervisor does not read")
        feed = LiveFeed(looks.look, SystemClock(), INTERVAL_S)
        viewer = Viewer(feed, num_events=1)
        await viewer.wait()
        assert viewer.events[0]["error"]["message"] == "the supervisor does not read"
        looks.fault = ValueError("ours")
        second = Viewer(feed, num_events=4)
        await second.wait()
        assert second.events[-1]["error"]["message"] == "internal error"
        looks.fault = None
        third = Viewer(feed, num_events=4)
        await third.wait()
        assert "number" in third.events[-1]
        for one in (viewer, second, third):
            await one.leave()

    run(scenario())


def test_a_shutdown_ends_every_stream() -> None:
    async def scenario() -> None:
        feed = LiveFeed(Looks().look, SystemClock(), INTERVAL_S)
        viewers = [Viewer(feed, num_events=10**6) for _ in range(3)]
        await asyncio.sleep(2 * INTERVAL_S)
        feed.close()
        for viewer in viewers:
            await viewer.wait()
            await asyncio.wait((viewer._task,))
        assert feed.num_viewers == 0

    run(scenario())
