"""Writes the end of a request that a router gives up, in the client's format.

A router has the tokens of a request but cannot turn them into text. It requests the last part of the response from an
instance: the ends of an aborted request's choices, or an error with the output so far. Nothing is generated, so the engine
is not needed and nothing is stored here.
"""

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.api.endpoints.attempts import MAX_ATTEMPT_OVERHEAD_BYTES, MSGPACK, check_schema, decode_cluster_message
from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.engine_link.request_tracker import ABORTED, EngineOutput
from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.generation_runner import GenerationRunner
from onward.api.lifecycle.request_builder import ActiveRequest, ApiServices
from onward.api.lifecycle.stream_formatters import BodyCollector, StreamFormatter
from onward.errors import InvalidRequest
from onward.proto.engine import ErrorInfo
from onward.proto.finish_reasons import ABORT, INCOMPLETE_REASONS
from onward.proto.router import CloseAttempt, ClosedAttempt
from onward.web.error_format import error_body


class CloseAttemptEndpoint:
    """Serves CloseAttempt messages of routers. `runners`: by the path of the client's request."""

    def __init__(
        self, runners: Mapping[str, GenerationRunner], services: ApiServices, cluster_auth: ClusterAuth
    ) -> None:
        self._runners = runners
        self._services = services
        self._cluster_auth = cluster_auth
        self._max_bytes = services.config.max_body_bytes + MAX_ATTEMPT_OVERHEAD_BYTES
        self._decoder = msgspec.msgpack.Decoder(CloseAttempt)

    async def close(self, request: Request) -> Response:
        message = decode_cluster_message(
            self._decoder, await self._cluster_auth.authenticated_body(request, self._max_bytes)
        )
        attempt = message.attempt
        check_schema(attempt)
        runner = self._runners.get(attempt.path)
        if runner is None:
            raise InvalidRequest(f"path: no answers of {attempt.path[:200]!r} are closed", param="path")
        now_s = self._services.clock.now_s()
        prepared = await runner.prepare(
            attempt.caller, attempt.body, lambda: runner.builder.prepare_attempt(attempt, now_s, is_routed=True)
        )
        active = runner.builder.replay_finished(prepared)
        active.note_end(self._services.clock.wall_s())
        closed = (
            close_stream(active, runner.make_client_formatter(active), message.error)
            if prepared.request.stream
            else close_whole_body(active, message.error)
        )
        return Response(msgspec.msgpack.encode(closed), media_type=MSGPACK)


def close_stream(active: ActiveRequest, formatter: StreamFormatter, error: ErrorInfo) -> ClosedAttempt:
    """Returns the missing events without `[DONE]`."""
    events = formatter.format_opening() + formatter.format_updates(active.pending_ends)
    if error.code == ABORTED.code:
        events += formatter.format_updates(_aborted_updates(active)) + formatter.format_end()
    else:
        events += formatter.format_error(error)
    return ClosedAttempt(200, b"".join(events))


def close_whole_body(active: ActiveRequest, error: ErrorInfo) -> ClosedAttempt:
    collector = BodyCollector(active)
    collector.add(active.replayed_updates)
    if error.code == ABORTED.code and not _seems_complete(active):
        collector.add(_aborted_updates(active))
        return ClosedAttempt(200, collector.body())
    return ClosedAttempt(error.status, error_body(error, collector.partial_body(error)))


def _seems_complete(active: ActiveRequest) -> bool:
    """Returns whether every choice has ended by itself although logprobs were requested, which a replayed output lacks.
    A body without them would look complete, so the error is returned instead."""
    request = active.prepared.request
    has_logprobs = request.engine_logprobs is not None or request.engine_prompt_logprobs is not None
    return has_logprobs and all(
        choice.finish_reason not in (None, *INCOMPLETE_REASONS) for choice in active.output.choices
    )


def _aborted_updates(active: ActiveRequest) -> list[ChoiceUpdate]:
    open_ids = [choice.request_id for choice in active.output.choices if choice.finish_reason is None]
    return active.output.apply(
        [EngineOutput(request_id, finish_reason=ABORT, error=ABORTED) for request_id in open_ids]
    ).updates
