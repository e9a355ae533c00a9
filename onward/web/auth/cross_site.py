"""Refuses requests of other sites' web pages at a server without API keys.

A page of any site can make a browser on this machine, or in its network, send requests to the server. If the server has
API keys, such requests have none. Otherwise they are recognized by headers that browsers set and pages cannot change:
`Origin`, `Sec-Fetch-Site` and `Host`. Other clients do not send the first two.

With or without keys, `check_content_type` refuses bodies that pages can send to another site without a preflight.
"""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from onward.proto.engine import ErrorInfo
from onward.proto.router import IGNORED_FIELDS_HEADER, INTERNAL_PREFIX, SIGNATURE_HEADER
from onward.web import asgi, docs_page
from onward.web.auth.allowed_hosts import ANY, AllowedHosts
from onward.web.auth.host_and_origin import is_same_origin
from onward.web.json_body import short_repr
from onward.web.ui import static_files

OPEN_PATHS = frozenset({"/", "/live", "/health", docs_page.PATH}) | static_files.PATHS
"""Paths for probes, which may use any host name, and for links. They change nothing and reveal nothing about
requests."""
_OTHER_SITES = ("cross-site", "same-site")
_WITH_BODY = ("POST", "PUT", "PATCH")
JSON, MSGPACK, BYTES = "application/json", "application/msgpack", "application/octet-stream"
FORM_DATA = "multipart/form-data"
FILES_PATH = "/v1/files"
"""The only path that takes forms. Without API keys, `CrossSiteGuard` refuses the forms of other sites' pages there."""


class CrossSiteGuard:
    def __init__(self, hosts: AllowedHosts, origins: Sequence[str]) -> None:
        """`origins` are the origins of pages that may call this server."""
        self._hosts = hosts
        self._origins = frozenset(origins)

    def refusal(self, scope: Scope) -> ErrorInfo | None:
        if scope["path"] in OPEN_PATHS:
            return None
        host = asgi.header(scope, b"host")
        if host is not None and not self._hosts.allows(host):
            return _refused("Host", f"{short_repr(host)} is not a name of this server", "--allowed-host NAME")
        origin = asgi.header(scope, b"origin")
        if origin is not None:
            if self._is_allowed(origin) or is_same_origin(origin, host):
                return None
            return _refused("Origin", f"pages of {short_repr(origin)} may not call this server", "--cors-origin ORIGIN")
        if asgi.header(scope, b"sec-fetch-site") in _OTHER_SITES and ANY not in self._origins:
            return _refused("Sec-Fetch-Site", "pages of other sites may not call this server", "--cors-origin ORIGIN")
        return None

    def _is_allowed(self, origin: str) -> bool:
        return ANY in self._origins or origin in self._origins


def _refused(header: str, problem: str, flag: str) -> ErrorInfo:
    advice = f"a server without API keys needs {flag} for that"
    return ErrorInfo("forbidden", f"{header}: {problem}; {advice}", 403, param=header)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Returns the application with CORS headers, which let pages of these origins read its responses. `CrossSiteGuard`
    refuses other pages."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", IGNORED_FIELDS_HEADER],
    )


def check_content_type(scope: Scope) -> ErrorInfo | None:
    """Returns why the body is refused, or None. Pages of other sites can send forms and plain text without a preflight,
    but not JSON.

    A body without a stated type (no `Content-Type`, or `application/octet-stream`, which some HTTP libraries send for
    bytes) is taken for JSON. `FILES_PATH` takes forms and nothing else. Routes between routers and instances require a
    `Content-Type` or a cluster signature, because a page can send a body without a type.
    """
    if scope["method"] not in _WITH_BODY:
        return None
    content_type = asgi.header(scope, b"content-type")
    if scope["path"] == FILES_PATH:
        media_type = (content_type or "").partition(";")[0].strip().lower()
        return None if media_type == FORM_DATA else _unsupported(content_type, FORM_DATA)
    is_internal = scope["path"].startswith(INTERNAL_PREFIX)
    if content_type is None:
        is_accepted = not is_internal or asgi.header(scope, SIGNATURE_HEADER.encode()) is not None
    else:
        media_type = content_type.partition(";")[0].strip().lower()
        is_json = media_type in (JSON, BYTES) or media_type.endswith("+json")
        is_accepted = is_json or (is_internal and media_type == MSGPACK)
    return None if is_accepted else _unsupported(content_type, f"{MSGPACK} or {JSON}" if is_internal else JSON)


def _unsupported(content_type: str | None, expected: str) -> ErrorInfo:
    received = "there is none" if content_type is None else f"got {short_repr(content_type)}"
    advice = "-F file=@FILE -F purpose=batch" if expected == FORM_DATA else f"-H 'Content-Type: {JSON}'"
    problem = f"Content-Type: must be {expected}, {received}; with curl say {advice}"
    return ErrorInfo("unsupported_media_type", problem, 415, param="Content-Type")
