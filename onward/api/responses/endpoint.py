"""The routes of responses, as clients use them."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from onward.api.generation import GenerationEndpoint, Generator
from onward.api.identity import Identity, identity_of
from onward.api.jobs import Backend
from onward.api.responses.background import Background
from onward.api.responses.following import Following
from onward.api.responses.input_items import page_of
from onward.api.responses.stored import StoredResponses
from onward.api.streams import Streams
from onward.proto.cursor import Cursor
from onward.proto.router import Record
from onward.web import http
from onward.web.body import decode_fields
from onward.web.error_answers import answer_errors
from onward.web.keys import Caller
from onward.web.response_context import PREVIOUS, not_over, previous_of, repeats, with_context
from onward.web.response_ids import CANCEL, INPUT_ITEMS, is_stream, starting_after

MAX_IGNORED_BYTES = 1 << 16
"""There is nothing to say in a body here."""


class CreateEndpoint(GenerationEndpoint):
    """`POST /v1/responses`; `GET` with `Last-Event-ID` goes on with a stream, as with any other."""

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
        prepared = await self.generator.prepared(identity.caller.name, whole, lambda: jobs.of_client(identity, whole))
        if not prepared.request.is_background:
            await self.generator.run(prepared, send)
            return
        await self._background.begin(prepared)
        record = await self._stored.find(identity.caller, jobs.head_of(prepared.attempt).id)
        if prepared.request.stream:
            await Following(self._stored).follow(identity.caller, record, -1, send)
        else:
            view = await self._stored.view(record)
            await http.respond(send, 200, msgspec.json.encode(view.response(record)))

    def repeats(self, known: bytes, body: bytes) -> bool:
        return repeats(known, body)

    async def completed(self, identity: Identity, body: bytes) -> bytes:
        """With the items of the response that this one goes on from: all attempts at it see the same ones."""
        previous = previous_of(decode_fields(body), body)
        if previous is None:
            return body
        view = await self._stored.view(await self._stored.find(identity.caller, previous, PREVIOUS))
        if not view.is_over:
            raise not_over(previous)
        return with_context(body, msgspec.json.encode(view.context()), self._max_body_bytes)


class ItemEndpoint:
    """Of one response: shown, followed, cancelled, deleted, or the items that it was made from."""

    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_errors(send, self._serve(scope, receive, send))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await http.read_body(receive, MAX_IGNORED_BYTES)
        caller, query = identity_of(scope).caller, QueryParams(scope["query_string"])
        work = self._answer(caller, scope["method"], scope["path"], scope["path_params"]["response_id"], query, send)
        await http.while_connected(receive, work)

    async def _answer(
        self, caller: Caller, method: str, path: str, response_id: str, query: Mapping[str, str], send: Send
    ) -> None:
        record = await self._stored.find(caller, response_id)
        if path.endswith(CANCEL):
            await self._show(await self._stored.cancel(record), send)
        elif path.endswith(INPUT_ITEMS):
            view = await self._stored.view(record)
            await _respond(send, page_of(view.request, record.attempt.request_id, query))
        elif method == "DELETE":
            await self._stored.view(record)
            await self._stored.delete(record)
            await _respond(send, {"id": response_id, "object": "response", "deleted": True})
        elif method == "GET" and is_stream(query):
            await self._stored.take_up(record, even_if_left=True)
            await Following(self._stored).follow(caller, record, starting_after(query), send)
        else:
            await self._stored.take_up(record)
            await self._show(record, send)

    async def _show(self, record: Record, send: Send) -> None:
        view = await self._stored.view(record)
        await _respond(send, view.response(record))


async def _respond(send: Send, fields: dict[str, Any]) -> None:
    await http.respond(send, 200, msgspec.json.encode(fields))
