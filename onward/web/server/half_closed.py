"""Clients that have closed their sending side: some still read the response, others have gone.

Both look the same until something is sent: only then does the kernel of a client that has gone answer with a reset. So
something is sent that clients skip: an interim response where the response has not begun, a comment in a stream of
events. The state of the socket is looked at until the response is over. Does not apply to TLS, which has no half-closed
connections.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from starlette.types import Message, Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

FIRST_LOOK_S = 0.02
MAX_PAUSE_S = 1.0
"""Between two looks, each twice as long after the one before."""
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Clients skip it, whether or not they have asked for it. Others than 100 are not known to all of them."""
COMMENT = b":\n\n"
"""Server-sent events: what begins with a colon is no event."""
_EVENT_STREAM = "onward.is_event_stream"
_TCP_CLOSE_WAIT = 8
"""Linux, `tcp_states.h`: the client has closed its side, and has not reset the connection."""


def note_response_start(scope: Scope, start: Message) -> None:
    """Of a response, for `skippable_bytes`."""
    content_types = (value for name, value in start.get("headers", []) if name.lower() == b"content-type")
    scope[_EVENT_STREAM] = next(content_types, b"").startswith(b"text/event-stream")


def skippable_bytes(scope: Scope, cycle: RequestResponseCycle) -> bytes:
    """What can be sent at this moment that the client skips; empty: nothing."""
    if not cycle.response_started:
        return PROBE if scope["http_version"] == "1.1" else b""
    if not scope.get(_EVENT_STREAM):
        return b""
    return b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT) if cycle.chunked_encoding else COMMENT


class HalfClosedWatcher:
    """Looks after one connection, from the end of what its client sends until it is stopped."""

    def __init__(self, transport: asyncio.Transport, on_gone: Callable[[], None]) -> None:
        self._transport, self._on_gone = transport, on_gone
        self._pause_s = FIRST_LOOK_S
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._check)

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if _is_reset(self._transport):
            self._on_gone()
            return
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._check)


def _is_reset(transport: asyncio.Transport) -> bool:
    """False where the system does not tell. There a write fails in the end."""
    client_socket = transport.get_extra_info("socket")
    if client_socket is None or not hasattr(socket, "TCP_INFO"):
        return False
    with contextlib.suppress(OSError):
        return client_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _TCP_CLOSE_WAIT
    return True
