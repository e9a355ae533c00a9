"""The end of a request that a router gives up, written in the form that its client reads.

A router knows the tokens of a request and not what they mean. It asks an instance for the last part of the answer: an
aborted request's ends, or an error with what was generated so far. Nothing is generated, so the engine is not needed and
nothing is kept here.
"""

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.api.attempts import MAX_OTHER_BYTES, MSGPACK, check_schema, decoded
from onward.api.forms import ChunkForm, Collected
from onward.api.generation import Generator
from onward.api.jobs import Backend, Job
from onward.api.ledger import ABORT, ABORTED, CUT, Delivery
from onward.api.pieces import Piece
from onward.api.proven import Proven
from onward.errors import InvalidRequest
from onward.proto.request import ErrorInfo
from onward.proto.router import Close, Closed
from onward.web.failures import error_body


class Closing:
    """`generators` by the path that the client's request has come to."""

    def __init__(self, generators: Mapping[str, Generator], backend: Backend, proven: Proven) -> None:
        self._generators = generators
        self._backend = backend
        self._proven = proven
        self._max_bytes = backend.config.max_body_bytes + MAX_OTHER_BYTES
        self._decoder = msgspec.msgpack.Decoder(Close)

    async def close(self, request: Request) -> Response:
        asked = decoded(self._decoder, await self._proven.body(request, self._max_bytes))
        attempt = asked.attempt
        check_schema(attempt)
        generator = self._generators.get(attempt.path)
        if generator is None:
            raise InvalidRequest(f"path: no answers of {attempt.path[:200]!r} are closed", param="path")
        now_s = self._backend.clock.now_s()
        prepared = await generator.prepared(
            attempt.caller, attempt.body, lambda: generator.jobs.of_attempt(attempt, now_s, is_routed=True)
        )
        job = generator.jobs.closed(prepared)
        closed = closed_stream(job, asked.error) if prepared.request.stream else closed_whole(job, asked.error)
        return Response(msgspec.msgpack.encode(closed), media_type=MSGPACK)


def closed_stream(job: Job, error: ErrorInfo) -> Closed:
    """The events that are missing, but for `[DONE]`."""
    form = ChunkForm(job)
    events = form.opening() + form.news(job.closing)
    if error.code == ABORTED.code:
        events += form.news(_aborted_pieces(job)) + form.end()
    else:
        events += form.failed(error)
    return Closed(200, b"".join(events))


def closed_whole(job: Job, error: ErrorInfo) -> Closed:
    collected = Collected(job)
    collected.add(job.replayed)
    if error.code == ABORTED.code and not _seems_complete(job):
        collected.add(_aborted_pieces(job))
        return Closed(200, collected.body())
    return Closed(error.status, error_body(error, collected.partial(error)))


def _seems_complete(job: Job) -> bool:
    """Whether an answer without logprobs that were asked for would say of every choice that it has ended by itself."""
    request = job.prepared.request
    is_scored = request.made_logprobs is not None or request.scores_prompt is not None
    return is_scored and all(choice.finish_reason not in (None, *CUT) for choice in job.answer.choices)


def _aborted_pieces(job: Job) -> list[Piece]:
    open_ids = [choice.request_id for choice in job.answer.choices if choice.finish_reason is None]
    return job.answer.take([Delivery(one, finish_reason=ABORT, error=ABORTED) for one in open_ids]).pieces
