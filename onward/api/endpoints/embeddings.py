"""`/v1/embeddings`: texts in, a vector of each out.

A vector is a function of its text alone, so there is nothing to go on with: what is lost is asked for again, by our own
ledger while an engine restarts, and by a router at another instance. A router asks at a path of its own, in the form of an
attempt, which says for whom.
"""

import base64
import math
from array import array
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from onward.api.endpoints.attempts import MAX_ATTEMPT_OVERHEAD_BYTES, check_schema, decode_cluster_message
from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.engine_link.request_tracker import SubmitSpec
from onward.api.lifecycle.generation_runner import check_open_requests
from onward.api.lifecycle.request_builder import ApiServices, clamp_priority, validation_context
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.requests.embedding_request import EmbeddingRequest, decode_embedding
from onward.api.requests.output_limits import check_fits
from onward.api.requests.request_context import get_request_context
from onward.api.requests.unsupported_fields import ignored_fields_header, reject_unknown_fields
from onward.clock import Clock
from onward.errors import InternalError
from onward.proto import SCHEMA_VERSION
from onward.proto.router import Attempt
from onward.proto.sampling_params import SamplingParams
from onward.web import asgi
from onward.web.error_format import RequestFailed
from onward.web.error_handlers import handle_errors

PATH = "/v1/embeddings"
MAX_AT_ONCE = 256
MAX_TOKENS_AT_ONCE = 1 << 16
"""Texts of one request that the engine has at a time: a long list must not fill the queue by itself, or be turned away
for it."""


@dataclass(frozen=True, slots=True)
class EmbeddingAttempt:
    attempt: Attempt
    started_at_s: float
    """This process's clock."""
    is_routed: bool


@dataclass(frozen=True, slots=True)
class PreparedEmbedding:
    """A request that has passed every check but those that need the engine."""

    attempt: Attempt
    request: EmbeddingRequest
    prompts: list[list[int]]
    arrived_at_s: float
    """See `SubmitSpec`."""
    deadline_at_s: float | None
    is_routed: bool
    unknown_fields: tuple[str, ...]


class EmbeddingService:
    """Answers, whoever asks."""

    def __init__(self, backend: ApiServices, streams: StreamRegistry) -> None:
        self._backend, self._streams = backend, streams
        self._bounds = validation_context(backend)
        self._num_open = 0

    async def serve(self, receive: Receive, send: Send, asked: Coroutine[Any, Any, EmbeddingAttempt]) -> None:
        self._num_open += 1
        try:
            await handle_errors(send, self._serve(receive, send, asked))
        finally:
            self._num_open -= 1
            asked.close()

    async def _serve(self, receive: Receive, send: Send, asked: Coroutine[Any, Any, EmbeddingAttempt]) -> None:
        check_open_requests(self._num_open)
        self._backend.load_shedder.check()
        await asgi.run_until_disconnect(receive, self._answer(await asked, send))

    async def _answer(self, asked: EmbeddingAttempt, send: Send) -> None:
        self._streams.check_not_draining()
        texts, caller = self._backend.executors.text, asked.attempt.caller
        wanted = await texts.run(caller, lambda: self._prepare(asked), len(asked.attempt.body))
        self._backend.unknown_fields.report(wanted.unknown_fields, PATH, wanted.attempt.request_id)
        vectors = await self._compute(wanted)
        headers = {**asgi.JSON_HEADERS, **ignored_fields_header(wanted.unknown_fields)}
        await asgi.respond(send, 200, await texts.run(caller, lambda: _embeddings_body(wanted, vectors)), headers)

    def _prepare(self, asked: EmbeddingAttempt) -> PreparedEmbedding:
        """Runs in a thread."""
        backend, attempt = self._backend, asked.attempt
        request, unknown = decode_embedding(attempt.body, self._bounds, backend.model.config.hidden_size)
        if backend.config.strict_fields or attempt.strict_fields:
            reject_unknown_fields(unknown)
        own_s = backend.config.default_deadline_s if request.deadline_ms is None else request.deadline_ms / 1000
        left_s = attempt.deadline_in_s if asked.is_routed else own_s
        inputs = enumerate(request.inputs())
        return PreparedEmbedding(
            attempt=attempt,
            request=request,
            prompts=[backend.text_processor.tokenize_prompt(one, request.input_path(index)) for index, one in inputs],
            arrived_at_s=asked.started_at_s - attempt.waited_s,
            deadline_at_s=None if left_s is None else asked.started_at_s + left_s,
            is_routed=asked.is_routed,
            unknown_fields=unknown,
        )

    async def _compute(self, wanted: PreparedEmbedding) -> list[bytes]:
        client = self._backend.engine_client
        limits = await client.wait_worker(wanted.deadline_at_s)
        for index, prompt in enumerate(wanted.prompts):
            check_fits(len(prompt), limits, wanted.request.input_path(index))
        at_once, own = MAX_AT_ONCE, wanted.attempt.caller_limits
        if own is not None and own.max_in_flight is not None:
            at_once = min(at_once, own.max_in_flight)
        groups = split_batches([len(prompt) for prompt in wanted.prompts], at_once, MAX_TOKENS_AT_ONCE)
        return [vector for group in groups for vector in await self._compute_batch(wanted, group)]

    async def _compute_batch(self, wanted: PreparedEmbedding, group: range) -> list[bytes]:
        client, orders = self._backend.engine_client, [self._order(wanted, index) for index in group]
        mailbox = client.submit(orders, is_new=not wanted.is_routed, wake_each_second=False)
        vectors: dict[str, bytes] = {}
        try:
            await self._backend.load_shedder.wait_accepted(mailbox)
            while len(vectors) < len(orders):
                for one in await mailbox.next_outputs():
                    if one.error is not None:
                        raise RequestFailed(one.error)
                    if one.embedding is None:
                        raise InternalError("a text has ended without its vector")
                    vectors[one.request_id] = one.embedding
        finally:
            client.abort(mailbox)
        return [vectors[order.request_id] for order in orders]

    def _order(self, wanted: PreparedEmbedding, index: int) -> SubmitSpec:
        attempt, request = wanted.attempt, wanted.request
        pooling = request.pooling or self._backend.config.pooling
        return SubmitSpec(
            request_id=f"{attempt.request_id}-{index}",
            prompt_token_ids=wanted.prompts[index],
            sampling_params=SamplingParams(seed=0, temperature=0.0, max_tokens=1, pooling=pooling),
            arrived_at_s=wanted.arrived_at_s,
            deadline_at_s=wanted.deadline_at_s,
            priority=clamp_priority(request.priority, attempt.caller_priority),
            cache_salt=request.cache_salt or "",
            client_request_id=attempt.client_request_id,
            caller=attempt.caller,
            caller_limits=attempt.caller_limits,
            attempt_epoch=attempt.attempt_epoch,
        )


def split_batches(lengths: Sequence[int], max_texts: int, max_tokens: int) -> Iterator[range]:
    """Neighbours that are within both bounds together. One that is too long by itself is a group of its own."""
    first = num_tokens = 0
    for index, length in enumerate(lengths):
        if index > first and (index - first == max_texts or num_tokens + length > max_tokens):
            yield range(first, index)
            first, num_tokens = index, 0
        num_tokens += length
    yield range(first, len(lengths))


class EmbeddingsEndpoint:
    """An ASGI application."""

    def __init__(self, embeddings: EmbeddingService, max_body_bytes: int) -> None:
        self._embeddings, self._max_body_bytes = embeddings, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._embeddings.serve(receive, send, self._asked(scope, receive))

    async def _asked(self, scope: Scope, receive: Receive) -> EmbeddingAttempt:
        identity = get_request_context(scope)
        attempt = Attempt(
            schema_version=SCHEMA_VERSION,
            path=PATH,
            body=await asgi.read_body(receive, self._max_body_bytes),
            request_id=identity.request_id,
            attempt_epoch=1,
            seed=0,
            created_s=identity.created_s,
            client_request_id=identity.client_request_id,
            caller=identity.caller.name,
            caller_limits=identity.caller.limits,
            caller_priority=identity.caller.priority,
        )
        return EmbeddingAttempt(attempt, identity.started_at_s, is_routed=False)


class RoutedEmbeddingsEndpoint:
    """An ASGI application."""

    def __init__(self, embeddings: EmbeddingService, max_body_bytes: int, proven: ClusterAuth, clock: Clock) -> None:
        self._embeddings, self._max_body_bytes = embeddings, max_body_bytes
        self._proven, self._clock = proven, clock
        self._decoder = msgspec.msgpack.Decoder(Attempt)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._embeddings.serve(receive, send, self._asked(scope, receive))

    async def _asked(self, scope: Scope, receive: Receive) -> EmbeddingAttempt:
        started_at_s = self._clock.now_s()
        message = await asgi.read_body(receive, self._max_body_bytes + MAX_ATTEMPT_OVERHEAD_BYTES)
        self._proven.check(scope, message)
        attempt = decode_cluster_message(self._decoder, message)
        check_schema(attempt)
        return EmbeddingAttempt(attempt, started_at_s, is_routed=True)


def _embeddings_body(wanted: PreparedEmbedding, vectors: list[bytes]) -> bytes:
    """Runs in a thread: of many texts it is a long answer."""
    request, num_tokens = wanted.request, sum(map(len, wanted.prompts))
    as_text = request.encoding_format == "base64"
    shown = [_client_vector(vector, request.dimensions, request.normalize is not False) for vector in vectors]
    listed = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(numbers.tobytes()).decode() if as_text else numbers.tolist(),
        }
        for index, numbers in enumerate(shown)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return msgspec.json.encode({"object": "list", "data": listed, "model": request.model, "usage": usage})


def _client_vector(vector: bytes, dimensions: int | None, is_normalized: bool) -> "array[float]":
    """float32, as OpenAI's clients read it from base64: the machines that this runs on are little-endian."""
    numbers = array("f", vector)[:dimensions]
    length = math.sqrt(math.fsum(number * number for number in numbers))
    return array("f", [number / length for number in numbers]) if is_normalized and length else numbers
