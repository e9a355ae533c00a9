"""The identity of a request: fixed when it arrives, before its first attempt, and the same for all attempts."""

from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from onward.clock import Clock
from onward.random_source import RandomSource
from onward.web.access_log import AccessRecord, access_record
from onward.web.auth.api_key_table import ANONYMOUS, Caller
from onward.web.auth.authenticator import get_caller
from onward.web.auth.owned_request_ids import make_owned_id
from onward.web.request_id_middleware import client_request_id, set_response_request_id

_KEY = "onward.identity"


@dataclass(frozen=True, slots=True)
class RequestContext:
    request_id: str
    """Random; with API keys, its last digits are a hash of the caller. A client's own id is only an additional label."""
    created_s: int
    started_at_s: float
    """Arrival by this process's clock."""
    client_request_id: str = ""
    """The client's own name for its request: its `X-Request-Id`, if it sent one."""
    caller: Caller = ANONYMOUS
    access: AccessRecord = field(default_factory=AccessRecord)
    """Collects the fields of the request's access log line."""


def get_request_context(scope: Scope) -> RequestContext:
    return scope[_KEY]


class RequestContextMiddleware:
    """ASGI middleware inside `RequestIdMiddleware`; puts a `RequestContext` into the scope."""

    def __init__(self, app: ASGIApp, clock: Clock, random: RandomSource) -> None:
        self._app = app
        self._clock = clock
        self._random = random

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = get_caller(scope)
        request_id = make_owned_id(self._random.hex_token(), caller.name)
        access = access_record(scope)
        access.request_id = request_id
        context = RequestContext(
            request_id, int(self._clock.wall_s()), self._clock.now_s(), client_request_id(scope), caller, access
        )
        scope[_KEY] = context
        set_response_request_id(scope, context.client_request_id or context.request_id)
        await self._app(scope, receive, send)
