"""Paths and ids of the Messages API, and the check of its `anthropic-version` header."""

import re

from starlette.types import Scope

from onward.proto.engine import ErrorInfo
from onward.web import asgi
from onward.web.json_body import short_repr

PATH = "/v1/messages"
COUNT_TOKENS_PATH = PATH + "/count_tokens"
ID_PREFIX = "msg_"
FIRST_VERSION = "2023-06-01"
"""Versions of the API are dates. From this one on messages are streamed as the typed events that this server sends. A
request without the header gets the same."""
_VERSION = re.compile(r"\d{4}-\d{2}-\d{2}")


def is_messages_path(path: str) -> bool:
    return path == PATH or path.startswith(PATH + "/")


def check_version(scope: Scope) -> ErrorInfo | None:
    """Returns why a request to the Messages API is refused for its `anthropic-version` header, or None."""
    if not is_messages_path(scope["path"]):
        return None
    version = asgi.header(scope, b"anthropic-version")
    if version is None or (_VERSION.fullmatch(version) and version >= FIRST_VERSION):
        return None
    problem = f"anthropic-version: must be a date from {FIRST_VERSION} on, got {short_repr(version)}"
    return ErrorInfo("invalid_request", problem, 400, param="anthropic-version")
