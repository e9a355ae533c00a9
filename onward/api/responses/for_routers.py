"""What routers ask about responses: they hold the records, and an instance knows what the tokens in them mean."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.api.attempts import check_schema, decoded
from onward.api.proven import Proven
from onward.api.responses.form import event_bytes
from onward.api.responses.input_items import page_of
from onward.api.responses.stored import StoredResponses
from onward.api.streams import Streams
from onward.proto.router import AskResponse
from onward.web.response_context import not_over
from onward.web.response_ids import PREFIX
from onward.web.responses import json_response

MAX_OTHER_BYTES = 64 << 20
"""Of a question beside the client's body: tokens and their scores."""


class ForRouters:
    def __init__(self, stored: StoredResponses, streams: Streams, proven: Proven, max_body_bytes: int) -> None:
        self._stored = stored
        self._streams = streams
        self._proven = proven
        self._max_bytes = max_body_bytes + MAX_OTHER_BYTES
        self._decoder = msgspec.msgpack.Decoder(AskResponse)

    async def answer(self, request: Request) -> Response:
        asked = decoded(self._decoder, await self._proven.body(request, self._max_bytes))
        check_schema(asked.record.attempt)
        record = asked.record
        if asked.what == "keep":
            kept = await self._stored.keep(record)
            return json_response({"is_cancelled": kept.is_cancelled})
        if asked.what == "take_up":
            await self._stored.take_up(record, even_if_left=True)
            return json_response({})
        view = await self._stored.view(record)
        if asked.what == "failure":
            return Response(event_bytes(view.events[-1]), media_type="text/event-stream")
        if asked.what == "events":
            events = [event for event in view.events if event.number > asked.after]
            return Response(b"".join(map(event_bytes, events)), media_type="text/event-stream")
        if asked.what == "input_items":
            return json_response(page_of(view.request, record.attempt.request_id, asked.query))
        if asked.what == "context":
            if not view.is_over:
                raise not_over(PREFIX + record.attempt.request_id)
            return json_response(view.context())
        return json_response(view.response(record))
