"""`POST /v1/abort`: ends requests by name, whichever api process serves them.

    {"ids": ["chatcmpl-5f0c…", "my label"]}   or   {"all": true}      ->      {"aborted": […], "unknown": […]}

A name is a response's id, with or without what stands before its 32 hexadecimal digits, or the `X-Request-Id` that the
request was sent with; it is compared whole. The answer repeats the names as they came; with `all` it has the ids. An
aborted request is told so: a stream by an error event with the code `aborted` before its `[DONE]`, any other by a 409
with that code. The record of a stream whose client has gone is dropped. Asking again is harmless, and finds the names
unknown.
"""

import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from onward.api import http
from onward.api.body import decode, wrong
from onward.api.engine_client import EngineClient
from onward.api.envelope import MAX_LABEL_LENGTH
from onward.api.streams import Streams
from onward.errors import ClientError

MAX_IDS = 1024
_RESPONSE_ID = re.compile(r"(?:chatcmpl|cmpl|gen)-([0-9a-f]{32})")


class AbortRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ids: list[str] | None = None
    all: bool | None = None


_decoder = msgspec.json.Decoder(AbortRequest)


class Aborting:
    def __init__(self, client: EngineClient, streams: Streams, max_body_bytes: int) -> None:
        self._client = client
        self._streams = streams
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        return [Route("/v1/abort", self.abort, methods=["POST"])]

    async def abort(self, request: Request) -> Response:
        try:
            body = await http.read_body(request.scope, request.receive, self._max_body_bytes)
        except http.Disconnected:
            raise ClientError("the client has gone") from None
        ids = decode_abort(body)
        if ids is None:
            dropped = self._streams.drop([], everything=True)
            return _answer(sorted(dropped | await self._client.abort_by_name([], everything=True)), [])
        names = {given: _names(given) for given in ids}
        every_name = [name for each in names.values() for name in each]
        known = self._streams.drop(every_name)
        known |= await self._client.abort_by_name(every_name) if names else set()
        aborted = [given for given, each in names.items() if not known.isdisjoint(each)]
        return _answer(aborted, [given for given in names if given not in aborted])


def decode_abort(body: bytes) -> list[str] | None:
    """The names, or None for everything."""
    request = decode(body, _decoder)
    if request.all:
        if request.ids is not None:
            raise wrong("ids", "not allowed with all: true")
        return None
    if request.ids is None:
        raise wrong("ids", "is required, unless all is true")
    if len(request.ids) > MAX_IDS:
        raise wrong("ids", f"at most {MAX_IDS} ids, got {len(request.ids)}")
    for index, given in enumerate(request.ids):
        if not 1 <= len(given) <= MAX_LABEL_LENGTH:
            raise wrong(f"ids[{index}]", f"must have 1 to {MAX_LABEL_LENGTH} characters, got {len(given)}")
    return request.ids


def _names(given: str) -> list[str]:
    """What the engine may know this by."""
    ours = _RESPONSE_ID.fullmatch(given)
    return [given, ours[1]] if ours else [given]


def _answer(aborted: list[str], unknown: list[str]) -> Response:
    return Response(msgspec.json.encode({"aborted": aborted, "unknown": unknown}), media_type="application/json")
