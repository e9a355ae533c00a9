"""`POST /v1/responses/input_tokens` at a router: puts the items of an earlier response before the request, and passes it
to an instance."""

from onward.router.endpoints.forward import RouterForwardEndpoint
from onward.router.response_store import ClusterResponseStore
from onward.router.stream_runner import StreamRunner
from onward.web.auth.api_key_table import Caller
from onward.web.openai_api.response_endpoint import with_previous_response


class RouterInputTokensEndpoint(RouterForwardEndpoint):
    def __init__(self, runner: StreamRunner, max_body_bytes: int, response_store: ClusterResponseStore) -> None:
        super().__init__(runner, max_body_bytes)
        self._response_store = response_store

    async def resolve_body(self, caller: Caller, body: bytes) -> bytes:
        return await with_previous_response(self._response_store, caller, body, self.max_body_bytes)
