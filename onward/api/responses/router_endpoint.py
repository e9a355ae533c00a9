"""What routers ask about responses: they hold the records, and an instance knows what the tokens in them mean."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.api.endpoints.attempts import MSGPACK, check_schema, decode_cluster_message
from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.responses.response_store import InstanceResponseStore
from onward.proto.router import QueryResponse
from onward.web.http_responses import json_response

EVENTS, JSON = "text/event-stream", "application/json"
MAX_OTHER_BYTES = 64 << 20
"""Of a question beside the client's body: tokens and their scores."""


class RoutedResponseEndpoint:
    def __init__(self, stored: InstanceResponseStore, proven: ClusterAuth, max_body_bytes: int) -> None:
        self._stored = stored
        self._proven = proven
        self._max_bytes = max_body_bytes + MAX_OTHER_BYTES
        self._decoder = msgspec.msgpack.Decoder(QueryResponse)

    async def query_response(self, request: Request) -> Response:
        asked = decode_cluster_message(self._decoder, await self._proven.authenticated_body(request, self._max_bytes))
        check_schema(asked.record.attempt)
        record = asked.record
        if asked.action == "keep":
            kept = await self._stored.store(record)
            return Response(msgspec.msgpack.encode(kept), media_type=MSGPACK)
        if asked.action == "delete":
            await self._stored.delete(record)
            return json_response({})
        if asked.action == "take_up":
            await self._stored.resume(record)
            return json_response({})
        if asked.action == "events":
            events = await self._stored.reader().events(record, asked.after_event)
            return Response(events, media_type=EVENTS)
        if asked.action == "rest":
            return Response(await self._stored.rest(record, asked.num_told), media_type=EVENTS)
        if asked.action == "whole":
            return Response(await self._stored.whole(record), media_type=JSON)
        if asked.action == "input_items":
            return Response(await self._stored.input_items(record, asked.query), media_type=JSON)
        if asked.action == "context":
            return Response(await self._stored.context(record), media_type=JSON)
        return Response(await self._stored.show(record), media_type=JSON)
