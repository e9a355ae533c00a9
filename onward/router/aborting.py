"""`POST /v1/abort`: ends requests by name, whichever instance has them, and so that no attempt brings them back.

    {"ids": ["chatcmpl-5f0c…", "my label"]}   or   {"all": true}      ->      {"aborted": […], "unknown": […]}

A name is a response's id, with or without what stands before its 32 hexadecimal digits, or the `X-Request-Id` that the
request was sent with. Names that nobody knows here are asked for at the instances.
"""

import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.errors import ClientError, InvalidRequest
from onward.router import http
from onward.router.envelope import MAX_LABEL_LENGTH
from onward.router.serving import Serving

MAX_IDS = 1024
_RESPONSE_ID = re.compile(r"(?:chatcmpl|cmpl|gen)-([0-9a-f]{32})")


class AbortRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ids: list[str] | None = None
    all: bool | None = None


_decoder = msgspec.json.Decoder(AbortRequest)


class Aborting:
    def __init__(self, serving: Serving, max_body_bytes: int) -> None:
        self._serving = serving
        self._max_body_bytes = max_body_bytes

    async def abort(self, request: Request) -> Response:
        try:
            body = await http.read_body(request.receive, self._max_body_bytes)
        except http.Disconnected:
            raise ClientError("the client has gone") from None
        given = decode_abort(body)
        if given is None:
            return _answer(sorted(await self._serving.abort(None)), [])
        names = {one: _bare(one) for one in given}
        known = await self._serving.abort([*names.values()]) if names else set()
        aborted = [one for one, bare in names.items() if one in known or bare in known]
        return _answer(aborted, [one for one in names if one not in aborted])


def decode_abort(body: bytes) -> list[str] | None:
    """The names, or None for everything."""
    try:
        request = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as fault:
        raise InvalidRequest(f"the body: {fault}") from None
    if request.all:
        if request.ids is not None:
            raise InvalidRequest("ids: not allowed with all: true", param="ids")
        return None
    if request.ids is None:
        raise InvalidRequest("ids: is required, unless all is true", param="ids")
    if len(request.ids) > MAX_IDS:
        raise InvalidRequest(f"ids: at most {MAX_IDS} ids, got {len(request.ids)}", param="ids")
    for index, one in enumerate(request.ids):
        if not 1 <= len(one) <= MAX_LABEL_LENGTH:
            param = f"ids[{index}]"
            problem = f"must have 1 to {MAX_LABEL_LENGTH} characters, got {len(one)}"
            raise InvalidRequest(f"{param}: {problem}", param=param)
    return request.ids


def _bare(name: str) -> str:
    ours = _RESPONSE_ID.fullmatch(name)
    return ours[1] if ours else name


def _answer(aborted: list[str], unknown: list[str]) -> Response:
    return Response(msgspec.json.encode({"aborted": aborted, "unknown": unknown}), media_type="application/json")
