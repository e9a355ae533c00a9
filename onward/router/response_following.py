"""The events of a response for a client of a router that has come later: asks for what there is until it is over."""

import asyncio

from starlette.types import Send

from onward.errors import NotFound, OnwardError
from onward.router.responses import FoundResponses, last_number
from onward.web import http, sse
from onward.web.failures import RequestFailed, info_of
from onward.web.keys import Caller

ASK_EVERY_S = 0.2
MAX_ASK_EVERY_S = 2.0
REST_SHARE = 10
"""How much longer the pause is than the question took: an instance tells a response from its first token on each time, and
whoever follows a long one must not keep it from its other work."""
MISSING_S = 5.0
"""How long a response may be unknown to everybody, while an instance that has kept it restarts a process."""
UNTOLD_S = 60.0
"""How long it may take until there is an instance that can tell what it says."""
KEEP_ALIVE_S = 15.0
_KEEP_ALIVE = b": waiting\n\n"


async def follow(found: FoundResponses, caller: Caller, response_id: str, after: int, send: Send) -> None:
    """`after`: the number of the last event that the client has; -1: it has none."""
    record = await found.find(caller, response_id)
    events = await found.asked("events", record, after=after)
    await send(http.start_message(200, sse.HEADERS))
    silent_s, missed_s, pause_s = 0.0, 0.0, ASK_EVERY_S
    while True:
        if events:
            await send(http.part(events))
            after = max(after, last_number(events))
            silent_s = 0.0
        elif silent_s >= KEEP_ALIVE_S:
            await send(http.part(_KEEP_ALIVE))
            silent_s = 0.0
        if record.is_over and not missed_s:
            break
        await asyncio.sleep(pause_s)
        silent_s += pause_s
        asked_s = found.now_s()
        try:
            if not record.is_live:
                await found.asked("take_up", record)
            record = await found.find(caller, response_id)
            events = await found.asked("events", record, after=after)
            missed_s, pause_s = 0.0, pause_after(found.now_s() - asked_s)
        except (OnwardError, RequestFailed) as fault:
            missed_s, events, pause_s = missed_s + found.now_s() - asked_s + pause_s, b"", ASK_EVERY_S
            if missed_s >= _patience_s(fault):
                break  # deleted, or nobody is left to ask
    await send(http.part(b"", more=False))


def pause_after(took_s: float) -> float:
    return min(MAX_ASK_EVERY_S, max(ASK_EVERY_S, REST_SHARE * took_s))


def _patience_s(fault: OnwardError | RequestFailed) -> float:
    if isinstance(fault, NotFound):
        return MISSING_S
    info = fault.info if isinstance(fault, RequestFailed) else info_of(fault)
    return UNTOLD_S if info.retryable else 0.0
