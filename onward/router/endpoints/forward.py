"""Questions that any instance can answer, and that leave nothing behind: passed on as they came, and so is the answer.

If one does not answer, or has trouble of its own, the next is asked.
"""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from onward.errors import RETRY_SOON_S, Unavailable
from onward.proto.router import DETOKENIZE_PATH, TOKENIZE_PATH
from onward.router.stream_runner import StreamRunner
from onward.router.upstream_errors import parse_error_info
from onward.web import asgi
from onward.web.auth.authenticator import get_caller
from onward.web.error_format import error_headers

MAX_TRIES = 3
INTERNAL_PATH_BY_CLIENT_PATH: Mapping[str, str] = {"/tokenize": TOKENIZE_PATH, "/detokenize": DETOKENIZE_PATH}
"""Of clients, and where instances are asked the same."""


class RouterForwardEndpoint:
    def __init__(self, runner: StreamRunner, max_body_bytes: int) -> None:
        self._runner = runner
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        body = await asgi.read_connected_body(request.receive, self._max_body_bytes)
        runner = self._runner
        for instance in runner.core.serving_instances(runner.clock.now_s())[:MAX_TRIES]:
            path, caller = INTERNAL_PATH_BY_CLIENT_PATH[request.scope["path"]], get_caller(request.scope).name
            reply = await runner.upstream.forward(instance.url, path, body, caller=caller)
            if reply is not None and reply.status < 500:
                reply_body, status = reply.body, reply.status
                headers = error_headers(parse_error_info(reply_body, status)) if status >= 400 else {}
                return Response(reply_body, status, headers=headers, media_type="application/json")
        raise Unavailable("there is no instance that could answer", retry_after_s=RETRY_SOON_S)
