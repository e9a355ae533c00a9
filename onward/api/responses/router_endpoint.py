"""Serves routers' queries about responses. A router has the records, but only an instance can turn tokens into text."""

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
"""Maximum size of a query without the client's body: tokens and their logprobs."""


class RoutedResponseEndpoint:
    def __init__(self, response_store: InstanceResponseStore, cluster_auth: ClusterAuth, max_body_bytes: int) -> None:
        self._response_store = response_store
        self._cluster_auth = cluster_auth
        self._max_bytes = max_body_bytes + MAX_OTHER_BYTES
        self._decoder = msgspec.msgpack.Decoder(QueryResponse)

    async def query_response(self, request: Request) -> Response:
        query = decode_cluster_message(
            self._decoder, await self._cluster_auth.authenticated_body(request, self._max_bytes)
        )
        check_schema(query.record.attempt)
        record = query.record
        store = self._response_store
        match query.action:
            case "keep":
                return Response(msgspec.msgpack.encode(await store.store(record)), media_type=MSGPACK)
            case "delete":
                await store.delete(record)
                return json_response({})
            case "take_up":
                await store.resume(record)
                return json_response({})
            case "events":
                return Response(await store.reader().events(record, query.after_event), media_type=EVENTS)
            case "rest":
                return Response(await store.rest(record, query.num_told), media_type=EVENTS)
            case "whole":
                return Response(await store.whole(record), media_type=JSON)
            case "input_items":
                return Response(await store.input_items(record, query.query), media_type=JSON)
            case "context":
                return Response(await store.context(record), media_type=JSON)
            case _:
                return Response(await store.show(record), media_type=JSON)
