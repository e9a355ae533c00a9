"""The routes of `/ui` that instances and routers share: its files, and the session, which describes the reader."""

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.version import __version__
from onward.web.auth.authenticator import GuardedRoute, RouteAccess, get_caller
from onward.web.http_responses import json_response
from onward.web.ui.static_files import (
    INDEX,
    NAMES,
    PAGE_PATH,
    SECURITY_HEADERS,
    StaticFile,
    read_static_file,
)

SESSION_PATH = f"{PAGE_PATH}/session"


class UiServerInfo(msgspec.Struct, frozen=True):
    """Facts about the server that its pages need."""

    role: str
    """`router`, or the role of an instance."""
    serves_clients: bool
    demo: bool = False
    trace_url: str = ""
    """Page of a trace, with `{trace_id}` in it."""


def static_routes() -> list[GuardedRoute]:
    routes = [_file_route(PAGE_PATH, read_static_file(INDEX))]
    return routes + [_file_route(f"{PAGE_PATH}/{name}", read_static_file(name)) for name in NAMES]


def session_route(describe: Callable[[], UiServerInfo]) -> GuardedRoute:
    """Returns the route that describes the holder of an API key and this server."""

    async def show(request: Request) -> Response:
        caller = get_caller(request.scope)
        who = {"version": __version__, "caller": caller.name, "is_admin": caller.is_admin}
        return json_response(who | msgspec.to_builtins(describe()))

    return GuardedRoute(SESSION_PATH, show, methods=["GET"], access=RouteAccess.USER)


def _file_route(path: str, file: StaticFile) -> GuardedRoute:
    headers = SECURITY_HEADERS | {"etag": file.etag, "cache-control": "no-cache"}

    async def show(request: Request) -> Response:
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return GuardedRoute(path, show, methods=["GET"], access=RouteAccess.OPEN)
