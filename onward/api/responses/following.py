"""A response's events for somebody who has come later: those from a number on, and the rest as they come.

Asks again and again for what there is, so it does not matter which process runs the response, nor whether that changes.
"""

import asyncio

from starlette.types import Send

from onward.api.responses.form import event_bytes
from onward.api.responses.stored import StoredResponses
from onward.errors import OnwardError
from onward.proto.router import Record
from onward.web import http, sse
from onward.web.keys import Caller
from onward.web.response_ids import PREFIX

ASK_EVERY_S = 0.05
ASK_LATER_S = 0.5
"""What nobody runs is taken up again no more often than this."""
PATIENCE_S = 5.0
"""For whoever has it to be found again: the process that knows where to look may be restarting."""
KEEP_ALIVE_S = 15.0
_KEEP_ALIVE = b": waiting\n\n"


class Following:
    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored

    async def follow(self, caller: Caller, record: Record, after: int, send: Send) -> None:
        """`after`: the number of the last event that the client has; -1: it has none."""
        view = await self._stored.view(record)
        events = [event for event in view.events if event.number > after]
        await send(http.start_message(200, sse.HEADERS))
        silent_s = missed_s = 0.0
        while True:
            if events:
                await send(http.part(b"".join(map(event_bytes, events))))
                silent_s = 0.0
            if view.is_over:
                break
            pause_s = ASK_EVERY_S if record.is_live and not missed_s else ASK_LATER_S
            await asyncio.sleep(pause_s)
            silent_s += pause_s
            if silent_s >= KEEP_ALIVE_S:
                await send(http.part(_KEEP_ALIVE))
                silent_s = 0.0
            try:
                record = await self._stored.find(caller, PREFIX + record.attempt.request_id)
                await self._stored.take_up(record, even_if_left=True)
                missed_s = 0.0
            except OnwardError:
                missed_s, events = missed_s + pause_s, []
                if missed_s >= PATIENCE_S:
                    break  # deleted, forgotten with the process that had it, or nobody can take it up now
                continue
            events = [event for event in view.take(record) if event.number > after]
        await send(http.part(b"", more=False))
