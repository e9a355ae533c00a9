"""Requests that web pages have a browser send, at a server that has no API keys.

A page of any site can have a browser of this machine, or of its network, send requests to the server. Where there are
keys, such requests have none. Where there are none, they are told by what browsers say about them and pages cannot
change: `Origin`, `Sec-Fetch-Site` and `Host`. Other clients do not send the first two.

With or without keys, `check_content_type` refuses the bodies that pages can send to another site without asking.
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
"""For probes, which may use any name, and for links: they change nothing and tell nothing about requests."""
_OTHER_SITES = ("cross-site", "same-site")
_WITH_BODY = ("POST", "PUT", "PATCH")
JSON, MSGPACK, BYTES = "application/json", "application/msgpack", "application/octet-stream"


class CrossSiteGuard:
    def __init__(self, hosts: AllowedHosts, origins: Sequence[str]) -> None:
        """`origins`: of the pages that may call."""
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
    """The application with the headers that let a browser show its answers to pages of these origins. `CrossSiteGuard`
    refuses the others."""
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
    """Why the body is refused, or None. Pages of other sites can send forms and plain text without asking; JSON they
    cannot.

    A body without a stated type (no `Content-Type`, or `application/octet-stream`, which some HTTP libraries send for
    bytes) is taken for JSON. Routes between routers and instances want a `Content-Type`, or a proof of the cluster's key: a
    page can send a body without a type.
    """
    if scope["method"] not in _WITH_BODY:
        return None
    content_type = asgi.header(scope, b"content-type")
    is_internal = scope["path"].startswith(INTERNAL_PREFIX)
    if content_type is None:
        is_accepted = not is_internal or asgi.header(scope, SIGNATURE_HEADER.encode()) is not None
    else:
        media_type = content_type.partition(";")[0].strip().lower()
        is_json = media_type in (JSON, BYTES) or media_type.endswith("+json")
        is_accepted = is_json or (is_internal and media_type == MSGPACK)
    return None if is_accepted else _unsupported(content_type, is_internal)


def _unsupported(content_type: str | None, is_internal: bool) -> ErrorInfo:
    expected = f"{MSGPACK} or {JSON}" if is_internal else JSON
    received = "there is none" if content_type is None else f"got {short_repr(content_type)}"
    problem = f"Content-Type: must be {expected}, {received}; with curl say -H 'Content-Type: {JSON}'"
    return ErrorInfo("unsupported_media_type", problem, 415, param="Content-Type")
