"""The header by which a client comes back to its stream."""

from starlette.types import Scope

from onward.proto.cursor import Cursor, parse_cursor
from onward.web import asgi
from onward.web.json_body import field_error


def parse_last_event_id(scope: Scope) -> Cursor | None:
    """The place that `Last-Event-ID` names. An empty one is none: its client has read no event yet."""
    value = asgi.header(scope, b"last-event-id")
    if not value:
        return None
    try:
        return parse_cursor(value)
    except ValueError as fault:
        raise field_error("Last-Event-ID", str(fault)) from None
