"""Runs one request, from the body to the last event, for every generating endpoint.

The order matters. Everything about a request is fixed and checked before it is submitted to the engine, and the engine has
accepted it before the response has a status. However it ends, it leaves nothing but a record of its tokens, from which it
can be resumed.
"""

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from onward import log
from onward.api.engine_link.request_tracker import EngineOutput
from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.request_builder import ActiveRequest, ApiServices, RequestBuilder
from onward.api.lifecycle.resume import STREAM_UNKNOWN, resumed_attempt, with_prior_logprobs
from onward.api.lifecycle.stream_formatters import BodyCollector, ChunkFormatter, StreamFormatter, make_formatter
from onward.api.lifecycle.stream_registry import LiveStream, StreamRegistry, finish_reason_of
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.preprocessing_executors import DeferredRender
from onward.api.requests.request_context import RequestContext, get_request_context
from onward.api.requests.unsupported_fields import ignored_fields_header
from onward.errors import RETRY_SOON_S, Overloaded, Unavailable
from onward.obs.request_trace import EnginePhaseSpans
from onward.proto.cursor import Cursor
from onward.proto.engine import ErrorInfo
from onward.proto.finish_reasons import PD_RESCHEDULE
from onward.proto.router import Attempt, StreamRecord
from onward.web import asgi, sse
from onward.web.access_log import AccessRecord
from onward.web.auth.owned_request_ids import owns_request_id
from onward.web.error_format import RequestFailed
from onward.web.error_handlers import INTERNAL_ERROR, handle_errors
from onward.web.json_body import compact_json
from onward.web.openai_api.model_names import with_default_model
from onward.web.request_id_middleware import bypass_middleware_for_body
from onward.web.sse import parse_last_event_id

MAX_OPEN_HTTP_REQUESTS = 2048
GET_NEEDS_LAST_EVENT_ID = ErrorInfo(
    "method_not_allowed", "GET goes on with a stream, from the event that the header Last-Event-ID names", 405
)

_logger = logging.getLogger(__name__)


class GenerationRunner:
    """Runs the requests of one endpoint, from clients and from routers."""

    def __init__(
        self,
        builder: RequestBuilder,
        services: ApiServices,
        streams: StreamRegistry,
        formatter_factory: Callable[[ActiveRequest], StreamFormatter] = make_formatter,
        client_formatter_factory: Callable[[ActiveRequest], StreamFormatter] = ChunkFormatter,
    ) -> None:
        """`client_formatter_factory`: makes formatters that write for a client even if a router has sent the request."""
        self.builder = builder
        self.make_client_formatter = client_formatter_factory
        self._services = services
        self._streams = streams
        self._formatter_factory = formatter_factory

    async def prepare(
        self, caller: str, body: bytes, prepare: Callable[[], PreparedRequest | DeferredRender[PreparedRequest]]
    ) -> PreparedRequest:
        with self.builder.adapter.client_field_names():
            prepared = await self._services.executors.run_preprocessing(caller, prepare, len(body))
            attempt = prepared.attempt
            request_fields = log.request_fields(attempt.request_id, attempt.client_request_id)
            self._services.unknown_fields.report(prepared.unknown_fields, self.builder.path, request_fields)
            return await self.builder.validate_grammar(prepared)

    async def run(
        self,
        prepared: PreparedRequest,
        send: Send,
        on_accepted: Callable[[LiveStream], None] = lambda _: None,
        access: AccessRecord | None = None,
    ) -> None:
        """Runs a request to its end. `on_accepted` is called once the engine has accepted it. `access` gets its token
        counts and times."""
        if prepared.is_routed and self._services.engine_client.worker is None:
            raise Unavailable("the engine is not there yet", retry_after_s=RETRY_SOON_S)
        limits = await self._services.engine_client.wait_worker(prepared.deadline_at_s)
        with self.builder.adapter.client_field_names():
            stream = await self._streams.start(lambda: self.builder.start(prepared, limits), prepared.attempt)
        stream.request.note_end(self._services.clock.wall_s())
        phases = _phase_spans(stream, access)
        try:
            if stream.request.collector is not None:
                await self._services.load_shedder.wait_accepted(stream.request.collector)
            on_accepted(stream)
            if prepared.request.stream or prepared.is_routed:
                await self._stream(stream, send)
            else:
                await self._collect(stream, send)
        except RequestFailed as failure:
            stream.failure = failure.info
            raise
        except Exception:
            stream.failure = stream.failure or INTERNAL_ERROR
            raise
        finally:
            self._streams.end_stream(stream)
            if phases is not None:
                phases.close(self._services.clock.now_s())
            self._record_end(stream, access)

    def _record_first_token(self, stream: LiveStream) -> None:
        stream.first_token_at_s = now_s = self._services.clock.now_s()
        active = stream.request
        # A request with given tokens, or whose client has seen some, had its first token elsewhere.
        is_resumed = any(choice.start_position for choice in active.output.choices)
        if not is_resumed and not stream.attempt.reader_positions:
            self._services.latency.record_first_token(active.prepared.arrived_at_s, now_s)

    def _record_end(self, stream: LiveStream, access: AccessRecord | None) -> None:
        self._services.latency.record_end(
            finish_reason_of(stream), stream.request.prepared.arrived_at_s, self._services.clock.now_s()
        )
        if access is not None:
            usage = stream.request.output.usage()
            access.prompt_tokens, access.output_tokens = usage.prompt_tokens, usage.completion_tokens
            access.cached_tokens = usage.cached_tokens
            access.finish_reason = finish_reason_of(stream)
            access.first_token_at_s = stream.first_token_at_s
            access.error_code = access.error_code or (None if stream.failure is None else stream.failure.code)

    async def _collect(self, stream: LiveStream, send: Send) -> None:
        active = stream.request
        collector = BodyCollector(active)
        collector.add(active.replayed_updates)
        while not active.output.is_finished:
            updates, error = self._advance(active, await _next_outputs(active))
            collector.add(updates)
            if stream.first_token_at_s is None and _has_tokens(updates):
                self._record_first_token(stream)
            if error is not None:
                raise RequestFailed(error.info, collector.partial_body(error.info))
        headers = {**asgi.JSON_HEADERS, **ignored_fields_header(active.prepared.unknown_fields)}
        await asgi.respond(send, 200, collector.body(), headers)

    async def _stream(self, stream: LiveStream, send: Send) -> None:
        active, error, updates = stream.request, None, stream.request.pending_ends
        if active.collector is not None and active.collector.has_output:
            new_updates, error = self._advance(active, await _next_outputs(active))
            updates = updates + new_updates
        if error is not None and not updates:
            raise error  # no status was sent yet, so the error becomes an HTTP error response
        headers = {**sse.HEADERS, **ignored_fields_header(active.prepared.unknown_fields)}
        event_stream, formatter = _LazyEventStream(send, headers), self._formatter_factory(active)
        if not (formatter.has_sequence_numbers and active.prepared.attempt.reader_positions):
            await event_stream.start()
        try:
            await self._stream_events(stream, formatter, updates, error, event_stream.write)
        except RequestFailed as failure:
            stream.failure = failure.info
            if not event_stream.has_started:
                raise
            await send(asgi.body_message(b"".join(formatter.format_error(failure.info))))
        except Exception:
            attempt = stream.attempt
            _logger.exception(
                log.event(
                    "a stream failed because of an internal error",
                    **log.request_fields(attempt.request_id, attempt.client_request_id),
                )
            )
            stream.failure = INTERNAL_ERROR
            if not event_stream.has_started:
                raise RequestFailed(INTERNAL_ERROR) from None
            await send(asgi.body_message(b"".join(formatter.format_error(INTERNAL_ERROR))))
        await event_stream.start()
        await send(asgi.body_message(formatter.terminator, more_body=False))

    async def _stream_events(
        self,
        stream: LiveStream,
        formatter: StreamFormatter,
        updates: list[ChoiceUpdate],
        error: RequestFailed | None,
        write: Callable[[bytes], Awaitable[None]],
    ) -> None:
        active, events, awaits_first = stream.request, formatter.format_opening(), True
        while True:
            if awaits_first and _has_tokens(updates):
                awaits_first = False
                self._record_first_token(stream)
            events += formatter.format_updates(updates)
            if data := b"".join(events):
                await write(data)
            if error is not None:
                raise error
            if active.output.is_finished:
                break
            updates, error = self._advance(active, await _next_outputs(active))
            events = [] if updates or error else self._progress_comments(active)
        if end := formatter.format_end():
            await write(b"".join(end))

    def _progress_comments(self, active: ActiveRequest) -> list[bytes]:
        """Returns a progress comment for a router, which moves a silent stream to another instance."""
        if active.collector is None or not active.prepared.is_routed:
            return []
        return [sse.progress_comment(self._services.engine_client.progress(active.collector))]

    def _advance(
        self, active: ActiveRequest, outputs: list[EngineOutput]
    ) -> tuple[list[ChoiceUpdate], RequestFailed | None]:
        """Applies engine outputs. Returns the new updates, and the error that follows them, if any."""
        if active.prepared.is_routed and not active.prepared.attempt.is_final:
            outputs = list(map(_as_failure, outputs))
        progress = active.output.apply(outputs)
        active.note_end(self._services.clock.wall_s())
        for choice in progress.stopped:
            self._services.engine_client.stop(choice.request_id, choice.position)
        active.keep_logprobs(progress.updates)
        return progress.updates, RequestFailed(progress.error) if progress.error is not None else None


def _phase_spans(stream: LiveStream, access: AccessRecord | None) -> EnginePhaseSpans | None:
    """Returns the object that turns the engine's reports on a traced request into spans. None: it is not traced."""
    collector = stream.request.collector
    if access is None or access.trace is None or collector is None:
        return None
    collector.phases = EnginePhaseSpans(access.trace, collector.request_ids)
    return collector.phases


class _LazyEventStream:
    """An event stream whose response head is sent with the first event at the latest.

    A stream that is generated again from its seed has no events until it reaches the client's position. If events have
    sequence numbers, an error event before that would have a number that the client has already seen. So the head of such
    a stream is sent once the position is reached, and an earlier failure becomes an HTTP error response.
    """

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self.has_started = False
        self._send, self._headers = send, headers

    async def start(self) -> None:
        if not self.has_started:
            self.has_started = True
            await self._send(asgi.start_message(200, self._headers))

    async def write(self, events: bytes) -> None:
        await self.start()
        await self._send(asgi.body_message(events))


def _has_tokens(updates: list[ChoiceUpdate]) -> bool:
    """Returns whether any update has tokens. An update may also only report that the engine has accepted the
    request."""
    return any(update.token_ids for update in updates)


def _next_outputs(active: ActiveRequest) -> Coroutine[Any, Any, list[EngineOutput]]:
    assert active.collector is not None, "an unfinished answer has work under way"
    return active.collector.next_outputs()


def _as_failure(output: EngineOutput) -> EngineOutput:
    """Turns a choice that was given up into a failure of the request, because the router continues all of it elsewhere."""
    return replace(output, finish_reason="error") if output.finish_reason == PD_RESCHEDULE else output


class GenerationEndpoint:
    """An ASGI application for one generating route, for clients."""

    def __init__(self, runner: GenerationRunner, services: ApiServices, streams: StreamRegistry) -> None:
        self._num_open = 0
        self.runner = runner
        self._services = services
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._num_open += 1
        send = bypass_middleware_for_body(scope, send)
        try:
            await handle_errors(scope, send, self._serve(scope, receive, send))
        finally:
            self._num_open -= 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_open_requests(self._num_open)
        if scope["method"] == "HEAD":
            raise RequestFailed(GET_NEEDS_LAST_EVENT_ID)  # a response to HEAD has no body to resume a stream in
        cursor, context = parse_last_event_id(scope), get_request_context(scope)
        if cursor is None and scope["method"] == "POST":
            self._services.load_shedder.check()
        body = await asgi.read_body(receive, self._services.config.max_body_bytes)
        if cursor is not None and not owns_request_id(context.caller, cursor.request_id):
            raise STREAM_UNKNOWN
        if scope["method"] == "GET":
            task = self._resume_by_get(context, cursor, send)
        else:
            self._streams.check_not_draining()
            task = self.generate(context, body, cursor, send)
        del body  # the attempt has its own copy, and a stream may run for a long time
        await asgi.run_until_disconnect(receive, task)

    async def generate(self, context: RequestContext, body: bytes, cursor: Cursor | None, send: Send) -> None:
        builder = self.runner.builder
        if cursor is not None:
            can_regenerate = self._services.model.is_exact
            record = await self._find_record(context, cursor, require_reply=not can_regenerate)
            is_same = record is not None and self.is_same_request(record.attempt.body, body)
            if record is not None and is_same and await self._resume_from_record(record, context, cursor, send):
                return
            # No process has the stream, or as much of it as the client has. An exact model generates it again.
            if not can_regenerate:
                raise STREAM_UNKNOWN
        context.access.request_id = context.request_id if cursor is None else cursor.request_id
        context.access.begin_trace(context.access.request_id, cursor=cursor, is_attempt=True)
        context.access.describe_request(builder.path, body)
        full_body = await self.with_previous_items(context, body)
        prepared = await self.runner.prepare(
            context.caller.name, full_body, partial(builder.prepare_client_request, context, full_body, cursor)
        )
        del body, full_body  # the attempt has it without whitespace
        await self.run_prepared(context, prepared, send)

    async def run_prepared(self, context: RequestContext, prepared: PreparedRequest, send: Send) -> None:
        await self.runner.run(prepared, send, access=context.access)

    def is_same_request(self, known_body: bytes, body: bytes) -> bool:
        """Returns whether a client's body is the body of a known request, sent again. White space is not compared, and
        a missing model counts as the served one."""
        return known_body == with_default_model(compact_json(body), self._services.model.name)

    async def with_previous_items(self, context: RequestContext, body: bytes) -> bytes:
        """Returns the body with all that must be added to it before the first attempt."""
        return body

    async def _resume_by_get(self, context: RequestContext, cursor: Cursor | None, send: Send) -> None:
        if cursor is None:
            raise RequestFailed(GET_NEEDS_LAST_EVENT_ID)
        record = await self._find_record(context, cursor, require_reply=True)
        if record is None or not await self._resume_from_record(record, context, cursor, send):
            raise STREAM_UNKNOWN

    async def _find_record(
        self, context: RequestContext, cursor: Cursor, *, require_reply: bool
    ) -> StreamRecord | None:
        """Returns the record of the stream, if the client may see it. `require_reply`: the stream cannot be generated
        again, so a stream store that does not reply is an error and not "unknown"."""
        caller = context.caller.access_filter
        record = await self._streams.find(cursor.request_id, cursor.attempt_epoch, caller, require_reply=require_reply)
        return record if record is not None and record.attempt.path == self.runner.builder.path else None

    async def _resume_from_record(
        self, record: StreamRecord, context: RequestContext, cursor: Cursor, send: Send
    ) -> bool:
        """Resumes the stream from the client's position. Returns False if the record does not reach that position."""
        if record.is_cancelled:
            await self.send_cancelled(record, cursor, send)
            return True
        attempt = resumed_attempt(record.attempt, cursor)
        if attempt is not None:
            await self._resume(context, attempt, record, send)
        return attempt is not None

    async def send_cancelled(self, record: StreamRecord, cursor: Cursor, send: Send) -> None:
        """Sends the end of a cancelled stream, which does not run again."""
        raise STREAM_UNKNOWN

    async def _resume(self, context: RequestContext, attempt: Attempt, record: StreamRecord, send: Send) -> None:
        builder, started_at_s, caller = self.runner.builder, context.started_at_s, context.caller
        if caller.name == attempt.caller:
            # An admin may continue a stream of another caller, which is within that caller's limits.
            attempt = replace(attempt, caller_limits=caller.limits, caller_priority=caller.priority)
        context.access.request_id = attempt.request_id
        trace = context.access.begin_trace(attempt.request_id, attempt.trace, is_attempt=True)
        context.access.describe_request(attempt.path, attempt.body)
        attempt = replace(attempt, trace=trace)
        prepared = await self.runner.prepare(
            attempt.caller, attempt.body, lambda: builder.prepare_attempt(attempt, started_at_s, is_routed=False)
        )
        if not prepared.request.stream:
            raise STREAM_UNKNOWN
        await self.runner.run(with_prior_logprobs(prepared, record), send, access=context.access)


def check_open_requests(num_open: int) -> None:
    """Raises `Overloaded` if too many requests are open. This bounds bodies and thread work that are held before the engine
    can refuse a request."""
    if num_open > MAX_OPEN_HTTP_REQUESTS:
        raise Overloaded(
            f"{MAX_OPEN_HTTP_REQUESTS} requests are open here already; try again later", retry_after_s=RETRY_SOON_S
        )
