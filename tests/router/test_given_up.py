"""Connections that the router gives up on purpose."""

import asyncio

import pytest
import uvloop

from tests.router.harness import CHAT, Received, running_router
from tests.router.stand_in_instance import Behaviour, StandInInstance

STREAM = {"model": "hash", "messages": [], "seed": 7, "max_tokens": 6, "stream": True}


def test_the_old_connection_of_a_client_that_came_back_is_cut_and_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        a.behave = lambda attempt, _: (
            Behaviour(silent_after=3, gate=asyncio.Event()) if attempt.attempt_epoch == 1 else Behaviour()
        )
        async with running_router(a) as router, router.session.post(router.url + CHAT, json=STREAM) as response:
            data = b""
            while data.count(b"id: ") < 3 or not data.endswith(b"\n\n"):
                data += await response.content.readany()
            back = await router.get(CHAT, {"Last-Event-ID": Received.of(data).last_id})
            assert back.stream.num_done == 1
            with pytest.raises(Exception, match="not completed"):
                await response.content.read()

    uvloop.run(scenario())
    assert [record for record in caplog.records if record.exc_info] == []
