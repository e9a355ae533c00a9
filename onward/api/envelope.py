"""What every HTTP exchange has, whatever its route: an identity, the client's label for it, and a place in the counts."""

import secrets
from collections.abc import Collection
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onward.api.failures import info_of
from onward.api.http import respond_error
from onward.clock import Clock
from onward.errors import InvalidRequest
from onward.obs.metrics import Counter

MAX_LABEL_LENGTH = 256
_KEY = "onward.identity"


@dataclass(frozen=True, slots=True)
class Identity:
    """Fixed once, before the first attempt, and the same for all of them."""

    request_id: str
    """128 random bits. A client's own id is only a label beside it."""
    created_s: int
    arrival_s: float
    """Wall clock."""
    started_at_s: float
    """This process's clock."""
    label: str = ""
    """The client's own name for its request: its `X-Request-Id`, if it sent one."""


def identity_of(scope: Scope) -> Identity:
    return scope[_KEY]


class Envelope:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, clock: Clock, requests: Counter, paths: Collection[str]) -> None:
        self._app = app
        self._clock = clock
        self._requests = requests
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        label = _label(scope)
        is_wrong = label is not None and not _is_valid(label)
        identity = scope[_KEY] = self._new_identity("" if label is None or is_wrong else label.decode())
        path = scope["path"] if scope["path"] in self._paths else "other"
        shown = (identity.label or identity.request_id).encode()

        async def send_in_envelope(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", shown)]
                self._requests.inc(path, str(message["status"]))
            await send(message)

        if is_wrong:
            problem = f"X-Request-Id: must be 1 to {MAX_LABEL_LENGTH} printable ASCII characters"
            await respond_error(send_in_envelope, info_of(InvalidRequest(problem, param="X-Request-Id")))
        else:
            await self._app(scope, receive, send_in_envelope)

    def _new_identity(self, label: str) -> Identity:
        wall_s = self._clock.wall_s()
        return Identity(secrets.token_hex(16), int(wall_s), wall_s, self._clock.now_s(), label)


def _label(scope: Scope) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == b"x-request-id"), None)


def _is_valid(label: bytes) -> bool:
    return 1 <= len(label) <= MAX_LABEL_LENGTH and all(0x20 <= byte < 0x7F for byte in label)
