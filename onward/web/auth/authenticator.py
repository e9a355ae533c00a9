"""Finds the caller of a request by its API key, and checks it against the access that the route asks for.

Each route states its access; an application with a route that does not cannot be built. A path without a route requires
a key too, so that clients without a key learn nothing. On a server without keys every client is the anonymous admin.
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
_NO_KEY = ErrorInfo(
    "invalid_api_key", "Authorization: a valid API key is required, as a bearer token or in x-api-key", 401
)
_NOT_ADMIN = ErrorInfo("forbidden", "Authorization: this needs the key of an admin", 403)

UNAUTHENTICATED = Caller("", "user")
"""The caller of an open route without a valid key."""
CLUSTER = Caller("cluster", "admin")
"""A router or instance that has authenticated with the cluster key instead of an API key."""


class RouteAccess(Enum):
    OPEN = "open"
    """Every client may use the route."""
    USER = "user"
    ADMIN = "admin"
    CLUSTER = "cluster"
    """Routers and instances may use the route: the endpoint checks the cluster signature. Without a cluster key the
    route needs an admin's API key."""


class GuardedRoute(Route):
    def __init__(self, path: str, endpoint: Callable[..., Any], *, methods: Sequence[str], access: RouteAccess) -> None:
        super().__init__(path, endpoint, methods=list(methods))
        self.access = access


@dataclass(slots=True)
class ActiveKeys:
    """The keys of a process. They are replaced when the file is read again."""

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
        """`answers_preflights`: whether OPTIONS requests need no key, because browsers send CORS preflights without
        one. `cross_site_guard` checks requests to a server without keys."""
        self._active_keys = active_keys
        self._routes = check_routes(routes)
        self._by_path = {route.path: route.access for route in self._routes}
        self._cluster_key = cluster_key
        self._clock = clock
        self._answers_preflights = answers_preflights
        self._cross_site_guard = cross_site_guard

    def check(self, scope: Scope) -> ErrorInfo | None:
        """Returns why the request is refused, or None. Stores the caller in the scope."""
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
        """Returns the refusal of the cross-site guard, if any. A router with a valid cluster signature may use any host
        name; on cluster routes the endpoint checks the signature."""
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
        if (key := asgi.header(scope, b"x-api-key")) is not None:
            return self._active_keys.keys.find(key.strip())
        signature = asgi.header(scope, SIGNATURE_HEADER.encode())
        if signature is None or not self._cluster_key:
            return None
        # Only signatures of requests without a body are accepted here. The endpoint checks the signature of a body.
        is_valid = verify_signature(
            self._cluster_key, signature, scope["method"], scope["path"], b"", self._clock.wall_s()
        )
        return CLUSTER if is_valid else None


def check_routes(routes: Sequence[BaseRoute]) -> list[GuardedRoute]:
    """Returns the routes. Raises `TypeError` for a route that does not state its access."""
    for route in routes:
        if not isinstance(route, GuardedRoute):
            raise TypeError(f"{route} does not say who may use it; make it a GuardedRoute")
    return [route for route in routes if isinstance(route, GuardedRoute)]


def get_caller(scope: Scope) -> Caller:
    return scope[_CALLER]


def set_caller(scope: Scope, caller: Caller) -> None:
    """Sets the caller of a request that this process makes itself, which passes no `Authenticator`."""
    scope[_CALLER] = caller


def caller_name(scope: Scope) -> str:
    """Returns the name of the request's API key, or an empty string if it has no valid key."""
    caller: Caller | None = scope.get(_CALLER)
    return "" if caller is None else caller.name


def is_authenticated(scope: Scope) -> bool:
    """Returns whether the caller of an open route has a valid key, or needs none, so that it may see details."""
    return scope[_CALLER] is not UNAUTHENTICATED


def check_admin(caller: Caller) -> None:
    if not caller.is_admin:
        raise RequestFailed(_NOT_ADMIN)


def may_access(caller: Caller, stream_caller: str) -> bool:
    return caller.is_admin or caller.name == stream_caller


class ConnectionLimitMiddleware:
    """ASGI middleware inside RequestIdMiddleware that limits each caller's open exchanges in this process to
    `max_connections` of its key."""

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
