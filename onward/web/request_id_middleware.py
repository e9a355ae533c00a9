"""What every HTTP exchange has, whatever its route: the client's label or an id, and a place in the counts."""

import secrets
from collections.abc import Awaitable, Callable, Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onward.obs.metrics import Counter
from onward.proto.engine import ErrorInfo
from onward.web import asgi
from onward.web.access_log import AccessLog
from onward.web.auth.authenticator import caller_name
from onward.web.server.half_closed import note_response_start

MAX_CLIENT_REQUEST_ID_LENGTH = 256

_SHOWN_ID = "onward.shown_id"
_DIRECT_SEND = "onward.straight_send"
_REFUSAL = "onward.refusal"
_INVALID_REQUEST_ID = ErrorInfo(
    "invalid_request",
    f"X-Request-Id: must be 1 to {MAX_CLIENT_REQUEST_ID_LENGTH} printable ASCII characters",
    400,
    param="X-Request-Id",
)


def client_request_id(scope: Scope) -> str:
    """The client's own name for its request; empty: it has none."""
    return asgi.header(scope, b"x-request-id") or ""


def set_response_request_id(scope: Scope, shown_id: str) -> None:
    """What the response's `X-Request-Id` says. Else it is the label, or an id that nobody knows."""
    scope[_SHOWN_ID] = shown_id


def bypass_middleware_for_body(scope: Scope, send: Send) -> Send:
    """For streams: the parts of a body go straight out. Whatever stands on the way from an endpoint looks at the start of
    an answer only, and would cost every token a call each."""
    direct_send: Send = scope.get(_DIRECT_SEND, send)

    def send_either(message: Message) -> Awaitable[None]:
        return direct_send(message) if message["type"] == "http.response.body" else send(message)

    return send_either


def _accept_all(_: Scope) -> None:
    return None


RequestCheck = Callable[[Scope], ErrorInfo | None]
"""Why a request is not served, if so."""


def first_refusal(*checks: RequestCheck) -> RequestCheck:
    """The first reason that there is."""

    def refusal(scope: Scope) -> ErrorInfo | None:
        return next((info for check in checks if (info := check(scope)) is not None), None)

    return refusal


async def respond_refusal(scope: Scope, receive: Receive, send: Send) -> None:
    """An ASGI application for those who may not come in."""
    await asgi.respond_error(send, scope[_REFUSAL])


class RequestIdMiddleware:
    """ASGI middleware around the whole application. `check`: returns why a request is refused, or None.
    `refusal_app`: writes the refusal, as `respond_refusal` does, perhaps inside other middleware."""

    def __init__(
        self,
        app: ASGIApp,
        counter: Counter,
        paths: Collection[str],
        check: RequestCheck = _accept_all,
        refusal_app: ASGIApp = respond_refusal,
        access_log: AccessLog | None = None,
    ) -> None:
        self.app = app
        """What is inside."""
        self._counter = counter
        self._paths = frozenset(paths)
        self._refusal = check
        self._refusal_app = refusal_app
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[_DIRECT_SEND] = send
        path = scope["path"] if scope["path"] in self._paths else "other"
        client_id = asgi.header(scope, b"x-request-id")
        is_wrong = client_id is not None and not _is_valid(client_id)
        if client_id is not None and not is_wrong:
            set_response_request_id(scope, client_id)
        record = None
        if self._access_log is not None:
            record = self._access_log.begin(scope, (client_id or "")[:MAX_CLIENT_REQUEST_ID_LENGTH])

        async def send_with_request_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                shown_id = scope.get(_SHOWN_ID) or secrets.token_hex(16)
                message["headers"] = [*message.get("headers", []), (b"x-request-id", shown_id.encode())]
                self._counter.inc(path, str(message["status"]))
                if record is not None:
                    record.status, record.error_code = message["status"], message.get(asgi.ERROR_CODE)
                    record.request_id = record.request_id or shown_id
                note_response_start(scope, message)
            await send(message)

        try:
            check = self._refusal(scope) or (_INVALID_REQUEST_ID if is_wrong else None)
            if check is not None:
                scope[_REFUSAL] = check
                await self._refusal_app(scope, receive, send_with_request_id)
            else:
                await self.app(scope, receive, send_with_request_id)
        finally:
            # A stream has ended by now: its events go past this middleware, but its application returns after the last.
            if record is not None and self._access_log is not None:
                record.key_name = record.key_name or caller_name(scope)
                self._access_log.end(scope, record)


def _is_valid(client_id: str) -> bool:
    return 1 <= len(client_id) <= MAX_CLIENT_REQUEST_ID_LENGTH and all(" " <= char < "\x7f" for char in client_id)
