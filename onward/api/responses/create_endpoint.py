"""`POST /v1/responses` for clients. The routes of one response are in `web.openai_api.response_endpoint`."""

from starlette.types import Send

from onward.api.lifecycle.generation_runner import GenerationEndpoint, GenerationRunner
from onward.api.lifecycle.request_builder import ApiServices
from onward.api.lifecycle.resume import STREAM_UNKNOWN
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.request_context import RequestContext
from onward.api.responses.response_store import BackgroundResponses, InstanceResponseStore
from onward.proto.cursor import Cursor
from onward.proto.router import StreamRecord
from onward.web import asgi, sse
from onward.web.openai_api.previous_response import is_same_request
from onward.web.openai_api.response_endpoint import stream_stored_response, with_previous_response


class CreateResponseEndpoint(GenerationEndpoint):
    """`GET` with `Last-Event-ID` resumes a stream, as at any other generating endpoint."""

    def __init__(
        self,
        runner: GenerationRunner,
        services: ApiServices,
        streams: StreamRegistry,
        response_store: InstanceResponseStore,
        background: BackgroundResponses,
    ) -> None:
        super().__init__(runner, services, streams)
        self._response_store = response_store
        self._background = background
        self._max_body_bytes = services.config.max_body_bytes

    async def run_prepared(self, context: RequestContext, prepared: PreparedRequest, send: Send) -> None:
        if not prepared.request.is_background or prepared.is_resumed:
            await super().run_prepared(context, prepared, send)
            return
        await self._background.start(prepared, context.access)
        response_id = self.runner.builder.object_header(prepared.attempt).id
        if prepared.request.stream:
            await stream_stored_response(self._response_store, context.caller, response_id, -1, send)
        else:
            record = await self._response_store.find(context.caller, response_id)
            await asgi.respond(send, 200, await self._response_store.show(record))

    async def send_cancelled(self, record: StreamRecord, cursor: Cursor, send: Send) -> None:
        if record.attempt.seed != cursor.seed or len(cursor.choices) != 1:
            raise STREAM_UNKNOWN
        [position] = cursor.choices
        rest = b"" if position.finish_reason is not None else await self._response_store.rest(record, position.position)
        await send(asgi.start_message(200, sse.HEADERS))
        await send(asgi.body_message(rest, more_body=False))

    def is_same_request(self, known_body: bytes, body: bytes) -> bool:
        return is_same_request(known_body, body, self._services.model.name)

    async def with_previous_items(self, context: RequestContext, body: bytes) -> bytes:
        return await with_previous_response(self._response_store, context.caller, body, self._max_body_bytes)
