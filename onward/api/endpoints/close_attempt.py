"""The end of a request that a router gives up, written in the form that its client reads.

A router knows the tokens of a request and not what they mean. It asks an instance for the last part of the answer: an
aborted request's ends, or an error with what was generated so far. Nothing is generated, so the engine is not needed and
nothing is kept here.
"""

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.api.endpoints.attempts import MAX_ATTEMPT_OVERHEAD_BYTES, MSGPACK, check_schema, decode_cluster_message
from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.engine_link.request_tracker import ABORT, ABORTED, INCOMPLETE_REASONS, EngineOutput
from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.generation_runner import GenerationRunner
from onward.api.lifecycle.request_builder import ActiveRequest, ApiServices
from onward.api.lifecycle.stream_formatters import BodyCollector, ChunkFormatter
from onward.errors import InvalidRequest
from onward.proto.engine import ErrorInfo
from onward.proto.router import CloseAttempt, ClosedAttempt
from onward.web.error_format import error_body


class CloseAttemptEndpoint:
    """`generators` by the path that the client's request has come to."""

    def __init__(self, generators: Mapping[str, GenerationRunner], backend: ApiServices, proven: ClusterAuth) -> None:
        self._generators = generators
        self._backend = backend
        self._proven = proven
        self._max_bytes = backend.config.max_body_bytes + MAX_ATTEMPT_OVERHEAD_BYTES
        self._decoder = msgspec.msgpack.Decoder(CloseAttempt)

    async def close(self, request: Request) -> Response:
        asked = decode_cluster_message(self._decoder, await self._proven.authenticated_body(request, self._max_bytes))
        attempt = asked.attempt
        check_schema(attempt)
        generator = self._generators.get(attempt.path)
        if generator is None:
            raise InvalidRequest(f"path: no answers of {attempt.path[:200]!r} are closed", param="path")
        now_s = self._backend.clock.now_s()
        prepared = await generator.prepare(
            attempt.caller, attempt.body, lambda: generator.builder.prepare_attempt(attempt, now_s, is_routed=True)
        )
        job = generator.builder.replay_finished(prepared)
        closed = close_stream(job, asked.error) if prepared.request.stream else close_whole_body(job, asked.error)
        return Response(msgspec.msgpack.encode(closed), media_type=MSGPACK)


def close_stream(job: ActiveRequest, error: ErrorInfo) -> ClosedAttempt:
    """The events that are missing, but for `[DONE]`."""
    form = ChunkFormatter(job)
    events = form.format_opening() + form.format_updates(job.pending_ends)
    if error.code == ABORTED.code:
        events += form.format_updates(_aborted_pieces(job)) + form.format_end()
    else:
        events += form.format_error(error)
    return ClosedAttempt(200, b"".join(events))


def close_whole_body(job: ActiveRequest, error: ErrorInfo) -> ClosedAttempt:
    collected = BodyCollector(job)
    collected.add(job.replayed_updates)
    if error.code == ABORTED.code and not _seems_complete(job):
        collected.add(_aborted_pieces(job))
        return ClosedAttempt(200, collected.body())
    return ClosedAttempt(error.status, error_body(error, collected.partial_body(error)))


def _seems_complete(job: ActiveRequest) -> bool:
    """Whether an answer without logprobs that were asked for would say of every choice that it has ended by itself."""
    request = job.prepared.request
    is_scored = request.engine_logprobs is not None or request.engine_prompt_logprobs is not None
    return is_scored and all(choice.finish_reason not in (None, *INCOMPLETE_REASONS) for choice in job.output.choices)


def _aborted_pieces(job: ActiveRequest) -> list[ChoiceUpdate]:
    open_ids = [choice.request_id for choice in job.output.choices if choice.finish_reason is None]
    return job.output.apply([EngineOutput(one, finish_reason=ABORT, error=ABORTED) for one in open_ids]).updates
