"""Accepts the buttons of `--demo` only from the server's own page, on this machine.

A key alone is not enough. `Origin` must be this server's own, so that no other page can make a browser press a button.
`Host` must be a name of this machine, so that no other site's host name can point at this address.
"""

from starlette.types import Scope

from onward.proto.engine import ErrorInfo
from onward.web import asgi
from onward.web.auth.allowed_hosts import AllowedHosts
from onward.web.auth.host_and_origin import is_same_origin
from onward.web.error_format import RequestFailed
from onward.web.ui.static_files import PAGE_PATH

DEMO_PATHS = {target: f"{PAGE_PATH}/demo/{target}" for target in ("worker", "engine", "instance")}


def check_own_page(scope: Scope, listen_host: str) -> None:
    """Raises `RequestFailed` for a request that does not come from the server's own page."""
    host, origin = asgi.header(scope, b"host"), asgi.header(scope, b"origin")
    if host is None or not AllowedHosts.for_server(listen_host, ()).allows(host):
        raise _refused("Host", "is not a name of this machine")
    if origin is None or not is_same_origin(origin, host):
        raise _refused("Origin", "is not this server's own page")


def _refused(header: str, problem: str) -> RequestFailed:
    return RequestFailed(ErrorInfo("forbidden", f"{header}: {problem}; --demo serves nothing else", 403, param=header))
