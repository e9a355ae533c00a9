"""Questions that any instance can answer, and that leave nothing behind: passed on as they came, and so is the answer.

If one does not answer, or has trouble of its own, the next is asked.
"""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from onward.proto.router import COUNT_TOKENS_PATH, DETOKENIZE_PATH, INPUT_TOKENS_PATH, TOKENIZE_PATH
from onward.router.client_request import model_of_body
from onward.router.stream_runner import StreamRunner, no_instance_of
from onward.router.upstream_errors import parse_error_info
from onward.web import asgi
from onward.web.anthropic_api import message_paths
from onward.web.auth.api_key_table import Caller
from onward.web.auth.authenticator import get_caller
from onward.web.error_format import error_headers
from onward.web.openai_api import response_ids
from onward.web.openai_api.model_names import with_model

MAX_TRIES = 3
INTERNAL_PATH_BY_CLIENT_PATH: Mapping[str, str] = {
    "/tokenize": TOKENIZE_PATH,
    "/detokenize": DETOKENIZE_PATH,
    message_paths.COUNT_TOKENS_PATH: COUNT_TOKENS_PATH,
    response_ids.INPUT_TOKENS_PATH: INPUT_TOKENS_PATH,
}
"""Routes for clients whose requests are passed to an instance at the same path."""


class RouterForwardEndpoint:
    def __init__(self, runner: StreamRunner, max_body_bytes: int) -> None:
        self._runner = runner
        self.max_body_bytes = max_body_bytes

    async def resolve_body(self, caller: Caller, body: bytes) -> bytes:
        """Returns the body with all that an instance cannot add to it."""
        return body

    async def __call__(self, request: Request) -> Response:
        caller = get_caller(request.scope)
        body = await asgi.read_connected_body(request.receive, self.max_body_bytes)
        body = await self.resolve_body(caller, body)
        return await self.forward(caller, INTERNAL_PATH_BY_CLIENT_PATH[request.scope["path"]], body)

    async def forward(self, caller: Caller, path: str, body: bytes) -> Response:
        """Returns the answer of an instance of the body's model."""
        runner = self._runner
        name = model_of_body(body)
        model = await runner.choose_model(name, runner.random.hex_token(), None)
        if name not in ("", model):
            body = with_model(body, model)
        for instance in runner.core.serving_instances(runner.clock.now_s(), model)[:MAX_TRIES]:
            reply = await runner.upstream.forward(instance.url, path, body, caller=caller.name)
            if reply is not None and reply.status < 500:
                reply_body, status = reply.body, reply.status
                headers = error_headers(parse_error_info(reply_body, status)) if status >= 400 else {}
                return Response(reply_body, status, headers=headers, media_type="application/json")
        raise no_instance_of(model)
