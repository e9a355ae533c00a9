"""Runs requests that generate nothing, for clients and routers: reads the body and computes the response in a thread."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.lifecycle.request_builder import ApiServices
from onward.api.requests.preprocessing_executors import DeferredRender
from onward.proto.router import CALLER_HEADER
from onward.web import asgi
from onward.web.auth.api_key_table import Caller
from onward.web.auth.authenticator import CLUSTER, get_caller
from onward.web.http_responses import json_response

Handler = Callable[[bytes], dict[str, Any] | DeferredRender[dict[str, Any]]]
WithPrevious = Callable[[Caller, bytes, int], Awaitable[bytes]]
"""Adds the items of an earlier response to a client's body, up to a number of bytes."""


class QuestionRunner:
    def __init__(self, services: ApiServices, cluster_auth: ClusterAuth) -> None:
        self._services = services
        self._cluster_auth = cluster_auth

    async def run(
        self, request: Request, handle: Handler, *, is_routed: bool = False, with_previous: WithPrevious | None = None
    ) -> Response:
        """Reads and authenticates the body, calls `handle` with it in a preprocessing thread, and returns the result as
        JSON. With `is_routed` a router has sent the request. `with_previous` adds the items of an earlier response to a
        client's body; a routed body has them already."""
        max_bytes = self._services.config.max_body_bytes
        if is_routed:
            body = await self._cluster_auth.authenticated_body(request, max_bytes)
            # The caller only decides about fair shares of the threads, so the cluster signature need not cover it.
            caller = request.headers.get(CALLER_HEADER, CLUSTER.name)
        else:
            body = await asgi.read_connected_body(request.receive, max_bytes)
            client = get_caller(request.scope)
            caller = client.name
            if with_previous is not None:
                body = await with_previous(client, body, max_bytes)
        return json_response(await self._services.executors.run_preprocessing(caller, lambda: handle(body), len(body)))
