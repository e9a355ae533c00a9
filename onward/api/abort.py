"""`POST /v1/abort`: ends requests by name (see `web.aborts`), whichever api process serves them.

An aborted request is told so: a stream by an error event with the code `aborted` before its `[DONE]`, any other by a 409
with that code. The record of a stream whose client has gone is dropped. Asking again is harmless, and finds the names
unknown.
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from onward.api.engine_client import EngineClient
from onward.api.streams import Streams
from onward.web.aborts import abort_answer, asked_names, bare_name


class Aborting:
    def __init__(self, client: EngineClient, streams: Streams, max_body_bytes: int) -> None:
        self._client = client
        self._streams = streams
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        return [Route("/v1/abort", self.abort, methods=["POST"])]

    async def abort(self, request: Request) -> Response:
        ids = await asked_names(request, self._max_body_bytes)
        if ids is None:
            dropped = self._streams.drop([], everything=True)
            return abort_answer(sorted(dropped | await self._client.abort_by_name([], everything=True)), [])
        names = {given: {given, bare_name(given)} for given in ids}
        every_name = [name for each in names.values() for name in each]
        known = self._streams.drop(every_name)
        known |= await self._client.abort_by_name(every_name) if names else set()
        aborted = [given for given, each in names.items() if not known.isdisjoint(each)]
        return abort_answer(aborted, [given for given in names if given not in aborted])
