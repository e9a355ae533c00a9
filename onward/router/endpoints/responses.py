"""`POST /v1/responses` at a router: what an earlier response has said is put in front of it, and one that runs in the
background is carried although nobody waits for it."""

import asyncio

import msgspec
from starlette.types import Receive, Send

from onward.errors import OnwardError, Overloaded
from onward.proto.cursor import Cursor
from onward.proto.engine import ErrorInfo
from onward.proto.router import StreamRecord
from onward.router.client_stream import ClientStream
from onward.router.client_writer import ClientWriter
from onward.router.endpoints.generation import RouterGenerationEndpoint
from onward.router.record_lookup import find_records
from onward.router.response_store import ABORTED, REPLACED, ClusterResponseStore
from onward.router.routing_tokenizer import RoutingTokenizer
from onward.router.stream_routing_state import StreamRoutingState
from onward.router.stream_runner import StreamRunner
from onward.web import asgi, sse
from onward.web.auth.api_key_table import Caller
from onward.web.error_format import RequestFailed, error_body, response_error_fields
from onward.web.openai_api.response_endpoint import last_sequence_number, stream_stored_response, with_previous_response
from onward.web.openai_api.response_ids import PREFIX
from onward.web.openai_api.response_options import is_stored, response_options
from onward.web.task_pool import TaskPool

MAX_COPIES = 256
ACCEPT_POLL_S = 0.01
FINAL_EVENT_TIMEOUT_S = 3.0
"""A stream fails where instances do, and then none of them is waited for as a client would wait for its answer."""


class RouterResponsesEndpoint(RouterGenerationEndpoint):
    def __init__(
        self, runner: StreamRunner, routing_tokenizer: RoutingTokenizer | None, response_store: ClusterResponseStore
    ) -> None:
        super().__init__(runner, routing_tokenizer)
        self._runner = runner
        self._response_store = response_store
        self._reports_resumes = runner.core.config.report_resumes
        self._background_tasks = TaskPool()
        self._copy_tasks: set[asyncio.Task[None]] = set()
        """Responses that are being copied to a second instance."""

    async def resolve_body(self, caller: Caller, body: bytes) -> bytes:
        return await with_previous_response(self._response_store, caller, body, self._runner.core.config.max_body_bytes)

    async def with_latest_epoch(self, cursor: Cursor) -> Cursor:
        """Whoever has followed it by its id has had it taken up by an instance, without us."""
        stored = await find_records(self._runner, cursor.request_id)
        epoch = max((record.attempt.attempt_epoch for record in stored.records), default=0)
        return msgspec.structs.replace(cursor, attempt_epoch=max(cursor.attempt_epoch, epoch))

    async def try_send_end(self, cursor: Cursor, caller: Caller, send: Send) -> bool:
        record = None
        if self._runner.core.find_live(cursor.request_id) is None:
            record = await self._response_store.cancelled(caller, cursor.request_id)
        if record is None or record.attempt.seed != cursor.seed or len(cursor.choices) != 1:
            return False
        [events] = cursor.choices
        remaining = (
            b"" if events.finish_reason is not None else await self._response_store.rest(record, events.position)
        )
        await send(asgi.start_message(200, sse.HEADERS))
        await send(asgi.body_message(remaining, more_body=False))
        return True

    async def stream_to_client(self, routing: StreamRoutingState, caller: Caller, receive: Receive, send: Send) -> None:
        is_resumed = routing.stream.has_progress  # by a client that wants to read on from its place
        if is_resumed or not response_options(routing.stream.request.body).background:
            writer = ResponseEventWriter(
                send, routing.stream, self._response_store, reports_resumes=self._reports_resumes
            )
            await asgi.run_until_disconnect(receive, self._run_and_copy(routing, writer))
            return
        routing.is_background = True
        await self._start_background(routing)
        await asgi.run_until_disconnect(receive, self._respond(routing, caller, send))

    async def _run_and_copy(self, routing: StreamRoutingState, writer: ClientWriter) -> None:
        stream = routing.stream
        await self._runner.run_stream(routing, writer)
        if (
            stream.all_finished
            and is_stored(stream.request.path, stream.request.body)
            and len(self._copy_tasks) < MAX_COPIES
        ):
            # A task of its own: the client has its answer, and may hang up now.
            task = asyncio.create_task(self._response_store.store_final(stream))
            self._copy_tasks.add(task)
            task.add_done_callback(self._copy_tasks.discard)

    async def _start_background(self, routing: StreamRoutingState) -> None:
        """Until an instance has taken it."""
        writer = BackgroundWriter(routing.stream, self._response_store)
        try:
            task = self._background_tasks.start(self._runner.run_stream(routing, writer), routing.stream.request.caller)
        except Overloaded:
            self._runner.core.close_stream(routing, self._runner.clock.now_s(), keep=False)
            raise
        while not (routing.stream.was_accepted or task.done()):
            await asyncio.wait((task,), timeout=ACCEPT_POLL_S)
        if not routing.stream.was_accepted and writer.error is not None and writer.error.code != ABORTED:
            raise RequestFailed(writer.error)

    async def _respond(self, routing: StreamRoutingState, caller: Caller, send: Send) -> None:
        stream = routing.stream
        if stream.request.is_streaming:
            await stream_stored_response(self._response_store, caller, PREFIX + stream.request_id, -1, send)
            return
        if self._runner.core.find_live(stream.request_id) is routing:
            record = self._response_store.record_of(stream, is_live=True)
        else:
            record = await self._response_store.find(caller, PREFIX + stream.request_id)
        await asgi.respond(send, 200, await self._response_store.show(record))


class ResponseEventWriter(ClientWriter):
    """It needs no mark at its end, and a failure is an event like any other. What was aborted is cancelled as the instances
    keep it, and the client is told of that."""

    end_marker = b""

    def __init__(
        self, send: Send, stream: ClientStream, response_store: ClusterResponseStore, *, reports_resumes: bool
    ) -> None:
        super().__init__(send, stream, reports_resumes=reports_resumes)
        self._client_stream = stream
        self._response_store = response_store
        self._last = b""

    async def write(self, events: bytes) -> None:
        if not events.startswith(b":"):  # a sign of life has no number
            self._last = events
        await super().write(events)

    async def fail(self, error: ErrorInfo, body: bytes | None) -> None:
        stream, record = self._client_stream, await self._cancelled(error)
        end = None if record is None or not stream.has_reached_cursor else await self._end_of(record)
        if end is None:
            await super().fail(error, await self._with_partial(error, body))
        elif stream.request.is_streaming:
            await self.write(end)
            await self._send(asgi.body_message(b"", more_body=False))
        else:
            headers = {**asgi.JSON_HEADERS, **self._resume_header(), **self._ignored_header()}
            await asgi.respond(self._send, 200, end, headers)

    async def _cancelled(self, error: ErrorInfo) -> StreamRecord | None:
        """How a response has ended that was not to go on; it may have been complete already. None: it has failed."""
        stream = self._client_stream
        if error.code == REPLACED:
            return await self._response_store.cancelled(None, stream.request_id)
        if error.code != ABORTED:
            return None
        record = self._response_store.record_of(stream, is_live=False)
        is_response_stored = is_stored(stream.request.path, stream.request.body)
        stored = await self._response_store.cancel_soon(record, FINAL_EVENT_TIMEOUT_S) if is_response_stored else None
        return stored or msgspec.structs.replace(record, is_cancelled=True)

    async def _end_of(self, record: StreamRecord) -> bytes | None:
        """Of a response that is over: for a client that has the events of the tokens up to here, or nothing. None: no
        instance could be asked in time."""
        is_streaming = self._client_stream.request.is_streaming
        try:
            async with asyncio.timeout(FINAL_EVENT_TIMEOUT_S):
                events = (
                    self._response_store.rest(record, self._num_tokens_sent)
                    if is_streaming
                    else self._response_store.ask_instances("whole", record)
                )
                return await events
        except (OnwardError, RequestFailed, TimeoutError):
            return None

    async def _with_partial(self, error: ErrorInfo, body: bytes | None) -> bytes | None:
        """The body of an error of HTTP, with the output so far."""
        stream = self._client_stream
        if body is not None or not stream.has_tokens or stream.request.is_streaming:
            return body
        record = msgspec.structs.replace(self._response_store.record_of(stream, is_live=False), error=error)
        partial = await self._end_of(record)
        return None if partial is None else error_body(error, partial)

    @property
    def _num_tokens_sent(self) -> int | None:
        """Before the first token its client has been told nothing, not even that it has begun."""
        stream = self._client_stream
        return len(stream.choices[0].token_ids) if stream.has_progress else None

    async def error_event(self, error: ErrorInfo, body: bytes | None) -> bytes:
        """The last event, as an instance makes it: its number follows from the tokens that the client has. Without an
        instance it has no output. Where its number is not known, there is none: the stream ends as one that was cut."""
        stream = self._client_stream
        if not stream.has_reached_cursor:
            return b""
        record = msgspec.structs.replace(self._response_store.record_of(stream, is_live=False), error=error)
        if (end := await self._end_of(record)) is not None:
            return end
        last = last_sequence_number(self._last)
        is_known = last >= 0 or not stream.has_progress
        return _failed_event(stream, error, last + 1) if is_known else b""


class BackgroundWriter(ClientWriter):
    """Reads what is made in the background."""

    def __init__(self, stream: ClientStream, response_store: ClusterResponseStore) -> None:
        super().__init__(_ignore, stream, reports_resumes=False)
        self.error: ErrorInfo | None = None
        self._client_stream = stream
        self._response_store = response_store

    async def write(self, events: bytes) -> None:
        pass

    async def finish(self) -> None:
        await self._response_store.store_final(self._client_stream)

    async def fail(self, error: ErrorInfo, body: bytes | None) -> None:
        self.error = error
        if error.code == ABORTED:
            await self._response_store.cancel_soon(
                self._response_store.record_of(self._client_stream, is_live=False), FINAL_EVENT_TIMEOUT_S
            )
        elif self._client_stream.was_accepted:
            await self._response_store.store_final(self._client_stream, error)


async def _ignore(_: object) -> None:
    pass


def _failed_event(stream: ClientStream, error: ErrorInfo, sequence_number: int) -> bytes:
    client_request = stream.request
    response = {
        "id": PREFIX + client_request.request_id,
        "object": "response",
        "created_at": client_request.created_s,
        "status": "failed",
        "error": response_error_fields(error),
        "model": response_options(client_request.body).model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    fields = {"type": "response.failed", "sequence_number": sequence_number, "response": response}
    return sse.named_event("response.failed", msgspec.json.encode(fields))
