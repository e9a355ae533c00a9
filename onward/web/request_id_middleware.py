"""Middleware for every HTTP exchange, whatever its route: sets `X-Request-Id`, counts the response, and answers
requests that a check refuses."""

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
    """Returns the client's own name for its request, or an empty string."""
    return asgi.header(scope, b"x-request-id") or ""


def set_response_request_id(scope: Scope, shown_id: str) -> None:
    """Sets the response's `X-Request-Id`. The default is the client's, or else a random id."""
    scope[_SHOWN_ID] = shown_id


def bypass_middleware_for_body(scope: Scope, send: Send) -> Send:
    """Returns a `send` for streams that passes parts of a body directly to the server. Middleware looks only at the
    start of a response, so each one would cost a useless call per token."""
    direct_send: Send = scope.get(_DIRECT_SEND, send)

    def send_either(message: Message) -> Awaitable[None]:
        return direct_send(message) if message["type"] == "http.response.body" else send(message)

    return send_either


def inner_scope(scope: Scope, path: str, send: Send) -> Scope:
    """Returns the scope of a request that an endpoint makes of another endpoint of this application, to answer its own
    request with a changed answer. The answer goes to `send`. It is always a POST that begins a new stream."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"last-event-id"]
    return {**scope, "method": "POST", "path": path, "headers": headers, _DIRECT_SEND: send}


def share_response_request_id(inner: Scope, scope: Scope) -> None:
    """Gives the response of `scope` the request id of `inner`, which was made from it."""
    if _SHOWN_ID in inner:
        set_response_request_id(scope, inner[_SHOWN_ID])


def _accept_all(_: Scope) -> None:
    return None


def _same_send(_: Scope, send: Send) -> Send:
    return send


def chain_wrappers(*wrappers: Callable[[Scope, Send], Send]) -> Callable[[Scope, Send], Send]:
    """Returns a wrapper of `send` that applies all of them."""

    def wrap(scope: Scope, send: Send) -> Send:
        for wrapper in wrappers:
            send = wrapper(scope, send)
        return send

    return wrap


RequestCheck = Callable[[Scope], ErrorInfo | None]
"""Returns why a request is refused, or None."""


def first_refusal(*checks: RequestCheck) -> RequestCheck:
    """Returns a check that runs `checks` in order and returns the first refusal."""

    def refusal(scope: Scope) -> ErrorInfo | None:
        return next((info for check in checks if (info := check(scope)) is not None), None)

    return refusal


async def respond_refusal(scope: Scope, receive: Receive, send: Send) -> None:
    """Responds to a refused request with the error for which it was refused. This is the default `refusal_app`."""
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
        wrap_send: Callable[[Scope, Send], Send] = _same_send,
    ) -> None:
        """`wrap_send` wraps the `send` of every exchange, refusals and streams included."""
        self.app = app
        """The wrapped application."""
        self._counter = counter
        self._paths = frozenset(paths)
        self._refusal = check
        self._refusal_app = refusal_app
        self._access_log = access_log
        self._wrap_send = wrap_send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = self._wrap_send(scope, send)
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
            # A stream has ended by now: its events bypass this middleware, but the application returns after the last
            # one.
            if record is not None and self._access_log is not None:
                record.key_name = record.key_name or caller_name(scope)
                self._access_log.end(scope, record)


def _is_valid(client_id: str) -> bool:
    return 1 <= len(client_id) <= MAX_CLIENT_REQUEST_ID_LENGTH and all(" " <= char < "\x7f" for char in client_id)
