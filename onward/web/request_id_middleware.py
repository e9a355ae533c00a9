"""What every HTTP exchange has, whatever its route: the client's label or an id, and a place in the counts."""

import secrets
from collections.abc import Awaitable, Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onward.obs.metrics import Counter
from onward.proto.engine import ErrorInfo
from onward.web import asgi
from onward.web.server.half_closed import note_response_start

MAX_CLIENT_REQUEST_ID_LENGTH = 256

_SHOWN_ID = "onward.shown_id"
_STRAIGHT = "onward.straight_send"
_REFUSAL = "onward.refusal"
_WRONG_LABEL = ErrorInfo(
    "invalid_request",
    f"X-Request-Id: must be 1 to {MAX_CLIENT_REQUEST_ID_LENGTH} printable ASCII characters",
    400,
    param="X-Request-Id",
)


def client_request_id(scope: Scope) -> str:
    """The client's own name for its request; empty: it has none."""
    return asgi.header(scope, b"x-request-id") or ""


def set_response_request_id(scope: Scope, shown: str) -> None:
    """What the response's `X-Request-Id` says. Else it is the label, or an id that nobody knows."""
    scope[_SHOWN_ID] = shown


def bypass_middleware_for_body(scope: Scope, send: Send) -> Send:
    """For streams: the parts of a body go straight out. Whatever stands on the way from an endpoint looks at the start of
    an answer only, and would cost every token a call each."""
    straight: Send = scope.get(_STRAIGHT, send)

    def send_either(message: Message) -> Awaitable[None]:
        return straight(message) if message["type"] == "http.response.body" else send(message)

    return send_either


def _nobody_is_refused(_: Scope) -> None:
    return None


RequestCheck = Callable[[Scope], ErrorInfo | None]
"""Why a request is not served, if so."""


def first_refusal(*refusals: RequestCheck) -> RequestCheck:
    """The first reason that there is."""

    def refusal(scope: Scope) -> ErrorInfo | None:
        return next((info for one in refusals if (info := one(scope)) is not None), None)

    return refusal


async def respond_refusal(scope: Scope, receive: Receive, send: Send) -> None:
    """An ASGI application for those who may not come in."""
    await asgi.respond_error(send, scope[_REFUSAL])


class RequestIdMiddleware:
    """ASGI middleware around the whole application. `refusal`: why somebody may not come in, if so. `refusing`: tells it,
    as `refuse` does, with perhaps something around it."""

    def __init__(
        self,
        app: ASGIApp,
        requests: Counter,
        paths: Collection[str],
        refusal: RequestCheck = _nobody_is_refused,
        refusing: ASGIApp = respond_refusal,
    ) -> None:
        self.app = app
        """What is inside."""
        self._requests = requests
        self._paths = frozenset(paths)
        self._refusal = refusal
        self._refusal_app = refusing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[_STRAIGHT] = send
        path = scope["path"] if scope["path"] in self._paths else "other"
        label = asgi.header(scope, b"x-request-id")
        is_wrong = label is not None and not _is_valid(label)
        if label is not None and not is_wrong:
            set_response_request_id(scope, label)

        async def send_in_envelope(message: Message) -> None:
            if message["type"] == "http.response.start":
                shown = scope.get(_SHOWN_ID) or secrets.token_hex(16)
                message["headers"] = [*message.get("headers", []), (b"x-request-id", shown.encode())]
                self._requests.inc(path, str(message["status"]))
                note_response_start(scope, message)
            await send(message)

        refusal = self._refusal(scope) or (_WRONG_LABEL if is_wrong else None)
        if refusal is not None:
            scope[_REFUSAL] = refusal
            await self._refusal_app(scope, receive, send_in_envelope)
        else:
            await self.app(scope, receive, send_in_envelope)


def _is_valid(label: str) -> bool:
    return 1 <= len(label) <= MAX_CLIENT_REQUEST_ID_LENGTH and all(" " <= char < "\x7f" for char in label)
