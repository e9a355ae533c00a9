"""The routes of one response at a router: shown, followed, cancelled, deleted, or the items that it was made from."""

from collections.abc import Mapping

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from onward.proto.router import Record
from onward.router.response_creation import sketch_of
from onward.router.response_following import follow
from onward.router.responses import FoundResponses
from onward.router.serving import Serving
from onward.web import http
from onward.web.body import wrong
from onward.web.callers import caller_of
from onward.web.error_answers import answer_errors
from onward.web.keys import Caller
from onward.web.response_ids import CANCEL, INPUT_ITEMS, is_stream, starting_after

MAX_IGNORED_BYTES = 1 << 16


class ResponseItems:
    """An ASGI application."""

    def __init__(self, serving: Serving, found: FoundResponses) -> None:
        self._serving = serving
        self._found = found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_errors(send, self._serve(scope, receive, send))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await http.read_body(receive, MAX_IGNORED_BYTES)
        query = QueryParams(scope["query_string"])
        response_id = scope["path_params"]["response_id"]
        work = self._answer(caller_of(scope), scope["method"], scope["path"], response_id, query, send)
        await http.while_connected(receive, work)

    async def _answer(
        self, caller: Caller, method: str, path: str, response_id: str, query: Mapping[str, str], send: Send
    ) -> None:
        record = await self._found.find(caller, response_id)
        if path.endswith(CANCEL):
            await self._cancel(record)
            await self._show(await self._found.find(caller, response_id), send)
        elif path.endswith(INPUT_ITEMS):
            await http.respond(send, 200, await self._found.asked("input_items", record, query=query))
        elif method == "DELETE":
            await self._delete(record)
            told = {"id": response_id, "object": "response", "deleted": True}
            await http.respond(send, 200, msgspec.json.encode(told))
        elif method == "GET" and is_stream(query):
            await follow(self._found, caller, response_id, starting_after(query), send)
        else:
            if not (record.is_live or record.is_over) and sketch_of(record.attempt.body).background:
                await self._found.asked("take_up", record)
            await self._show(record, send)

    async def _show(self, record: Record, send: Send) -> None:
        await http.respond(send, 200, await self._found.asked("show", record))

    async def _cancel(self, record: Record) -> None:
        if not sketch_of(record.attempt.body).background:
            raise wrong("response_id", "only a response with background: true can be cancelled")
        if not record.is_over:
            await self._found.cancel(record)

    async def _delete(self, record: Record) -> None:
        await self._found.asked("show", record)  # it is unknown unless it is stored
        await self._serving.abort([record.attempt.request_id], record.attempt.caller or None)
