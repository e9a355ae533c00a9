"""Requests that web pages have a browser send, at a server that has no API keys.

A page of any site can have a browser of this machine, or of its network, send requests to the server. Where there are
keys, such requests have none. Where there are none, they are told by what browsers say about them and pages cannot
change: `Origin`, `Sec-Fetch-Site` and `Host`. Other clients do not send the first two.
"""

from collections.abc import Sequence

from starlette.types import Scope

from onward.proto.engine import ErrorInfo
from onward.web import asgi, docs_page
from onward.web.auth.allowed_hosts import ANY, AllowedHosts
from onward.web.auth.host_and_origin import is_same_origin
from onward.web.json_body import short_repr

OPEN_PATHS = frozenset({"/", "/live", "/health", docs_page.PATH})
"""For probes, which may use any name, and for links: they change nothing and tell nothing about requests."""
_OTHER_SITES = ("cross-site", "same-site")


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
