"""`POST /v1/responses/compact` as an ASGI application, the same at an instance and at a router.

The endpoint of `/v1/responses` in the same process generates the summary, so recovery and limits are those of a response.
Nothing is stored.
"""

from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from onward.web import asgi
from onward.web.auth.authenticator import get_caller
from onward.web.error_handlers import handle_errors
from onward.web.inner_requests import HeldAnswer, run_inner_request
from onward.web.openai_api.compaction import compacted_body, decode_compact, input_items, summary_request
from onward.web.openai_api.previous_response import PREVIOUS_ID_FIELD
from onward.web.openai_api.response_endpoint import ResponseStore
from onward.web.openai_api.response_ids import PATH


class CompactEndpoint:
    def __init__(self, create_response: ASGIApp, response_store: ResponseStore, max_body_bytes: int) -> None:
        self._create_response, self._store = create_response, response_store
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await handle_errors(scope, send, self._serve(scope, receive, send))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = decode_compact(await asgi.read_body(receive, self._max_body_bytes))
        items: list[Any] = []
        if request.previous_response_id is not None:
            record = await self._store.find(get_caller(scope), request.previous_response_id, PREVIOUS_ID_FIELD)
            items = msgspec.json.decode(await self._store.context(record))
        answer = HeldAnswer()
        await run_inner_request(self._create_response, scope, PATH, summary_request(request), receive, answer)
        if answer.start is None or not answer.is_complete:
            return  # the client has disconnected
        if answer.start["status"] == 200:
            await asgi.respond(send, 200, compacted_body([*items, *input_items(request)], answer.body))
        else:
            await send(answer.start)
            await send(asgi.body_message(answer.body, more_body=False))
