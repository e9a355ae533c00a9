"""`POST /v1/abort`: ends requests by name (see `web.aborts`), whichever api process serves them.

An aborted request is answered by what was generated of it, and each choice that was open ends with `abort`; a response is
`cancelled`. The record of a stream whose client has gone is dropped, and that of a stored response is cancelled. Asking
again is harmless, and finds the names unknown. To a caller that is no admin the names of other callers are unknown too, and
it may not end all requests; a router names the caller for which it asks.
"""

from starlette.requests import Request
from starlette.responses import Response

from onward.api.engine_client import EngineClient
from onward.api.proven import Proven
from onward.api.streams import Streams
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
        aborted, unknown = await self._abort(ids, caller.scope)
        audit.note_abort(caller, ids, aborted)
        return abort_answer(aborted, unknown)

    async def abort_for_router(self, request: Request) -> Response:
        """Which has asked whoever wants it for a key, and has noted it."""
        ids, caller = decode_abort_for(await self._proven.body(request, self._max_body_bytes))
        return abort_answer(*await self._abort(ids, caller))

    async def _abort(self, ids: list[str] | None, caller: str | None) -> tuple[list[str], list[str]]:
        """Among the requests of this caller; None: of everybody. Which names were known, and which were not."""
        if ids is None:
            return sorted(await self._end([], caller, everything=True)), []
        names = {given: {given, bare_name(given)} for given in ids}
        every_name = [name for each in names.values() for name in each]
        known = await self._end(every_name, caller) if names else set()
        aborted = [given for given, each in names.items() if not known.isdisjoint(each)]
        return aborted, [given for given in names if given not in aborted]

    async def _end(self, names: list[str], caller: str | None, *, everything: bool = False) -> set[str]:
        """What runs before what is kept: a stream that is left meanwhile has put its record by then."""
        try:
            running = await self._client.abort_by_name(names, everything=everything, caller=caller)
        finally:
            kept = await self._streams.abort_kept(names, everything=everything, caller=caller)
        return running | kept
