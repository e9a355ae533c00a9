"""Who calls, and whether it may: the key that an exchange shows, against what its route asks for.

Each route says itself what it asks for; one that does not cannot be built into an application. What is at no route asks
for a key as well, so that strangers learn nothing. Where there are no keys, everybody is the anonymous admin.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from onward.clock import Clock
from onward.errors import RETRY_SOON_S
from onward.proto.engine import ErrorInfo
from onward.proto.router import SIGNATURE_HEADER
from onward.transport.cluster_signature import verify_signature
from onward.web import asgi
from onward.web.auth.api_key_table import ANONYMOUS, ApiKeyTable, Caller
from onward.web.auth.cross_site import CrossSiteGuard
from onward.web.error_format import RequestFailed

_CALLER = "onward.caller"
_NO_KEY = ErrorInfo("invalid_api_key", "Authorization: a valid API key is required, as a bearer token", 401)
_NOT_ADMIN = ErrorInfo("forbidden", "Authorization: this needs the key of an admin", 403)

UNAUTHENTICATED = Caller("", "user")
"""A caller of an open route that shows no valid key."""
CLUSTER = Caller("cluster", "admin")
"""Whoever holds the cluster's key has shown that instead of a key of the table."""


class RouteAccess(Enum):
    OPEN = "open"
    """To everybody."""
    USER = "user"
    ADMIN = "admin"
    CLUSTER = "cluster"
    """To routers and instances: the endpoint asks for a proof of the cluster's key. Without a cluster key: an admin's."""


class GuardedRoute(Route):
    def __init__(self, path: str, endpoint: Callable[..., Any], *, methods: Sequence[str], access: RouteAccess) -> None:
        super().__init__(path, endpoint, methods=list(methods))
        self.access = access


@dataclass(slots=True)
class ActiveKeys:
    """The keys of a process; others take their place when the file is read again."""

    keys: ApiKeyTable


class Authenticator:
    def __init__(
        self,
        active_keys: ActiveKeys,
        routes: Sequence[BaseRoute],
        cluster_key: str,
        clock: Clock,
        *,
        answers_preflights: bool = False,
        cross_site_guard: CrossSiteGuard | None = None,
    ) -> None:
        """`answers_preflights`: browsers ask beforehand, without a key, what they may send. `cross_site_guard`: checks
        requests to a server without keys."""
        self._active_keys = active_keys
        self._routes = check_routes(routes)
        self._by_path = {route.path: route.access for route in self._routes}
        self._cluster_key = cluster_key
        self._clock = clock
        self._answers_preflights = answers_preflights
        self._cross_site_guard = cross_site_guard

    def check(self, scope: Scope) -> ErrorInfo | None:
        """Why it may not come in, if so. Else the exchange has a caller from here on."""
        if not len(self._active_keys.keys):
            scope[_CALLER] = ANONYMOUS
            return self._refusal_without_keys(scope)
        access = self._access(scope)
        scope[_CALLER] = UNAUTHENTICATED
        if access is RouteAccess.CLUSTER and self._cluster_key:
            return None
        caller = self._caller(scope)
        if access is RouteAccess.OPEN:
            scope[_CALLER] = caller or UNAUTHENTICATED
            return None
        if caller is None:
            return _NO_KEY
        scope[_CALLER] = caller
        return None if access is RouteAccess.USER or caller.is_admin else _NOT_ADMIN

    def _refusal_without_keys(self, scope: Scope) -> ErrorInfo | None:
        """A router that proves itself may call this server by any name; on routes of their own the endpoint checks it."""
        if self._cross_site_guard is None or (refusal := self._cross_site_guard.refusal(scope)) is None:
            return None
        is_cluster = bool(self._cluster_key) and (
            self._access(scope) is RouteAccess.CLUSTER or self._caller(scope) is CLUSTER
        )
        return None if is_cluster else refusal

    def _access(self, scope: Scope) -> RouteAccess:
        if self._answers_preflights and scope["method"] == "OPTIONS":
            return RouteAccess.OPEN
        access = self._by_path.get(scope["path"])
        if access is not None:
            return access
        return next(
            (route.access for route in self._routes if route.matches(scope)[0] is not Match.NONE), RouteAccess.USER
        )

    def _caller(self, scope: Scope) -> Caller | None:
        scheme, _, token = (asgi.header(scope, b"authorization") or "").partition(" ")
        if scheme.lower() == "bearer":
            return self._active_keys.keys.find(token.strip())
        signature = asgi.header(scope, SIGNATURE_HEADER.encode())
        if signature is None or not self._cluster_key:
            return None
        # Only what says nothing beside its path is proven here; what has a body is for the endpoint to check.
        is_valid = verify_signature(
            self._cluster_key, signature, scope["method"], scope["path"], b"", self._clock.wall_s()
        )
        return CLUSTER if is_valid else None


def check_routes(routes: Sequence[BaseRoute]) -> list[GuardedRoute]:
    """Raises `TypeError` for a route that does not say whom it is for."""
    for route in routes:
        if not isinstance(route, GuardedRoute):
            raise TypeError(f"{route} does not say who may use it; make it a GuardedRoute")
    return [route for route in routes if isinstance(route, GuardedRoute)]


def get_caller(scope: Scope) -> Caller:
    return scope[_CALLER]


def caller_name(scope: Scope) -> str:
    """The name of the key; empty where there is none, or none was valid."""
    caller: Caller | None = scope.get(_CALLER)
    return "" if caller is None else caller.name


def is_authenticated(scope: Scope) -> bool:
    """Whether the caller of an open route has shown a valid key, or none is needed: then it may see details."""
    return scope[_CALLER] is not UNAUTHENTICATED


def check_admin(caller: Caller) -> None:
    if not caller.is_admin:
        raise RequestFailed(_NOT_ADMIN)


def may_access(caller: Caller, stream_caller: str) -> bool:
    return caller.is_admin or caller.name == stream_caller


class ConnectionLimitMiddleware:
    """ASGI middleware inside the envelope: no caller has more exchanges open in this process than its key says."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope.get(_CALLER)
        if caller is None or caller.max_connections is None:
            await self._app(scope, receive, send)
            return
        if self._open[caller.name] >= caller.max_connections:
            await asgi.respond_error(send, _too_many(caller.max_connections))
            return
        self._open[caller.name] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open[caller.name] -= 1
            if not self._open[caller.name]:
                del self._open[caller.name]


def _too_many(limit: int) -> ErrorInfo:
    problem = f"this key has {limit} exchanges open already, as many as it may; try again later"
    return ErrorInfo("too_many_connections", problem, 429, True, retry_after_s=RETRY_SOON_S)
