"""`/v1/embeddings`, `/pooling`, `/v1/rerank`, `/v1/score` and their other paths: texts in, a vector of each out, or what
the vectors say.

A vector is a function of its text alone, so there is nothing to resume. Lost work is submitted again: by the RequestTracker
after an engine restart, and by a router at another instance. A router uses a separate path and sends an attempt, which
names the caller.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from onward import log
from onward.api.endpoints.attempts import read_attempt
from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.endpoints.embedding_kinds import KINDS, TextsRequest
from onward.api.engine_link.request_tracker import base_epoch
from onward.api.lifecycle.generation_runner import check_open_requests
from onward.api.lifecycle.request_builder import ApiServices, clamp_priority, new_attempt, validation_context
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.requests.request_context import get_request_context
from onward.api.requests.unsupported_fields import ignored_fields_header, reject_unknown_fields
from onward.errors import InternalError, InvalidRequest
from onward.output_limits import check_fits
from onward.proto.engine import Submit
from onward.proto.router import Attempt
from onward.proto.sampling_params import SamplingParams
from onward.web import asgi
from onward.web.access_log import AccessRecord, access_record
from onward.web.error_format import RequestFailed
from onward.web.error_handlers import handle_errors

MAX_AT_ONCE = 256
MAX_TOKENS_AT_ONCE = 1 << 16
"""Maximum numbers of texts and of tokens of one request that the engine has at a time. A long list must not fill the queue
by itself, or be refused because it would."""


@dataclass(frozen=True, slots=True)
class PreparedEmbedding:
    """A request that has passed all checks except those that need the engine."""

    attempt: Attempt
    request: TextsRequest
    prompts: list[list[int]]
    arrived_at_s: float
    """See `ChoiceSubmission.arrived_at_s`."""
    deadline_at_s: float | None
    is_routed: bool
    unknown_fields: tuple[str, ...]


class EmbeddingService:
    """Serves embedding requests of clients and routers."""

    def __init__(self, services: ApiServices, streams: StreamRegistry) -> None:
        self._services, self._streams = services, streams
        self._validation_context = validation_context(services)
        self._num_open = 0

    async def serve(
        self, scope: Scope, receive: Receive, send: Send, path: str, cluster_auth: ClusterAuth | None
    ) -> None:
        """Serves one request to `path`. With `cluster_auth` it is an attempt of a router, which names the path."""
        self._num_open += 1
        try:
            await handle_errors(scope, send, self._serve(scope, receive, send, path, cluster_auth))
        finally:
            self._num_open -= 1

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, path: str, cluster_auth: ClusterAuth | None
    ) -> None:
        check_open_requests(self._num_open)
        self._services.load_shedder.check()
        if cluster_auth is None:
            context = get_request_context(scope)
            context.access.begin_trace(context.request_id, is_attempt=True)
            started_at_s = context.started_at_s
            body = await asgi.read_body(receive, self._services.config.max_body_bytes)
            attempt = new_attempt(context, path, body, seed=0)
        else:
            started_at_s = self._services.clock.now_s()
            attempt = await read_attempt(scope, receive, self._services.config.max_body_bytes, cluster_auth)
            if attempt.path not in KINDS:
                raise InvalidRequest(f"path: no vectors are made for {attempt.path[:200]!r}", param="path")
        access = access_record(scope)
        if cluster_auth is None:
            access.describe(attempt.request_id, attempt.client_request_id, attempt.caller)
        else:
            access.begin_routed_trace(attempt.request_id, attempt.trace)
        access.describe_request(attempt.path, attempt.body)
        is_routed = cluster_auth is not None
        await asgi.run_until_disconnect(receive, self._respond(attempt, started_at_s, is_routed, access, send))

    async def _respond(
        self, attempt: Attempt, started_at_s: float, is_routed: bool, access: AccessRecord, send: Send
    ) -> None:
        request_fields = log.request_fields(attempt.request_id, attempt.client_request_id)
        self._streams.check_not_draining()
        executor, caller = self._services.executors.text, attempt.caller
        prepared = await executor.run(
            caller, lambda: self._prepare(attempt, started_at_s, is_routed), len(attempt.body)
        )
        self._services.unknown_fields.report(prepared.unknown_fields, attempt.path, request_fields)
        access.prompt_tokens = sum(map(len, prepared.prompts))
        vectors = await self._compute(prepared)
        headers = {**asgi.JSON_HEADERS, **ignored_fields_header(prepared.unknown_fields)}
        # In a thread, since the body of many texts is large.
        await asgi.respond(send, 200, await executor.run(caller, lambda: _body(prepared, vectors)), headers)

    def _prepare(self, attempt: Attempt, started_at_s: float, is_routed: bool) -> PreparedEmbedding:
        """Decodes, checks and tokenizes a request. Runs in a thread."""
        services = self._services
        hidden_size = services.model.config.hidden_size
        request, unknown = KINDS[attempt.path].decode(attempt.body, self._validation_context, hidden_size)
        if services.config.strict_fields or attempt.strict_fields:
            reject_unknown_fields(unknown)
        requested_s = services.config.default_deadline_s if request.deadline_ms is None else request.deadline_ms / 1000
        deadline_in_s = attempt.deadline_in_s if is_routed else requested_s
        return PreparedEmbedding(
            attempt=attempt,
            request=request,
            prompts=[
                services.text_processor.tokenize_prompt(prompt, request.input_path(index))
                for index, prompt in enumerate(request.inputs())
            ],
            arrived_at_s=started_at_s - attempt.waited_s,
            deadline_at_s=None if deadline_in_s is None else started_at_s + deadline_in_s,
            is_routed=is_routed,
            unknown_fields=unknown,
        )

    async def _compute(self, prepared: PreparedEmbedding) -> list[bytes]:
        client = self._services.engine_client
        limits = await client.wait_worker(prepared.deadline_at_s)
        for index, prompt in enumerate(prepared.prompts):
            check_fits(len(prompt), limits, prepared.request.input_path(index))
        max_batch, caller_limits = MAX_AT_ONCE, prepared.attempt.caller_limits
        if caller_limits is not None and caller_limits.max_in_flight is not None:
            max_batch = min(max_batch, caller_limits.max_in_flight)
        batches = split_batches([len(prompt) for prompt in prepared.prompts], max_batch, MAX_TOKENS_AT_ONCE)
        return [vector for batch in batches for vector in await self._compute_batch(prepared, batch)]

    async def _compute_batch(self, prepared: PreparedEmbedding, batch: range) -> list[bytes]:
        client, specs = self._services.engine_client, [self._new_submit(prepared, index) for index in batch]
        collector = client.submit(specs, is_new=not prepared.is_routed, wake_each_second=False)
        vectors: dict[str, bytes] = {}
        try:
            await self._services.load_shedder.wait_accepted(collector)
            while len(vectors) < len(specs):
                for output in await collector.next_outputs():
                    if output.error is not None:
                        raise RequestFailed(output.error)
                    if output.embedding is None:
                        raise InternalError("a text has ended without its vector")
                    vectors[output.request_id] = output.embedding
        finally:
            client.abort(collector)
        return [vectors[spec.request_id] for spec in specs]

    def _new_submit(self, prepared: PreparedEmbedding, index: int) -> Submit:
        attempt, request, now_s = prepared.attempt, prepared.request, self._services.clock.now_s()
        pooling = request.pooling or self._services.config.pooling
        return Submit(
            seq=0,
            request_id=f"{attempt.request_id}-{index}",
            epoch=base_epoch(attempt.attempt_epoch),
            prompt_token_ids=prepared.prompts[index],
            sampling_params=SamplingParams(seed=0, temperature=0.0, max_tokens=1, pooling=pooling),
            waited_s=now_s - prepared.arrived_at_s,
            deadline_in_s=None if prepared.deadline_at_s is None else prepared.deadline_at_s - now_s,
            priority=clamp_priority(request.priority, attempt.caller_priority),
            cache_salt=request.cache_salt or "",
            client_request_id=attempt.client_request_id,
            caller=attempt.caller,
            caller_limits=attempt.caller_limits,
        )


def split_batches(lengths: Sequence[int], max_texts: int, max_tokens: int) -> Iterator[range]:
    """Yields ranges of consecutive texts that are within both limits. A text that exceeds `max_tokens` is a range of its
    own."""
    first = num_tokens = 0
    for index, length in enumerate(lengths):
        if index > first and (index - first == max_texts or num_tokens + length > max_tokens):
            yield range(first, index)
            first, num_tokens = index, 0
        num_tokens += length
    yield range(first, len(lengths))


class EmbeddingsEndpoint:
    """An ASGI application: for clients at `path`, or with `cluster_auth` for routers."""

    def __init__(self, service: EmbeddingService, path: str, cluster_auth: ClusterAuth | None = None) -> None:
        self._service, self._path, self._cluster_auth = service, path, cluster_auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._service.serve(scope, receive, send, self._path, self._cluster_auth)


def _body(prepared: PreparedEmbedding, vectors: list[bytes]) -> bytes:
    num_tokens = sum(map(len, prepared.prompts))
    return KINDS[prepared.attempt.path].body(prepared.attempt, prepared.request, num_tokens, vectors)
