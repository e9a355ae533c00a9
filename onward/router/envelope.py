"""What every exchange with a client has: a label or an id, a key where one is asked for, and a place in the counts."""

import hmac
import secrets
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onward.obs.metrics import Counter
from onward.proto.request import ErrorInfo
from onward.router import http

MAX_LABEL_LENGTH = 256
OPEN_PATHS = frozenset({"/live"})
INTERNAL_PREFIX = "/internal/"
"""These check a proof of the cluster's key by themselves."""

_SHOWN_ID = "onward.shown_id"
_WRONG_LABEL = ErrorInfo(
    "invalid_request",
    f"X-Request-Id: must be 1 to {MAX_LABEL_LENGTH} printable ASCII characters",
    400,
    param="X-Request-Id",
)
_NO_KEY = ErrorInfo("invalid_api_key", "Authorization: a valid API key is required, as a bearer token", 401)


def label_of(scope: Scope) -> str:
    """The client's own name for its request."""
    return http.header(scope, b"x-request-id") or ""


def show_id(scope: Scope, shown: str) -> None:
    """What the response's `X-Request-Id` says."""
    scope[_SHOWN_ID] = shown


def has_key(scope: Scope, api_key: str) -> bool:
    given = http.header(scope, b"authorization") or ""
    scheme, _, token = given.partition(" ")
    # Compared as bytes, which may be any, and in a time that does not depend on how many are right.
    matches = hmac.compare_digest(token.strip().encode(), api_key.encode())
    return scheme.lower() == "bearer" and matches


class Envelope:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, requests: Counter, paths: Collection[str], api_key: str | None) -> None:
        self._app = app
        self._requests = requests
        self._paths = frozenset(paths)
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        refusal = self._refusal(scope)
        show_id(scope, label_of(scope) if label_of(scope) and refusal is not _WRONG_LABEL else secrets.token_hex(16))

        async def send_in_envelope(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", scope[_SHOWN_ID].encode())]
                self._requests.inc(path, str(message["status"]))
            await send(message)

        if refusal is not None:
            await http.respond_error(send_in_envelope, refusal)
        else:
            await self._app(scope, receive, send_in_envelope)

    def _refusal(self, scope: Scope) -> ErrorInfo | None:
        path: str = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith(INTERNAL_PREFIX)
        if self._api_key is not None and not is_open and not has_key(scope, self._api_key):
            return _NO_KEY
        label = http.header(scope, b"x-request-id")
        return _WRONG_LABEL if label is not None and not _is_valid(label) else None


def _is_valid(label: str) -> bool:
    return 1 <= len(label) <= MAX_LABEL_LENGTH and all(" " <= char < "\x7f" for char in label)
