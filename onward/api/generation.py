"""One request, from the body to the last event, for every endpoint that generates.

The order is the point: everything about a request is fixed and checked before the engine hears of it; the engine has
accepted it before the response has a status; and whichever way it ends, nothing of it is left behind but a record of its
tokens, by which it can be gone on with.
"""

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from onward.api.forms import Collected, Form, form_of
from onward.api.identity import Identity, identity_of
from onward.api.jobs import Backend, Job, Jobs
from onward.api.known_fields import ignored_header
from onward.api.ledger import RESCHEDULE, Delivery
from onward.api.pieces import Piece
from onward.api.prepared import Prepared
from onward.api.starts import STREAM_UNKNOWN, continued
from onward.api.streams import BROKEN, Stream, Streams
from onward.api.work_queues import ByTemplate
from onward.errors import Overloaded, Unavailable
from onward.proto.cursor import Cursor
from onward.proto.request import ErrorInfo
from onward.proto.router import Attempt, Record
from onward.web import http, sse
from onward.web.body import compact
from onward.web.envelope import with_straight_body
from onward.web.error_answers import answer_errors
from onward.web.failures import RequestFailed
from onward.web.last_event import last_event
from onward.web.owned_ids import may_ask_for

MAX_OPEN_EXCHANGES = 2048
ONLY_WITH_CURSOR = ErrorInfo(
    "method_not_allowed", "GET goes on with a stream, from the event that the header Last-Event-ID names", 405
)

_logger = logging.getLogger(__name__)


class Generator:
    """Runs the jobs of one endpoint, whoever asks."""

    def __init__(
        self, jobs: Jobs, backend: Backend, streams: Streams, new_form: Callable[[Job], Form] = form_of
    ) -> None:
        self.jobs = jobs
        self._backend = backend
        self._streams = streams
        self._new_form = new_form

    async def prepared(
        self, caller: str, body: bytes, prepare: Callable[[], Prepared | ByTemplate[Prepared]]
    ) -> Prepared:
        prepared = await self._backend.queues.run_text(caller, prepare, len(body))
        self._backend.unknown_fields.note(prepared.unknown_fields, self.jobs.path, prepared.attempt.request_id)
        return await self.jobs.with_checked_structure(prepared)

    async def run(self, prepared: Prepared, send: Send, begun: Callable[[Stream], None] = lambda _: None) -> None:
        """`begun`: is told once the engine has taken it."""
        if prepared.is_routed and self._backend.client.worker is None:
            raise Unavailable("the engine is not there yet", retry_after_s=1.0)
        limits = await self._backend.client.limits(prepared.deadline_at_s)
        stream = await self._streams.start(lambda: self.jobs.start(prepared, limits), prepared.attempt)
        try:
            if stream.job.mailbox is not None:
                await self._backend.fullness.accepted(stream.job.mailbox)
            begun(stream)
            if prepared.request.stream or prepared.is_routed:
                await self._stream(stream, send)
            else:
                await self._collect(stream.job, send)
        except RequestFailed as failure:
            stream.failure = failure.info
            raise
        except Exception:
            stream.failure = stream.failure or BROKEN
            raise
        finally:
            self._streams.leave(stream)

    async def _collect(self, job: Job, send: Send) -> None:
        collected = Collected(job)
        collected.add(job.replayed)
        while not job.answer.finished:
            pieces, error = self._advance(job, await _news(job))
            collected.add(pieces)
            if error is not None:
                raise RequestFailed(error.info, collected.partial(error.info))
        headers = {**http.JSON_HEADERS, **ignored_header(job.prepared.unknown_fields)}
        await http.respond(send, 200, collected.body(), headers)

    async def _stream(self, stream: Stream, send: Send) -> None:
        job, error, pieces = stream.job, None, stream.job.closing
        if job.mailbox is not None and job.mailbox.has_news:
            news, error = self._advance(job, await _news(job))
            pieces = pieces + news
        if error is not None and not pieces:
            raise error  # there is no status yet, so it is an error of HTTP
        headers = {**sse.HEADERS, **ignored_header(job.prepared.unknown_fields)}
        out, form = _EventStream(send, headers), self._new_form(job)
        if not (form.has_numbers and job.prepared.attempt.skip_to):
            await out.begin()
        try:
            await self._stream_events(job, form, pieces, error, out.write)
        except RequestFailed as failure:
            stream.failure = failure.info
            if not out.has_begun:
                raise
            await send(http.part(b"".join(form.failed(failure.info))))
        except Exception:
            _logger.exception("a stream failed by a fault of ours")
            stream.failure = BROKEN
            if not out.has_begun:
                raise RequestFailed(BROKEN) from None
            await send(http.part(b"".join(form.failed(BROKEN))))
        await out.begin()
        await send(http.part(form.done, more=False))

    async def _stream_events(
        self,
        job: Job,
        form: Form,
        pieces: list[Piece],
        error: RequestFailed | None,
        write: Callable[[bytes], Awaitable[None]],
    ) -> None:
        events = form.opening()
        while True:
            events += form.news(pieces)
            if told := b"".join(events):
                await write(told)
            if error is not None:
                raise error
            if job.answer.finished:
                break
            pieces, error = self._advance(job, await _news(job))
            events = [] if pieces or error else self._signs_of_life(job)
        if end := form.end():
            await write(b"".join(end))

    def _signs_of_life(self, job: Job) -> list[bytes]:
        """A router takes a stream elsewhere if it hears nothing."""
        if job.mailbox is None or not job.prepared.is_routed:
            return []
        return [sse.progress_comment(self._backend.client.progress(job.mailbox))]

    def _advance(self, job: Job, deliveries: list[Delivery]) -> tuple[list[Piece], RequestFailed | None]:
        """The next pieces, and the error that follows them, if one does."""
        if job.prepared.is_routed and not job.prepared.attempt.final:
            deliveries = list(map(_as_failure, deliveries))
        progress = job.answer.take(deliveries)
        for choice in progress.stopped:
            self._backend.client.stop(choice.request_id, choice.position)
        job.note_scores(progress.pieces)
        return progress.pieces, RequestFailed(progress.error) if progress.error is not None else None


class _EventStream:
    """An answer of events. Its head is sent with the first event at the latest.

    A stream that is made again from its seed has nothing to tell until it reaches the client's place. Where events have
    numbers, an event about a failure before that would have a number that the client has seen already. So the head of such
    a stream waits for the place, and the failure is an error of HTTP.
    """

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self.has_begun = False
        self._send, self._headers = send, headers

    async def begin(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send(http.start_message(200, self._headers))

    async def write(self, events: bytes) -> None:
        await self.begin()
        await self._send(http.part(events))


def _news(job: Job) -> Coroutine[Any, Any, list[Delivery]]:
    assert job.mailbox is not None, "an unfinished answer has work under way"
    return job.mailbox.take()


def _as_failure(delivery: Delivery) -> Delivery:
    """For a router that will carry on: one choice that is given up fails the answer."""
    return replace(delivery, finish_reason="error") if delivery.finish_reason == RESCHEDULE else delivery


class GenerationEndpoint:
    """An ASGI application for one route, as clients use it."""

    def __init__(self, generator: Generator, backend: Backend, streams: Streams) -> None:
        self._num_open = 0
        self.generator = generator
        self._backend = backend
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._num_open += 1
        send = with_straight_body(scope, send)
        try:
            await answer_errors(send, self._serve(scope, receive, send))
        finally:
            self._num_open -= 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_room(self._num_open)
        if scope["method"] == "HEAD":
            raise RequestFailed(ONLY_WITH_CURSOR)  # nobody would read what it takes up
        cursor, identity = last_event(scope), identity_of(scope)
        if cursor is None and scope["method"] == "POST":
            self._backend.fullness.check()
        body = await http.read_body(receive, self._backend.config.max_body_bytes)
        if cursor is not None and not may_ask_for(identity.caller, cursor.request_id):
            raise STREAM_UNKNOWN
        if scope["method"] == "GET":
            work = self._continue(identity, cursor, send)
        else:
            self._streams.check_open()
            work = self.generate(identity, body, cursor, send)
        del body  # what is needed of it is in the attempt, and a stream may run for long
        await http.while_connected(receive, work)

    async def generate(self, identity: Identity, body: bytes, cursor: Cursor | None, send: Send) -> None:
        jobs = self.generator.jobs
        if cursor is not None:
            can_be_made_again = self._backend.model.is_exact
            record = await self._record(identity, cursor, must_answer=not can_be_made_again)
            is_meant = record is not None and self.repeats(record.attempt.body, body)
            if record is not None and is_meant and await self._told_from(record, identity, cursor, send):
                return
            # Nobody has it, or not so much of it as the client: where that gives the same tokens, it is made again.
            if not can_be_made_again:
                raise STREAM_UNKNOWN
        whole = await self.completed(identity, body)
        prepared = await self.generator.prepared(
            identity.caller.name, whole, partial(jobs.of_client, identity, whole, cursor)
        )
        del body, whole  # the attempt has it without whitespace
        await self.generator.run(prepared, send)

    def repeats(self, known: bytes, body: bytes) -> bool:
        """Whether a client has sent the request again that these are known by."""
        return known == compact(body)

    async def completed(self, identity: Identity, body: bytes) -> bytes:
        """With whatever must be known before the first attempt."""
        return body

    async def _continue(self, identity: Identity, cursor: Cursor | None, send: Send) -> None:
        if cursor is None:
            raise RequestFailed(ONLY_WITH_CURSOR)
        record = await self._record(identity, cursor, must_answer=True)
        if record is None or not await self._told_from(record, identity, cursor, send):
            raise STREAM_UNKNOWN

    async def _record(self, identity: Identity, cursor: Cursor, *, must_answer: bool) -> Record | None:
        """The record of the stream, if the client may see it. `must_answer`: the stream cannot be made again, so a shelf
        that does not reply is an error and not "unknown"."""
        caller = identity.caller.scope
        record = await self._streams.find(cursor.request_id, cursor.epoch, caller, must_answer=must_answer)
        return record if record is not None and record.attempt.path == self.generator.jobs.path else None

    async def _told_from(self, record: Record, identity: Identity, cursor: Cursor, send: Send) -> bool:
        """From the client's place on. False: the record does not reach so far."""
        if record.is_cancelled:
            await self.tell_end(record, cursor, send)
            return True
        attempt = continued(record.attempt, cursor)
        if attempt is not None:
            await self._go_on(identity, attempt, send)
        return attempt is not None

    async def tell_end(self, record: Record, cursor: Cursor, send: Send) -> None:
        """Of one that was cancelled, and does not run again."""
        raise STREAM_UNKNOWN

    async def _go_on(self, identity: Identity, attempt: Attempt, send: Send) -> None:
        jobs, started_at_s, caller = self.generator.jobs, identity.started_at_s, identity.caller
        if caller.name == attempt.caller:
            # An admin may continue a stream of another caller, which is within that caller's limits.
            attempt = replace(attempt, caller_limits=caller.limits, caller_priority=caller.priority)
        prepared = await self.generator.prepared(
            attempt.caller, attempt.body, lambda: jobs.of_attempt(attempt, started_at_s, is_routed=False)
        )
        if not prepared.request.stream:
            raise STREAM_UNKNOWN
        await self.generator.run(prepared, send)


def check_room(num_open: int) -> None:
    """Bounds what is held before the engine can say that it is too much: bodies, and work for the threads."""
    if num_open > MAX_OPEN_EXCHANGES:
        raise Overloaded(f"{MAX_OPEN_EXCHANGES} requests are open here already; try again later", retry_after_s=1.0)
