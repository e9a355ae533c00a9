"""`POST /v1/responses`, as clients use it. The routes of one response are `web.openai_api.response_endpoint`."""

from functools import partial

from starlette.types import Send

from onward.api.lifecycle.generation_runner import GenerationEndpoint, GenerationRunner
from onward.api.lifecycle.request_builder import ApiServices
from onward.api.lifecycle.resume import STREAM_UNKNOWN
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.requests.request_context import RequestContext
from onward.api.responses.background import BackgroundResponses
from onward.api.responses.response_store import InstanceResponseStore
from onward.proto.cursor import Cursor
from onward.proto.router import StreamRecord
from onward.web import asgi, sse
from onward.web.openai_api.previous_response import is_same_request
from onward.web.openai_api.response_endpoint import stream_stored_response, with_previous_response


class CreateResponseEndpoint(GenerationEndpoint):
    """`GET` with `Last-Event-ID` goes on with a stream, as with any other."""

    def __init__(
        self,
        generator: GenerationRunner,
        backend: ApiServices,
        streams: StreamRegistry,
        stored: InstanceResponseStore,
        background: BackgroundResponses,
    ) -> None:
        super().__init__(generator, backend, streams)
        self._stored = stored
        self._background = background
        self._max_body_bytes = backend.config.max_body_bytes

    async def generate(self, identity: RequestContext, body: bytes, cursor: Cursor | None, send: Send) -> None:
        if cursor is not None:
            await super().generate(identity, body, cursor, send)
            return
        jobs, whole = self.generator.builder, await self.with_previous_items(identity, body)
        prepared = await self.generator.prepare(
            identity.caller.name, whole, partial(jobs.prepare_client_request, identity, whole)
        )
        del body, whole  # the attempt has it without whitespace
        if not prepared.request.is_background:
            await self.generator.run(prepared, send)
            return
        await self._background.start(prepared)
        response_id = jobs.object_header(prepared.attempt).id
        if prepared.request.stream:
            await stream_stored_response(self._stored, identity.caller, response_id, -1, send)
        else:
            record = await self._stored.find(identity.caller, response_id)
            await asgi.respond(send, 200, await self._stored.show(record))

    async def tell_end(self, record: StreamRecord, cursor: Cursor, send: Send) -> None:
        if record.attempt.seed != cursor.seed or len(cursor.choices) != 1:
            raise STREAM_UNKNOWN
        [place] = cursor.choices
        rest = b"" if place.finish_reason is not None else await self._stored.rest(record, place.position)
        await send(asgi.start_message(200, sse.HEADERS))
        await send(asgi.body_message(rest, more=False))

    def is_same_request(self, known: bytes, body: bytes) -> bool:
        return is_same_request(known, body)

    async def with_previous_items(self, identity: RequestContext, body: bytes) -> bytes:
        return await with_previous_response(self._stored, identity.caller, body, self._max_body_bytes)
