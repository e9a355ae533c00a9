"""Request and response of `POST /v1/abort`, at an instance or a router.

    {"ids": ["chatcmpl-5f0c…", "my label"]}   or   {"all": true}      ->      {"aborted": […], "unknown": […]}

A name is a response's id, with or without the prefix of its 32 hexadecimal digits, or the `X-Request-Id` that the
request was sent with; the whole name has to match. The answer repeats the names as they were sent; with `all` it has
the ids.
"""

import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.errors import ClientError
from onward.web import asgi
from onward.web.json_body import decode, field_error
from onward.web.request_id_middleware import MAX_CLIENT_REQUEST_ID_LENGTH

MAX_IDS = 1024
_RESPONSE_ID = re.compile(r"(?:(?:chatcmpl|cmpl|gen)-|resp_|msg_)([0-9a-f]{32})")


class AbortRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ids: list[str] | None = None
    all: bool | None = None


class RoutedAbortRequest(AbortRequest, frozen=True, forbid_unknown_fields=True):
    """The body of an abort that a router sends to an instance."""

    caller: str | None = None
    """Only this caller's requests are aborted. None: those of all callers."""


_decoder = msgspec.json.Decoder(AbortRequest)
_for_caller = msgspec.json.Decoder(RoutedAbortRequest)


async def read_abort_names(request: Request, max_body_bytes: int) -> list[str] | None:
    """Returns the names, or None for all requests."""
    try:
        body = await asgi.read_body(request.receive, max_body_bytes)
    except asgi.ClientDisconnected:
        raise ClientError("the client has gone") from None
    return decode_abort(body)


def decode_abort(body: bytes) -> list[str] | None:
    """Returns the names, or None for all requests."""
    return _names(decode(body, _decoder), MAX_IDS)


def decode_routed_abort(body: bytes) -> tuple[list[str] | None, str | None]:
    """Returns the names and the caller. A router sends up to twice as many names: each one as its client sent it, and
    the id that the router has found for it."""
    request = decode(body, _for_caller)
    return _names(request, 2 * MAX_IDS), request.caller


def _names(request: AbortRequest, max_ids: int) -> list[str] | None:
    if request.all:
        if request.ids is not None:
            raise field_error("ids", "not allowed with all: true")
        return None
    if request.ids is None:
        raise field_error("ids", "is required, unless all is true")
    if len(request.ids) > max_ids:
        raise field_error("ids", f"at most {max_ids} ids, got {len(request.ids)}")
    for index, request_id in enumerate(request.ids):
        if not 1 <= len(request_id) <= MAX_CLIENT_REQUEST_ID_LENGTH:
            raise field_error(
                f"ids[{index}]", f"must have 1 to {MAX_CLIENT_REQUEST_ID_LENGTH} characters, got {len(request_id)}"
            )
    return request.ids


def without_id_prefix(request_id: str) -> str:
    """Returns a response's id without its prefix, and any other name unchanged."""
    match = _RESPONSE_ID.fullmatch(request_id)
    return match[1] if match else request_id


def abort_response(aborted: list[str], unknown: list[str]) -> Response:
    return Response(msgspec.json.encode({"aborted": aborted, "unknown": unknown}), media_type="application/json")
