"""Endpoints for routers: attempts at clients' requests, records of detached streams, and tokenizer files."""

import contextlib
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.lifecycle.generation_runner import GenerationRunner, check_open_requests
from onward.api.lifecycle.request_builder import ApiServices
from onward.api.lifecycle.resume import STREAM_UNKNOWN, needs_prior_logprobs, with_prior_logprobs
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.errors import InvalidRequest, OnwardError, TooLarge
from onward.proto import SCHEMA_VERSION
from onward.proto.error_info import to_error_info
from onward.proto.router import Attempt, FindStream, QueryTokenizerFiles
from onward.text.prompt_tokenizer import read_tokenizer_files
from onward.transport.message_decoding import decode_message
from onward.web import asgi
from onward.web.access_log import AccessRecord, access_record
from onward.web.auth.authenticator import CLUSTER
from onward.web.error_handlers import handle_errors
from onward.web.request_id_middleware import bypass_middleware_for_body

WRONG_ROLE = InvalidRequest(
    "this instance has the role prefill: it computes prompts for decode instances, and sends no text to clients; "
    "send the request to a decode or mixed instance instead",
    code="wrong_role",
)


class WrongRoleEndpoint:
    """An ASGI application that refuses requests which a prefill instance does not serve. It reads and discards the body, so
    that the connection can be reused."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(TooLarge):
                await asgi.read_body(receive, max_bytes=0)
            await asgi.respond_error(send, to_error_info(WRONG_ROLE))
        except asgi.ClientDisconnected:
            return
        except OnwardError as error:
            await asgi.respond_error(send, to_error_info(error))


MAX_ATTEMPT_OVERHEAD_BYTES = 64 << 20
"""Maximum size of an attempt without the client's body: its tokens."""
MAX_QUERY_BYTES = 4096
MSGPACK = "application/msgpack"

T = TypeVar("T", bound=msgspec.Struct)

_attempt_decoder = msgspec.msgpack.Decoder(Attempt)


class AttemptEndpoint:
    """An ASGI application that runs a router's attempts. `runners`: by the path of the client's request; empty in a prefill
    instance."""

    def __init__(
        self,
        runners: Mapping[str, GenerationRunner],
        services: ApiServices,
        streams: StreamRegistry,
        cluster_auth: ClusterAuth,
    ) -> None:
        self._num_open = 0
        self._runners = runners
        self._services = services
        self._streams = streams
        self._cluster_auth = cluster_auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._num_open += 1
        send = bypass_middleware_for_body(scope, send)
        try:
            await handle_errors(scope, send, self._serve(scope, receive, send))
        finally:
            self._num_open -= 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_open_requests(self._num_open)
        started_at_s = self._services.clock.now_s()
        attempt = await read_attempt(scope, receive, self._services.config.max_body_bytes, self._cluster_auth)
        access = access_record(scope)
        attempt = msgspec.structs.replace(attempt, trace=access.begin_routed_trace(attempt.request_id, attempt.trace))
        access.describe_request(attempt.path, attempt.body)
        self._streams.check_not_draining()
        self._streams.check_attempt(attempt)
        if not attempt.was_accepted:
            self._services.load_shedder.check()
        await asgi.run_until_disconnect(receive, self._run(attempt, started_at_s, access, send))

    async def _run(self, attempt: Attempt, started_at_s: float, access: AccessRecord, send: Send) -> None:
        if not self._runners:
            raise WRONG_ROLE
        runner = self._runners.get(attempt.path)
        if runner is None:
            raise InvalidRequest(f"path: nothing is generated at {attempt.path[:200]!r}", param="path")
        prepared = await runner.prepare(
            attempt.caller,
            attempt.body,
            lambda: runner.builder.prepare_attempt(attempt, started_at_s, is_routed=True),
        )
        if needs_prior_logprobs(prepared):
            # The router has only the tokens. The record of an earlier attempt that ran here has their logprobs.
            record = await self._streams.find(attempt.request_id, caller=attempt.caller)
            prepared = with_prior_logprobs(prepared, record)
        self._streams.check_not_draining()
        await runner.run(prepared, send, access=access)


class FindStreamEndpoint:
    def __init__(self, streams: StreamRegistry, cluster_auth: ClusterAuth) -> None:
        self._streams = streams
        self._cluster_auth = cluster_auth
        self._decoder = msgspec.msgpack.Decoder(FindStream)

    async def find(self, request: Request) -> Response:
        query = await read_cluster_message(request, self._cluster_auth, self._decoder)
        record = await self._streams.find(query.request_id, require_reply=True)
        if record is None:
            raise STREAM_UNKNOWN
        return Response(msgspec.msgpack.encode(record), media_type=MSGPACK)


async def read_cluster_message(request: Request, cluster_auth: ClusterAuth, decoder: "msgspec.msgpack.Decoder[T]") -> T:
    """Reads, authenticates and decodes a router's query."""
    return decode_cluster_message(decoder, await cluster_auth.authenticated_body(request, MAX_QUERY_BYTES))


async def read_attempt(scope: Scope, receive: Receive, max_body_bytes: int, cluster_auth: ClusterAuth) -> Attempt:
    message = await asgi.read_body(receive, max_body_bytes + MAX_ATTEMPT_OVERHEAD_BYTES)
    cluster_auth.check(scope, message)
    attempt = decode_cluster_message(_attempt_decoder, message)
    check_schema(attempt)
    access_record(scope).describe(attempt.request_id, attempt.client_request_id, attempt.caller)
    if len(attempt.body) > max_body_bytes:
        raise TooLarge(f"the body is larger than {max_body_bytes} bytes, the limit of this server")
    return attempt


def check_schema(attempt: Attempt) -> None:
    if attempt.schema_version != SCHEMA_VERSION:
        problem = f"the router speaks schema {attempt.schema_version}, this instance {SCHEMA_VERSION}"
        raise InvalidRequest(problem, code="schema_version", param="schema_version")


def decode_cluster_message(decoder: "msgspec.msgpack.Decoder[T]", message: bytes) -> T:
    try:
        return decode_message(decoder, message)
    except msgspec.DecodeError as fault:
        raise InvalidRequest(f"the message is not as agreed: {fault}", code="invalid_message") from None


class TokenizerEndpoint:
    """The model's tokenizer and chat template, for routers that tokenize prompts themselves."""

    def __init__(self, services: ApiServices, cluster_auth: ClusterAuth) -> None:
        self._services = services
        self._cluster_auth = cluster_auth
        self._decoder = msgspec.msgpack.Decoder(QueryTokenizerFiles)

    async def get_tokenizer_files(self, request: Request) -> Response:
        await read_cluster_message(request, self._cluster_auth, self._decoder)
        files = await self._services.executors.text.run(
            CLUSTER.name, lambda: read_tokenizer_files(self._services.model)
        )
        return Response(msgspec.msgpack.encode(files), media_type=MSGPACK)
