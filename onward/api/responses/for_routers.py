"""What routers ask about responses: they hold the records, and an instance knows what the tokens in them mean."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.api.attempts import MSGPACK, check_schema, decoded
from onward.api.proven import Proven
from onward.api.responses.stored import StoredResponses
from onward.proto.router import AskResponse
from onward.web.responses import json_response

EVENTS, JSON = "text/event-stream", "application/json"
MAX_OTHER_BYTES = 64 << 20
"""Of a question beside the client's body: tokens and their scores."""


class ForRouters:
    def __init__(self, stored: StoredResponses, proven: Proven, max_body_bytes: int) -> None:
        self._stored = stored
        self._proven = proven
        self._max_bytes = max_body_bytes + MAX_OTHER_BYTES
        self._decoder = msgspec.msgpack.Decoder(AskResponse)

    async def answer(self, request: Request) -> Response:
        asked = decoded(self._decoder, await self._proven.body(request, self._max_bytes))
        check_schema(asked.record.attempt)
        record = asked.record
        if asked.what == "keep":
            kept = await self._stored.keep(record)
            return Response(msgspec.msgpack.encode(kept), media_type=MSGPACK)
        if asked.what == "delete":
            await self._stored.delete(record)
            return json_response({})
        if asked.what == "take_up":
            await self._stored.take_up(record)
            return json_response({})
        if asked.what == "events":
            events = await self._stored.reader().events(record, asked.after)
            return Response(events, media_type=EVENTS)
        if asked.what == "rest":
            return Response(await self._stored.rest(record, asked.num_told), media_type=EVENTS)
        if asked.what == "whole":
            return Response(await self._stored.whole(record), media_type=JSON)
        if asked.what == "input_items":
            return Response(await self._stored.input_items(record, asked.query), media_type=JSON)
        if asked.what == "context":
            return Response(await self._stored.context(record), media_type=JSON)
        return Response(await self._stored.show(record), media_type=JSON)
