"""`POST /v1/responses` at a router: puts the conversation of an earlier response before the request, and runs
background responses although no client waits."""

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
from onward.web.openai_api.response_object import repeated_fields, response_object
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
        self._response_store = response_store
        self._reports_resumes = runner.core.config.report_resumes
        self._background_tasks = TaskPool()
        self._copy_tasks: set[asyncio.Task[None]] = set()
        """Responses that are being copied to a second instance."""

    async def resolve_body(self, caller: Caller, body: bytes) -> bytes:
        return await with_previous_response(self._response_store, caller, body, self.runner.core.config.max_body_bytes)

    async def with_latest_epoch(self, cursor: Cursor) -> Cursor:
        """Returns the cursor with the highest attempt epoch of the stored records. A client that follows a response by
        its id makes an instance resume it, so this router does not know that epoch."""
        stored = await find_records(self.runner, cursor.request_id)
        epoch = max((record.attempt.attempt_epoch for record in stored.records), default=0)
        return msgspec.structs.replace(cursor, attempt_epoch=max(cursor.attempt_epoch, epoch))

    async def try_send_end(self, cursor: Cursor, caller: Caller, send: Send) -> bool:
        record = None
        if self.runner.core.find_live(cursor.request_id) is None:
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
        await self.runner.run_stream(routing, writer)
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
        """Starts the task of a background response, and returns when an instance has accepted it. Raises if it fails
        before."""
        writer = BackgroundWriter(routing.stream, self._response_store)
        try:
            task = self._background_tasks.start(self.runner.run_stream(routing, writer), routing.stream.request.caller)
        except Overloaded:
            self.runner.core.close_stream(routing, self.runner.clock.now_s(), keep=False)
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
        if self.runner.core.find_live(stream.request_id) is routing:
            record = self._response_store.record_of(stream, is_live=True)
        else:
            record = await self._response_store.find(caller, PREFIX + stream.request_id)
        await asgi.respond(send, 200, await self._response_store.show(record))


class ResponseEventWriter(ClientWriter):
    """Writes the events of a response. No end marker follows them, and a failure is an event like any other. An aborted
    response ends as cancelled, as the instances store it."""

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
        """Returns the final record of an aborted or replaced response; None if the response has failed. Cancels an
        aborted stored response at the instances. The returned record is complete if an instance had completed the
        response before."""
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
        """Returns the final events of a response that is over, for a client that has the events of these tokens.
        Returns None if no instance could be queried in time."""
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
        """Returns the body of an HTTP error with the output so far. Returns `body` as it is for a streaming client, for
        an error that an instance wrote, and for a response without tokens. Returns None if no instance can render the
        output in time."""
        stream = self._client_stream
        if body is not None or not stream.has_tokens or stream.request.is_streaming:
            return body
        record = msgspec.structs.replace(self._response_store.record_of(stream, is_live=False), error=error)
        partial = await self._end_of(record)
        return None if partial is None else error_body(error, partial)

    @property
    def _num_tokens_sent(self) -> int | None:
        """None before the first token: the client has no event yet, not even that the response was created."""
        stream = self._client_stream
        return len(stream.choices[0].token_ids) if stream.has_progress else None

    async def error_event(self, error: ErrorInfo, body: bytes | None) -> bytes:
        """Returns the final event as an instance renders it, because its sequence number follows from the tokens that
        the client has. If no instance answers, the event has no output. If its sequence number is not known, returns no
        event, and the stream ends as if its connection was lost."""
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
    response = response_object(
        repeated_fields(client_request.body),
        response_id=PREFIX + client_request.request_id,
        created_s=client_request.created_s,
        model=stream.model or client_request.model,
        status="failed",
        error=response_error_fields(error),
    )
    fields = {"type": "response.failed", "sequence_number": sequence_number, "response": response}
    return sse.named_event("response.failed", msgspec.json.encode(fields))
