"""The events of a response for a client of a router that has come later: asks for what there is until it is over."""

import asyncio

from starlette.types import Send

from onward.errors import OnwardError
from onward.router.responses import FoundResponses, last_number
from onward.web import http, sse
from onward.web.failures import RequestFailed
from onward.web.keys import Caller

ASK_EVERY_S = 0.2
KEEP_ALIVE_S = 15.0
_KEEP_ALIVE = b": waiting\n\n"


async def follow(found: FoundResponses, caller: Caller, response_id: str, after: int, send: Send) -> None:
    """`after`: the number of the last event that the client has; -1: it has none."""
    record = await found.find(caller, response_id)
    events = await found.asked("events", record, after=after)
    await send(http.start_message(200, sse.HEADERS))
    silent_s = 0.0
    while True:
        if events:
            await send(http.part(events))
            after = max(after, last_number(events))
            silent_s = 0.0
        elif silent_s >= KEEP_ALIVE_S:
            await send(http.part(_KEEP_ALIVE))
            silent_s = 0.0
        if record.is_over:
            break
        await asyncio.sleep(ASK_EVERY_S)
        silent_s += ASK_EVERY_S
        try:
            if not record.is_live:
                await found.asked("take_up", record)
            record = await found.find(caller, response_id)
            events = await found.asked("events", record, after=after)
        except (OnwardError, RequestFailed):
            break  # deleted, or nobody is left to ask
    await send(http.part(b"", more=False))
