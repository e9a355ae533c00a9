"""One request, from the body to the last event, for every endpoint that generates.

The order is the point: everything about a request is fixed and checked before the engine hears of it; the engine has
accepted it before the response has a status; and whichever way it ends, nothing of it is left behind.
"""

import asyncio
import logging
import secrets
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from onward.api import continuing, http, sse
from onward.api.answer import Answer, Choice, Piece, joined
from onward.api.body import wrong
from onward.api.dialect import Chunks, Dialect, Head
from onward.api.engine_client import EngineClient, Mailbox
from onward.api.envelope import Identity, identity_of
from onward.api.failures import RequestFailed, info_of
from onward.api.ledger import Order
from onward.api.limits import output_limit
from onward.api.openai import Bounds, GenerationRequest
from onward.api.prompts import Prompts
from onward.clock import Clock
from onward.config import ApiConfig
from onward.errors import InternalError, OnwardError, Overloaded
from onward.obs.metrics import Counter
from onward.proto.model import PreparedModel
from onward.proto.sampling import Sampling
from onward.proto.step import WorkerHello

MAX_OPEN_EXCHANGES = 2048
SEED_BITS = 53
"""Of a seed that we choose: a client that reads it from JSON as a double sends back the same one."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backend:
    """What every request needs."""

    config: ApiConfig
    model: PreparedModel
    prompts: Prompts
    client: EngineClient
    clock: Clock
    threads: Executor
    """For templates and tokenizing, which may take long and must not hold up anybody's tokens."""
    unknown_fields: Counter


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has passed every check but those that need the engine."""

    identity: Identity
    request: GenerationRequest
    num_unknown_fields: int
    seed: int
    prompt_token_ids: list[int]
    bad_words: tuple[tuple[int, ...], ...]
    deadline_at_s: float | None


@dataclass(frozen=True, slots=True)
class Job:
    """A request on its way."""

    head: Head
    prepared: Prepared
    answer: Answer
    closing: list[Piece]
    """The ends of choices whose given tokens had ended already."""
    mailbox: Mailbox | None
    """None if there is nothing left to generate."""


class GenerationEndpoint:
    """An ASGI application for one route."""

    def __init__(self, dialect: Dialect, backend: Backend) -> None:
        self._num_open = 0
        self._dialect = dialect
        self._backend = backend
        self._bounds = Bounds(backend.model.name, backend.model.config.vocab_size, backend.config.max_choices)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._num_open += 1
        try:
            self._check_room()
            body = await http.read_body(scope, receive, self._backend.config.max_body_bytes)
            await http.while_connected(receive, self._generate(identity_of(scope), body, send))
        except http.Disconnected:
            return
        except OnwardError as error:
            await http.respond_error(send, info_of(error))
        except RequestFailed as failure:
            await http.respond_error(send, failure.info)
        except Exception:
            _logger.exception("a request failed by a fault of ours")
            await http.respond_error(send, info_of(InternalError("internal error")))
        finally:
            self._num_open -= 1

    def _check_room(self) -> None:
        """Bounds what is held before the engine can say that it is too much: bodies, and work for the threads."""
        if self._num_open > MAX_OPEN_EXCHANGES:
            raise Overloaded(f"{MAX_OPEN_EXCHANGES} requests are open here already; try again later", retry_after_s=1.0)

    async def _generate(self, identity: Identity, body: bytes, send: Send) -> None:
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._backend.threads, self._prepare, identity, body)
        self._backend.unknown_fields.inc(by=prepared.num_unknown_fields)
        limits = await self._backend.client.limits(prepared.deadline_at_s)
        job = self._start(prepared, limits)
        try:
            if job.mailbox is not None:
                await job.mailbox.accepted()
            if prepared.request.stream:
                await self._stream(job, send)
            else:
                await self._collect(job, send)
        finally:
            if job.mailbox is not None:
                self._backend.client.abort(job.mailbox)

    def _prepare(self, identity: Identity, body: bytes) -> Prepared:
        """Runs in a thread."""
        request, num_unknown = self._dialect.decode(body, self._bounds)
        return Prepared(
            identity=identity,
            request=request,
            num_unknown_fields=num_unknown,
            seed=secrets.randbits(SEED_BITS) if request.seed is None else request.seed,
            prompt_token_ids=self._dialect.prompt_token_ids(request, identity.created_s),
            bad_words=self._backend.prompts.bad_words(request.bad_words or []),
            deadline_at_s=self._deadline(identity, request),
        )

    def _deadline(self, identity: Identity, request: GenerationRequest) -> float | None:
        if request.deadline_ms is not None:
            return identity.started_at_s + request.deadline_ms / 1000
        default_s = self._backend.config.default_deadline_s
        return None if default_s is None else identity.started_at_s + default_s

    def _start(self, prepared: Prepared, limits: WorkerHello) -> Job:
        num_prompt = len(prepared.prompt_token_ids)
        max_tokens = output_limit(
            num_prompt,
            prepared.request.output_limit,
            prepared.request.min_tokens or 0,
            limits,
            self._dialect.prompt_param,
        )
        choices = [self._choice(prepared, index, max_tokens) for index in range(prepared.request.num_choices)]
        replayed = [_replay(prepared.request, choice) for choice in choices]
        orders = [_order(prepared, choice) for choice in choices if not choice.finish_reason]
        return Job(
            head=self._head(prepared.identity),
            prepared=prepared,
            answer=Answer(prepared.prompt_token_ids, choices),
            closing=[piece for piece in replayed if piece is not None],
            mailbox=self._backend.client.open(orders) if orders else None,
        )

    def _choice(self, prepared: Prepared, index: int, max_tokens: int) -> Choice:
        sampling = _sampling(prepared, index, max_tokens, self._backend.model.eos_token_ids)
        text = self._dialect.new_text(prepared.request.stop_strings(), sampling)
        offsets = None if sampling.logprobs is None else self._backend.prompts.new_offsets()
        return Choice(index, f"{prepared.identity.request_id}-{index}", sampling, text, offsets)

    def _head(self, identity: Identity) -> Head:
        model = self._backend.model
        response_id = self._dialect.id_prefix + identity.request_id
        return Head(response_id, identity.created_s, model.name, model.fingerprint)

    async def _collect(self, job: Job, send: Send) -> None:
        said: list[list[Piece]] = [[] for _ in job.answer.choices]
        pieces = job.closing
        while True:
            for piece in pieces:
                said[piece.choice].append(piece)
            if job.answer.finished:
                break
            pieces, error = await self._advance(job)
            if error is not None:
                raise error
        choices = [job.answer.with_ids(joined(pieces)) for pieces in said]
        body = self._dialect.whole(job.head, choices, job.answer.usage(), _to_continue(job))
        await http.respond(send, 200, body)

    async def _stream(self, job: Job, send: Send) -> None:
        cursors = sse.Cursors(job.prepared.identity.request_id, job.prepared.seed, job.answer)
        pieces, error = job.closing, None
        if job.mailbox is not None and job.mailbox.has_news:
            news, error = await self._advance(job)
            pieces = pieces + news
        if error is not None and not pieces:
            raise error  # there is no status yet, so it is an error of HTTP
        await send(http.start_message(200, sse.HEADERS))
        try:
            await self._stream_events(job, cursors, pieces, error, send)
        except RequestFailed as failure:
            await send(http.part(sse.error_event(failure.info)))
        except Exception:
            _logger.exception("a stream failed by a fault of ours")
            await send(http.part(sse.error_event(info_of(InternalError("internal error")))))
        await send(http.part(sse.DONE, more=False))

    async def _stream_events(
        self, job: Job, cursors: sse.Cursors, pieces: list[Piece], error: RequestFailed | None, send: Send
    ) -> None:
        include_usage = job.prepared.request.include_usage
        chunks = Chunks(self._dialect, job.head, include_usage)
        openings = [chunks.opening(choice.index) for choice in job.answer.choices]
        events = [sse.event(opening) for opening in openings if opening is not None]
        while True:
            last = pieces[-1] if pieces and job.answer.finished else None
            for piece in pieces:
                beside = _to_continue(job) if piece is last else None
                events.append(sse.event(chunks.piece(piece, beside), cursors.after(piece)))
            if events:
                await send(http.part(b"".join(events)))
            if error is not None:
                raise error
            if job.answer.finished:
                break
            pieces, error = await self._advance(job)
            events = []
        if include_usage:
            await send(http.part(sse.event(chunks.usage(job.answer.usage()))))

    async def _advance(self, job: Job) -> tuple[list[Piece], RequestFailed | None]:
        """The next pieces, and the error that follows them, if one does."""
        assert job.mailbox is not None, "an unfinished answer has work under way"
        progress = job.answer.take(await job.mailbox.take())
        for choice in progress.stopped:
            self._backend.client.stop(choice.request_id, choice.position)
        return progress.pieces, RequestFailed(progress.error) if progress.error is not None else None


def _replay(request: GenerationRequest, choice: Choice) -> Piece | None:
    """Takes the choice to where an earlier answer stopped."""
    index = choice.index
    rescore_from = request.rescored_from()[index]
    piece = choice.replay(request.generated()[index], request.told_reasons()[index], rescore_from)
    if piece is not None and rescore_from is not None:
        problem = f"choice {index} has ended with the given tokens, so nothing is computed that could score them again"
        raise wrong("rescore_from", problem)
    return piece


def _to_continue(job: Job) -> dict[str, Any]:
    return continuing.of_answer(job.prepared.request, job.prepared.seed, job.answer)


def _sampling(prepared: Prepared, choice: int, max_tokens: int, eos_token_ids: list[int]) -> Sampling:
    request = prepared.request
    ends = [] if request.ignore_eos else eos_token_ids
    return Sampling(
        seed=prepared.seed,
        choice=choice,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=max(0, request.top_k or 0),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        end_token_ids=tuple(sorted({*ends, *(request.stop_token_ids or [])})),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=tuple(sorted((int(token_id), bias) for token_id, bias in (request.logit_bias or {}).items())),
        bad_words=prepared.bad_words,
        logprobs=request.num_logprobs,
        # The choices have one prompt: one look at it is enough.
        prompt_logprobs=request.prompt_logprobs if choice == 0 else None,
    )


def _order(prepared: Prepared, choice: Choice) -> Order:
    return Order(
        request_id=choice.request_id,
        prompt_token_ids=prepared.prompt_token_ids,
        sampling=choice.sampling,
        generated_token_ids=list(choice.token_ids),
        arrival_s=prepared.identity.arrival_s,
        deadline_at_s=prepared.deadline_at_s,
        priority=prepared.request.priority or 0,
        cache_salt=prepared.request.cache_salt or "",
        label=prepared.identity.label,
        score_from=prepared.request.rescored_from()[choice.index],
    )
