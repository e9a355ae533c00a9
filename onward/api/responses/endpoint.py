"""`POST /v1/responses`, as clients use it. The routes of one response are `web.response_endpoint`."""

from functools import partial

from starlette.types import Send

from onward.api.generation import GenerationEndpoint, Generator
from onward.api.identity import Identity
from onward.api.jobs import Backend
from onward.api.responses.background import Background
from onward.api.responses.stored import StoredResponses
from onward.api.starts import STREAM_UNKNOWN
from onward.api.streams import Streams
from onward.proto.cursor import Cursor
from onward.proto.router import Record
from onward.web import http, sse
from onward.web.response_context import repeats
from onward.web.response_endpoint import completed, follow


class CreateEndpoint(GenerationEndpoint):
    """`GET` with `Last-Event-ID` goes on with a stream, as with any other."""

    def __init__(
        self, generator: Generator, backend: Backend, streams: Streams, stored: StoredResponses, background: Background
    ) -> None:
        super().__init__(generator, backend, streams)
        self._stored = stored
        self._background = background
        self._max_body_bytes = backend.config.max_body_bytes

    async def generate(self, identity: Identity, body: bytes, cursor: Cursor | None, send: Send) -> None:
        if cursor is not None:
            await super().generate(identity, body, cursor, send)
            return
        jobs, whole = self.generator.jobs, await self.completed(identity, body)
        prepared = await self.generator.prepared(identity.caller.name, whole, partial(jobs.of_client, identity, whole))
        del body, whole  # the attempt has it without whitespace
        if not prepared.request.is_background:
            await self.generator.run(prepared, send)
            return
        await self._background.begin(prepared)
        response_id = jobs.head_of(prepared.attempt).id
        if prepared.request.stream:
            await follow(self._stored, identity.caller, response_id, -1, send)
        else:
            record = await self._stored.find(identity.caller, response_id)
            await http.respond(send, 200, await self._stored.show(record))

    async def tell_end(self, record: Record, cursor: Cursor, send: Send) -> None:
        if record.attempt.seed != cursor.seed or len(cursor.choices) != 1:
            raise STREAM_UNKNOWN
        [place] = cursor.choices
        rest = b"" if place.finish_reason is not None else await self._stored.rest(record, place.position)
        await send(http.start_message(200, sse.HEADERS))
        await send(http.part(rest, more=False))

    def repeats(self, known: bytes, body: bytes) -> bool:
        return repeats(known, body)

    async def completed(self, identity: Identity, body: bytes) -> bytes:
        return await completed(self._stored, identity.caller, body, self._max_body_bytes)
