"""`POST /v1/abort`: ends requests by name (see `web.aborts`), whichever api process serves them.

An aborted request is answered by what was generated of it, and each choice that was open ends with `abort`; a response is
`cancelled`. The record of a stream whose client has gone is dropped, and that of a stored response is cancelled. Asking
again is harmless, and finds the names unknown. To a caller that is no admin the names of other callers are unknown too, and
it may not end all requests; a router names the caller for which it asks.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.api.engine_client import EngineClient
from onward.api.proven import Proven
from onward.api.streams import Ended, Streams
from onward.proto.router import AbortAtInstance
from onward.web import audit
from onward.web.aborts import abort_answer, asked_names, bare_name, decode_abort_for
from onward.web.callers import caller_of, check_admin


class Aborting:
    def __init__(self, client: EngineClient, streams: Streams, max_body_bytes: int, proven: Proven) -> None:
        self._client = client
        self._streams = streams
        self._max_body_bytes = max_body_bytes
        self._proven = proven

    async def abort(self, request: Request) -> Response:
        caller = caller_of(request.scope)
        ids = await asked_names(request, self._max_body_bytes)
        if ids is None:
            check_admin(caller)
        ended = await self._end(ids, caller.scope)
        aborted, unknown = _in_words_of(ids, ended.names)
        audit.note_abort(caller, ids, aborted)
        return abort_answer(aborted, unknown)

    async def abort_for_router(self, request: Request) -> Response:
        """Which has asked whoever wants it for a key, and has noted it. A response that nothing runs here is left as it is:
        another instance may have more of it, and only the router can ask them all."""
        ids, caller = decode_abort_for(await self._proven.body(request, self._max_body_bytes))
        ended = await self._end(ids, caller, leaves_idle=True)
        aborted, _ = _in_words_of(ids, ended.names)
        answer = AbortAtInstance(aborted, ended.idle)
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def _end(self, ids: list[str] | None, caller: str | None, *, leaves_idle: bool = False) -> Ended:
        """Among the requests of this caller; None: of everybody. What runs before what is kept: a stream that is left
        meanwhile has put its record by then."""
        everything = ids is None
        names = list({name for given in ids or () for name in (given, bare_name(given))})
        if not names and not everything:
            return Ended(set(), {})
        running = set[str]()
        try:
            running = await self._client.abort_by_name(names, everything=everything, caller=caller)
        finally:
            kept = await self._streams.abort_kept(names, everything, caller, leaves_idle=leaves_idle)
        return Ended(running | kept.names, kept.idle)


def _in_words_of(ids: list[str] | None, ended: set[str]) -> tuple[list[str], list[str]]:
    """Which of the names that were asked for were known, and which were not."""
    if ids is None:
        return sorted(ended), []
    ids = list(dict.fromkeys(ids))
    aborted = [given for given in ids if not ended.isdisjoint((given, bare_name(given)))]
    return aborted, [given for given in ids if given not in aborted]
