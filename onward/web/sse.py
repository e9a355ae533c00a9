"""Encodes server-sent events for clients, and events that an instance sends only to a router. Also parses the header
with which a client resumes its stream."""

from starlette.types import Scope

from onward.proto.cursor import Cursor, parse_cursor
from onward.proto.engine import ErrorInfo
from onward.proto.router import StreamProgress
from onward.web import asgi
from onward.web.error_format import error_body
from onward.web.json_body import field_error

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"
HELD_COMMENT = b": held\n"
"""Comment before an event between instance and router: the router sends the event together with the next one that has
an id, or not at all."""


def event(data: bytes, cursor: str | None = None) -> bytes:
    if cursor is None:
        return b"data: %b\n\n" % data
    return b"id: %b\ndata: %b\n\n" % (cursor.encode(), data)


def cursor_event(cursor: str) -> bytes:
    """Returns an event with a cursor and no data: it advances the cursor, and a client has nothing to read in it."""
    return b"id: %b\ndata:\n\n" % cursor.encode()


def named_event(name: str, data: bytes, cursor: str | None = None) -> bytes:
    event = b"event: %b\ndata: %b\n\n" % (name.encode(), data)
    return event if cursor is None else b"id: %b\n%b" % (cursor.encode(), event)


def error_event(info: ErrorInfo, partial: bytes | None = None) -> bytes:
    return named_event("error", error_body(info, partial))


def progress_comment(progress: StreamProgress) -> bytes:
    comment = f": progress {progress.engine} {progress.step} {progress.num_computed} {progress.queue_position}\n\n"
    return comment.encode()


def parse_last_event_id(scope: Scope) -> Cursor | None:
    """Returns the cursor in `Last-Event-ID`, or None without one. An empty header means that the client has read no
    event yet."""
    value = asgi.header(scope, b"last-event-id")
    if not value:
        return None
    try:
        return parse_cursor(value)
    except ValueError as fault:
        raise field_error("Last-Event-ID", str(fault)) from None
