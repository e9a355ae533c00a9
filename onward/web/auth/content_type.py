"""What a body says that it is. Pages of other sites can send forms and plain text without asking; JSON they cannot.

A body that says nothing of itself (no `Content-Type`, or `application/octet-stream`, which some HTTP libraries send for
bytes) is taken for JSON. Routes between routers and instances want a `Content-Type`, or a proof of the cluster's key: a
page can send a body without a type.
"""

from starlette.types import Scope

from onward.proto.engine import ErrorInfo
from onward.proto.router import INTERNAL_PREFIX, SIGNATURE_HEADER
from onward.web import asgi
from onward.web.json_body import short_repr

_WITH_BODY = ("POST", "PUT", "PATCH")
JSON, MSGPACK, BYTES = "application/json", "application/msgpack", "application/octet-stream"


def check_content_type(scope: Scope) -> ErrorInfo | None:
    """Why the body is not looked at, if so."""
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
