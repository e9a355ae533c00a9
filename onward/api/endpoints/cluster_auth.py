"""Authenticates requests between routers and instances, and drain requests without API keys: by the cluster signature, or,
without a cluster key, by the client's loopback address.
"""

import ipaddress

from starlette.requests import Request
from starlette.types import Scope

from onward.clock import Clock
from onward.proto.engine import ErrorInfo
from onward.proto.router import SIGNATURE_HEADER
from onward.transport.cluster_signature import verify_signature
from onward.web import asgi
from onward.web.error_format import RequestFailed

_OF_PROXIES = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"})


class ClusterAuth:
    def __init__(self, cluster_key: str, clock: Clock) -> None:
        self._cluster_key = cluster_key
        self._clock = clock

    async def authenticated_body(self, request: Request, max_bytes: int) -> bytes:
        """Reads the body and checks its cluster signature. Returns the body, or raises `RequestFailed` (403)."""
        message = await asgi.read_connected_body(request.receive, max_bytes)
        self.check(request.scope, message)
        return message

    def check(self, scope: Scope, body: bytes) -> None:
        if self._cluster_key:
            header = asgi.header(scope, SIGNATURE_HEADER.encode())
            wall_s = self._clock.wall_s()
            if not verify_signature(self._cluster_key, header, scope["method"], scope["path"], body, wall_s):
                raise _forbidden("the proof of the cluster's key is missing or wrong, or the clocks differ too much")
        elif not _is_local(scope):
            raise _forbidden("without a cluster key (--cluster-key-file) only this host may ask")


def _is_local(scope: Scope) -> bool:
    """Returns whether the client is on this machine. A request with a proxy's headers counts as remote: a local proxy
    forwards requests of other hosts."""
    if any(name in _OF_PROXIES for name, _ in scope["headers"]):
        return False
    host, _ = scope.get("client") or ("", 0)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _forbidden(problem: str) -> RequestFailed:
    return RequestFailed(ErrorInfo("forbidden", problem, 403))
