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

from onward.api.attempts import MAX_OTHER_BYTES, check_schema, decoded
from onward.api.embedding_request import EmbeddingRequest, decode_embedding
from onward.api.generation import check_room
from onward.api.identity import identity_of
from onward.api.jobs import Backend, bounds_of, priority_within
from onward.api.known_fields import ignored_header, refuse_unknown
from onward.api.ledger import Order
from onward.api.limits import check_fits
from onward.api.proven import Proven
from onward.api.streams import Streams
from onward.clock import Clock
from onward.errors import InternalError
from onward.proto import SCHEMA_VERSION
from onward.proto.router import Attempt
from onward.proto.sampling import Sampling
from onward.web import http
from onward.web.error_answers import answer_errors
from onward.web.failures import RequestFailed

PATH = "/v1/embeddings"
MAX_AT_ONCE = 256
MAX_TOKENS_AT_ONCE = 1 << 16
"""Texts of one request that the engine has at a time: a long list must not fill the queue by itself, or be turned away
for it."""


@dataclass(frozen=True, slots=True)
class Asked:
    attempt: Attempt
    started_at_s: float
    """This process's clock."""
    is_routed: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request that has passed every check but those that need the engine."""

    attempt: Attempt
    request: EmbeddingRequest
    prompts: list[list[int]]
    arrived_at_s: float
    """See `Order`."""
    deadline_at_s: float | None
    is_routed: bool
    unknown_fields: tuple[str, ...]


class Embeddings:
    """Answers, whoever asks."""

    def __init__(self, backend: Backend, streams: Streams) -> None:
        self._backend, self._streams = backend, streams
        self._bounds = bounds_of(backend)
        self._num_open = 0

    async def serve(self, receive: Receive, send: Send, asked: Coroutine[Any, Any, Asked]) -> None:
        self._num_open += 1
        try:
            await answer_errors(send, self._serve(receive, send, asked))
        finally:
            self._num_open -= 1
            asked.close()

    async def _serve(self, receive: Receive, send: Send, asked: Coroutine[Any, Any, Asked]) -> None:
        check_room(self._num_open)
        self._backend.fullness.check()
        await http.while_connected(receive, self._answer(await asked, send))

    async def _answer(self, asked: Asked, send: Send) -> None:
        self._streams.check_open()
        texts, caller = self._backend.queues.texts, asked.attempt.caller
        wanted = await texts.run(caller, lambda: self._wanted(asked), len(asked.attempt.body))
        self._backend.unknown_fields.note(wanted.unknown_fields, PATH, wanted.attempt.request_id)
        vectors = await self._computed(wanted)
        headers = {**http.JSON_HEADERS, **ignored_header(wanted.unknown_fields)}
        await http.respond(send, 200, await texts.run(caller, lambda: _told(wanted, vectors)), headers)

    def _wanted(self, asked: Asked) -> Wanted:
        """Runs in a thread."""
        backend, attempt = self._backend, asked.attempt
        request, unknown = decode_embedding(attempt.body, self._bounds, backend.model.config.hidden_size)
        if backend.config.strict_fields or attempt.strict_fields:
            refuse_unknown(unknown)
        own_s = backend.config.default_deadline_s if request.deadline_ms is None else request.deadline_ms / 1000
        left_s = attempt.deadline_s if asked.is_routed else own_s
        inputs = enumerate(request.inputs())
        return Wanted(
            attempt=attempt,
            request=request,
            prompts=[backend.prompts.of_prompt(one, request.input_path(index)) for index, one in inputs],
            arrived_at_s=asked.started_at_s - attempt.waited_s,
            deadline_at_s=None if left_s is None else asked.started_at_s + left_s,
            is_routed=asked.is_routed,
            unknown_fields=unknown,
        )

    async def _computed(self, wanted: Wanted) -> list[bytes]:
        client = self._backend.client
        limits = await client.limits(wanted.deadline_at_s)
        for index, prompt in enumerate(wanted.prompts):
            check_fits(len(prompt), limits, wanted.request.input_path(index))
        at_once, own = MAX_AT_ONCE, wanted.attempt.caller_limits
        if own is not None and own.max_in_flight is not None:
            at_once = min(at_once, own.max_in_flight)
        groups = groups_of([len(prompt) for prompt in wanted.prompts], at_once, MAX_TOKENS_AT_ONCE)
        return [vector for group in groups for vector in await self._of_group(wanted, group)]

    async def _of_group(self, wanted: Wanted, group: range) -> list[bytes]:
        client, orders = self._backend.client, [self._order(wanted, index) for index in group]
        mailbox = client.open(orders, is_new=not wanted.is_routed, with_nudges=False)
        vectors: dict[str, bytes] = {}
        try:
            await self._backend.fullness.accepted(mailbox)
            while len(vectors) < len(orders):
                for one in await mailbox.take():
                    if one.error is not None:
                        raise RequestFailed(one.error)
                    if one.embedding is None:
                        raise InternalError("a text has ended without its vector")
                    vectors[one.request_id] = one.embedding
        finally:
            client.abort(mailbox)
        return [vectors[order.request_id] for order in orders]

    def _order(self, wanted: Wanted, index: int) -> Order:
        attempt, request = wanted.attempt, wanted.request
        pooling = request.pooling or self._backend.config.pooling
        return Order(
            request_id=f"{attempt.request_id}-{index}",
            prompt_token_ids=wanted.prompts[index],
            sampling=Sampling(seed=0, temperature=0.0, max_tokens=1, pooling=pooling),
            arrived_at_s=wanted.arrived_at_s,
            deadline_at_s=wanted.deadline_at_s,
            priority=priority_within(request.priority, attempt.caller_priority),
            cache_salt=request.cache_salt or "",
            label=attempt.label,
            caller=attempt.caller,
            caller_limits=attempt.caller_limits,
            attempt=attempt.epoch,
        )


def groups_of(lengths: Sequence[int], max_texts: int, max_tokens: int) -> Iterator[range]:
    """Neighbours that are within both bounds together. One that is too long by itself is a group of its own."""
    first = num_tokens = 0
    for index, length in enumerate(lengths):
        if index > first and (index - first == max_texts or num_tokens + length > max_tokens):
            yield range(first, index)
            first, num_tokens = index, 0
        num_tokens += length
    yield range(first, len(lengths))


class OfClients:
    """An ASGI application."""

    def __init__(self, embeddings: Embeddings, max_body_bytes: int) -> None:
        self._embeddings, self._max_body_bytes = embeddings, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._embeddings.serve(receive, send, self._asked(scope, receive))

    async def _asked(self, scope: Scope, receive: Receive) -> Asked:
        identity = identity_of(scope)
        attempt = Attempt(
            schema_version=SCHEMA_VERSION,
            path=PATH,
            body=await http.read_body(receive, self._max_body_bytes),
            request_id=identity.request_id,
            epoch=1,
            seed=0,
            created_s=identity.created_s,
            label=identity.label,
            caller=identity.caller.name,
            caller_limits=identity.caller.limits,
            caller_priority=identity.caller.priority,
        )
        return Asked(attempt, identity.started_at_s, is_routed=False)


class OfRouters:
    """An ASGI application."""

    def __init__(self, embeddings: Embeddings, max_body_bytes: int, proven: Proven, clock: Clock) -> None:
        self._embeddings, self._max_body_bytes = embeddings, max_body_bytes
        self._proven, self._clock = proven, clock
        self._decoder = msgspec.msgpack.Decoder(Attempt)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._embeddings.serve(receive, send, self._asked(scope, receive))

    async def _asked(self, scope: Scope, receive: Receive) -> Asked:
        started_at_s = self._clock.now_s()
        message = await http.read_body(receive, self._max_body_bytes + MAX_OTHER_BYTES)
        self._proven.check(scope, message)
        attempt = decoded(self._decoder, message)
        check_schema(attempt)
        return Asked(attempt, started_at_s, is_routed=True)


def _told(wanted: Wanted, vectors: list[bytes]) -> bytes:
    """Runs in a thread: of many texts it is a long answer."""
    request, num_tokens = wanted.request, sum(map(len, wanted.prompts))
    as_text = request.encoding_format == "base64"
    shown = [_shown(vector, request.dimensions, request.normalize is not False) for vector in vectors]
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


def _shown(vector: bytes, dimensions: int | None, is_normalized: bool) -> "array[float]":
    """float32, as OpenAI's clients read it from base64: the machines that this runs on are little-endian."""
    numbers = array("f", vector)[:dimensions]
    length = math.sqrt(math.fsum(number * number for number in numbers))
    return array("f", [number / length for number in numbers]) if is_normalized and length else numbers
