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
from onward.router.routed_stream import RoutedStream
from onward.router.routing_tokenizer import RoutingTokenizer
from onward.router.stream_runner import StreamRunner
from onward.web import asgi, sse
from onward.web.auth.api_key_table import Caller
from onward.web.error_format import RequestFailed, error_body
from onward.web.openai_api.response_endpoint import last_sequence_number, stream_stored_response, with_previous_response
from onward.web.openai_api.response_ids import PREFIX
from onward.web.openai_api.response_options import is_stored, response_options
from onward.web.response_failures import response_error_fields
from onward.web.task_pool import TaskPool

MAX_COPIES = 256
ACCEPT_POLL_S = 0.01
FINAL_EVENT_TIMEOUT_S = 3.0
"""A stream fails where instances do, and then none of them is waited for as a client would wait for its answer."""


class RouterResponsesEndpoint(RouterGenerationEndpoint):
    def __init__(self, serving: StreamRunner, tokenizing: RoutingTokenizer | None, found: ClusterResponseStore) -> None:
        super().__init__(serving, tokenizing)
        self._serving = serving
        self._found = found
        self._tells_resumes = serving.core.config.report_resumes
        self._background = TaskPool()
        self._copies: set[asyncio.Task[None]] = set()
        """Responses that are being copied to a second instance."""

    async def resolve_body(self, caller: Caller, body: bytes) -> bytes:
        return await with_previous_response(self._found, caller, body, self._serving.core.config.max_body_bytes)

    async def with_latest_epoch(self, place: Cursor) -> Cursor:
        """Whoever has followed it by its id has had it taken up by an instance, without us."""
        kept = await find_records(self._serving, place.request_id)
        epoch = max((record.attempt.attempt_epoch for record in kept.records), default=0)
        return msgspec.structs.replace(place, attempt_epoch=max(place.attempt_epoch, epoch))

    async def told_end(self, place: Cursor, caller: Caller, send: Send) -> bool:
        record = None
        if self._serving.core.find_live(place.request_id) is None:
            record = await self._found.cancelled(caller, place.request_id)
        if record is None or record.attempt.seed != place.seed or len(place.choices) != 1:
            return False
        [told] = place.choices
        rest = b"" if told.finish_reason is not None else await self._found.rest(record, told.position)
        await send(asgi.start_message(200, sse.HEADERS))
        await send(asgi.body_message(rest, more=False))
        return True

    async def stream_to_client(self, route: RoutedStream, caller: Caller, receive: Receive, send: Send) -> None:
        is_taken_up = route.stream.has_progress  # by a client that wants to read on from its place
        if is_taken_up or not response_options(route.stream.request.body).background:
            client = ResponseEventWriter(send, route.stream, self._found, tells_resumes=self._tells_resumes)
            await asgi.run_until_disconnect(receive, self._run_and_copy(route, client))
            return
        route.is_background = True
        await self._start_background(route)
        await asgi.run_until_disconnect(receive, self._respond(route, caller, send))

    async def _run_and_copy(self, route: RoutedStream, client: ClientWriter) -> None:
        stream = route.stream
        await self._serving.run_stream(route, client)
        if (
            stream.all_finished
            and is_stored(stream.request.path, stream.request.body)
            and len(self._copies) < MAX_COPIES
        ):
            # A task of its own: the client has its answer, and may hang up now.
            copy = asyncio.create_task(self._found.store_final(stream))
            self._copies.add(copy)
            copy.add_done_callback(self._copies.discard)

    async def _start_background(self, route: RoutedStream) -> None:
        """Until an instance has taken it."""
        client = BackgroundWriter(route.stream, self._found)
        try:
            task = self._background.start(self._serving.run_stream(route, client), route.stream.request.caller)
        except Overloaded:
            self._serving.core.close_stream(route, self._serving.clock.now_s(), keep=False)
            raise
        while not (route.stream.was_accepted or task.done()):
            await asyncio.wait((task,), timeout=ACCEPT_POLL_S)
        if not route.stream.was_accepted and client.info is not None and client.info.code != ABORTED:
            raise RequestFailed(client.info)

    async def _respond(self, route: RoutedStream, caller: Caller, send: Send) -> None:
        stream = route.stream
        if stream.request.is_streaming:
            await stream_stored_response(self._found, caller, PREFIX + stream.request_id, -1, send)
            return
        if self._serving.core.find_live(stream.request_id) is route:
            record = self._found.record_of(stream, is_live=True)
        else:
            record = await self._found.find(caller, PREFIX + stream.request_id)
        await asgi.respond(send, 200, await self._found.show(record))


class ResponseEventWriter(ClientWriter):
    """It needs no mark at its end, and a failure is an event like any other. What was aborted is cancelled as the instances
    keep it, and the client is told of that."""

    end_marker = b""

    def __init__(self, send: Send, stream: ClientStream, found: ClusterResponseStore, *, tells_resumes: bool) -> None:
        super().__init__(send, stream, reports_resumes=tells_resumes)
        self._told_stream = stream
        self._found = found
        self._last = b""

    async def write(self, events: bytes) -> None:
        if not events.startswith(b":"):  # a sign of life has no number
            self._last = events
        await super().write(events)

    async def fail(self, info: ErrorInfo, body: bytes | None) -> None:
        stream, record = self._told_stream, await self._cancelled(info)
        end = None if record is None or not stream.has_reached_cursor else await self._end_of(record)
        if end is None:
            await super().fail(info, await self._with_partial(info, body))
        elif stream.request.is_streaming:
            await self.write(end)
            await self._send(asgi.body_message(b"", more=False))
        else:
            headers = {**asgi.JSON_HEADERS, **self._resume_header(), **self._ignored_header()}
            await asgi.respond(self._send, 200, end, headers)

    async def _cancelled(self, info: ErrorInfo) -> StreamRecord | None:
        """How a response has ended that was not to go on; it may have been complete already. None: it has failed."""
        stream = self._told_stream
        if info.code == REPLACED:
            return await self._found.cancelled(None, stream.request_id)
        if info.code != ABORTED:
            return None
        record = self._found.record_of(stream, is_live=False)
        is_kept = is_stored(stream.request.path, stream.request.body)
        kept = await self._found.cancel_soon(record, FINAL_EVENT_TIMEOUT_S) if is_kept else None
        return kept or msgspec.structs.replace(record, is_cancelled=True)

    async def _end_of(self, record: StreamRecord) -> bytes | None:
        """Of a response that is over: for a client that has the events of the tokens up to here, or nothing. None: no
        instance could be asked in time."""
        streams = self._told_stream.request.is_streaming
        try:
            async with asyncio.timeout(FINAL_EVENT_TIMEOUT_S):
                told = (
                    self._found.rest(record, self._num_told) if streams else self._found.ask_instances("whole", record)
                )
                return await told
        except (OnwardError, RequestFailed, TimeoutError):
            return None

    async def _with_partial(self, info: ErrorInfo, body: bytes | None) -> bytes | None:
        """The body of an error of HTTP, with the output so far."""
        stream = self._told_stream
        if body is not None or not stream.has_tokens or stream.request.is_streaming:
            return body
        record = msgspec.structs.replace(self._found.record_of(stream, is_live=False), error=info)
        partial = await self._end_of(record)
        return None if partial is None else error_body(info, partial)

    @property
    def _num_told(self) -> int | None:
        """Before the first token its client has been told nothing, not even that it has begun."""
        stream = self._told_stream
        return len(stream.choices[0].token_ids) if stream.has_progress else None

    async def error_event(self, info: ErrorInfo, body: bytes | None) -> bytes:
        """The last event, as an instance makes it: its number follows from the tokens that the client has. Without an
        instance it has no output. Where its number is not known, there is none: the stream ends as one that was cut."""
        stream = self._told_stream
        if not stream.has_reached_cursor:
            return b""
        record = msgspec.structs.replace(self._found.record_of(stream, is_live=False), error=info)
        if (end := await self._end_of(record)) is not None:
            return end
        last = last_sequence_number(self._last)
        is_known = last >= 0 or not stream.has_progress
        return _failed_event(stream, info, last + 1) if is_known else b""


class BackgroundWriter(ClientWriter):
    """Reads what is made in the background."""

    def __init__(self, stream: ClientStream, found: ClusterResponseStore) -> None:
        super().__init__(_ignore, stream, reports_resumes=False)
        self.info: ErrorInfo | None = None
        self._carried = stream
        self._found = found

    async def write(self, events: bytes) -> None:
        pass

    async def finish(self) -> None:
        await self._found.store_final(self._carried)

    async def fail(self, info: ErrorInfo, body: bytes | None) -> None:
        self.info = info
        if info.code == ABORTED:
            await self._found.cancel_soon(self._found.record_of(self._carried, is_live=False), FINAL_EVENT_TIMEOUT_S)
        elif self._carried.was_accepted:
            await self._found.store_final(self._carried, info)


async def _ignore(_: object) -> None:
    pass


def _failed_event(stream: ClientStream, info: ErrorInfo, number: int) -> bytes:
    origin = stream.request
    response = {
        "id": PREFIX + origin.request_id,
        "object": "response",
        "created_at": origin.created_s,
        "status": "failed",
        "error": response_error_fields(info),
        "model": response_options(origin.body).model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    fields = {"type": "response.failed", "sequence_number": number, "response": response}
    return sse.named_event("response.failed", msgspec.json.encode(fields))
