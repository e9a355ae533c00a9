"""The key that a router asks its clients for, where it has one."""

import hmac

from starlette.types import Scope

from onward.proto.request import ErrorInfo
from onward.web import http

OPEN_PATHS = frozenset({"/live"})
INTERNAL_PREFIX = "/internal/"
"""These check a proof of the cluster's key by themselves."""
_NO_KEY = ErrorInfo("invalid_api_key", "Authorization: a valid API key is required, as a bearer token", 401)


class ApiKey:
    def __init__(self, api_key: str | None) -> None:
        self._api_key = api_key

    def refusal(self, scope: Scope) -> ErrorInfo | None:
        path: str = scope["path"]
        is_open = path in OPEN_PATHS or path.startswith(INTERNAL_PREFIX)
        return _NO_KEY if self._api_key is not None and not is_open and not has_key(scope, self._api_key) else None


def has_key(scope: Scope, api_key: str) -> bool:
    given = http.header(scope, b"authorization") or ""
    scheme, _, token = given.partition(" ")
    # Compared as bytes, which may be any, and in a time that does not depend on how many are right.
    matches = hmac.compare_digest(token.strip().encode(), api_key.encode())
    return scheme.lower() == "bearer" and matches
