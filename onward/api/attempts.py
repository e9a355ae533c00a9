"""What a router asks of an instance: attempts at its clients' requests, and records of streams whose client has gone."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onward.api.generation import Generator, check_room
from onward.api.jobs import Backend
from onward.api.proven import Proven
from onward.api.starts import STREAM_UNKNOWN
from onward.api.streams import Streams
from onward.api.wrong_role import WRONG_ROLE
from onward.errors import InvalidRequest, TooLarge
from onward.proto import SCHEMA_VERSION
from onward.proto.router import Attempt, Find
from onward.transport.decoding import decode_message
from onward.web import http
from onward.web.envelope import with_straight_body
from onward.web.error_answers import answer_errors

MAX_OTHER_BYTES = 64 << 20
"""Of an attempt beside the client's body: tokens."""
MAX_QUESTION_BYTES = 4096
MSGPACK = "application/msgpack"

T = TypeVar("T", bound=msgspec.Struct)


class AttemptEndpoint:
    """An ASGI application. `generators` by the path that the client's request has come to; empty: a prefill instance."""

    def __init__(self, generators: Mapping[str, Generator], backend: Backend, streams: Streams, proven: Proven) -> None:
        self._num_open = 0
        self._generators = generators
        self._backend = backend
        self._streams = streams
        self._proven = proven
        self._decoder = msgspec.msgpack.Decoder(Attempt)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._num_open += 1
        send = with_straight_body(scope, send)
        try:
            await answer_errors(send, self._serve(scope, receive, send))
        finally:
            self._num_open -= 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_room(self._num_open)
        max_body_bytes = self._backend.config.max_body_bytes
        started_at_s = self._backend.clock.now_s()
        message = await http.read_body(receive, max_body_bytes + MAX_OTHER_BYTES)
        self._proven.check(scope, message)
        attempt = decoded(self._decoder, message)
        check_schema(attempt)
        if len(attempt.body) > max_body_bytes:
            raise TooLarge(f"the body is larger than {max_body_bytes} bytes, the limit of this server")
        self._streams.check_open()
        self._streams.check(attempt)
        if not attempt.was_taken:
            self._backend.fullness.check()
        await http.while_connected(receive, self._run(attempt, started_at_s, send))

    async def _run(self, attempt: Attempt, started_at_s: float, send: Send) -> None:
        if not self._generators:
            raise WRONG_ROLE
        generator = self._generators.get(attempt.path)
        if generator is None:
            raise InvalidRequest(f"path: nothing is generated at {attempt.path[:200]!r}", param="path")
        prepared = await generator.prepared(
            attempt.caller,
            attempt.body,
            lambda: generator.jobs.of_attempt(attempt, started_at_s, is_routed=True),
        )
        self._streams.check_open()
        await generator.run(prepared, send)


class Finding:
    def __init__(self, streams: Streams, proven: Proven) -> None:
        self._streams = streams
        self._proven = proven
        self._decoder = msgspec.msgpack.Decoder(Find)

    async def find(self, request: Request) -> Response:
        question = await proven_message(request, self._proven, self._decoder)
        record = await self._streams.find(question.request_id, must_answer=True)
        if record is None:
            raise STREAM_UNKNOWN
        return Response(msgspec.msgpack.encode(record), media_type=MSGPACK)


async def proven_message(request: Request, proven: Proven, decoder: "msgspec.msgpack.Decoder[T]") -> T:
    """A router's question."""
    return decoded(decoder, await proven.body(request, MAX_QUESTION_BYTES))


def check_schema(attempt: Attempt) -> None:
    if attempt.schema_version != SCHEMA_VERSION:
        problem = f"the router speaks schema {attempt.schema_version}, this instance {SCHEMA_VERSION}"
        raise InvalidRequest(problem, code="schema_version", param="schema_version")


def decoded(decoder: "msgspec.msgpack.Decoder[T]", message: bytes) -> T:
    try:
        return decode_message(decoder, message)
    except msgspec.DecodeError as fault:
        raise InvalidRequest(f"the message is not as agreed: {fault}", code="invalid_message") from None
