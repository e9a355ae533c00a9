"""The answer of an instance that generates for nobody: it computes prompts, and decode instances ask it to."""

import contextlib

from starlette.types import Receive, Scope, Send

from onward.errors import InvalidRequest, OnwardError, TooLarge
from onward.proto.error_info import to_error_info
from onward.web import asgi

WRONG_ROLE = InvalidRequest(
    "this instance has the role prefill: it computes prompts for decode instances, and sends no text to clients; "
    "send the request to a decode or mixed instance instead",
    code="wrong_role",
)


class WrongRoleEndpoint:
    """An ASGI application. The body is read and not kept, so that the connection can be used again."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(TooLarge):
                await asgi.read_body(receive, max_bytes=0)
            await asgi.respond_error(send, to_error_info(WRONG_ROLE))
        except asgi.ClientDisconnected:
            return
        except OnwardError as error:
            await asgi.respond_error(send, to_error_info(error))
