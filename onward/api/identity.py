"""Who a request is: fixed when it comes in, before its first attempt, and the same for all of them."""

from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from onward.chance import Chance
from onward.clock import Clock
from onward.web.callers import caller_of
from onward.web.envelope import label_of, show_id
from onward.web.keys import ANONYMOUS, Caller
from onward.web.owned_ids import owned_id

_KEY = "onward.identity"


@dataclass(frozen=True, slots=True)
class Identity:
    request_id: str
    """Random, and marked as its caller's. A client's own id is only a label beside it."""
    created_s: int
    started_at_s: float
    """This process's clock."""
    label: str = ""
    """The client's own name for its request: its `X-Request-Id`, if it sent one."""
    caller: Caller = ANONYMOUS


def identity_of(scope: Scope) -> Identity:
    return scope[_KEY]


class Identified:
    """ASGI middleware inside the envelope."""

    def __init__(self, app: ASGIApp, clock: Clock, chance: Chance) -> None:
        self._app = app
        self._clock = clock
        self._chance = chance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = caller_of(scope)
        request_id = owned_id(self._chance.token(), caller.name)
        identity = Identity(request_id, int(self._clock.wall_s()), self._clock.now_s(), label_of(scope), caller)
        scope[_KEY] = identity
        show_id(scope, identity.label or identity.request_id)
        await self._app(scope, receive, send)
