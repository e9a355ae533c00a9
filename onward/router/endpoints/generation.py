"""The routes that generate: from a client's request to a stream that `StreamRunner` carries to its end.

A POST begins one, or with `Last-Event-ID` takes one up again; a GET with `Last-Event-ID` only takes up. What was lost is
looked for here, then at the instances; only a POST can do without, since it brings the request and the cursor the seed.
"""

from dataclasses import replace

from starlette.types import Receive, Scope, Send

from onward.errors import InvalidRequest, NotFound, OnwardError, Unavailable
from onward.proto.cursor import Cursor
from onward.proto.router import Attempt
from onward.random_source import SEED_BITS
from onward.router.client_request import RequestMetadata, build_client_request, check_body, stream_from_record
from onward.router.client_stream import ClientStream, covers_cursor
from onward.router.core import instance_unreachable, unknown_stream
from onward.router.partial_output import PartialOutputWriter
from onward.router.record_lookup import find_records
from onward.router.routing_tokenizer import RoutingTokenizer
from onward.router.stream_routing_state import StreamRoutingState
from onward.router.stream_runner import StreamRunner
from onward.web import asgi
from onward.web.access_log import AccessRecord, access_record
from onward.web.auth.api_key_table import Caller
from onward.web.auth.authenticator import get_caller, may_access
from onward.web.auth.owned_request_ids import make_owned_id, owns_request_id
from onward.web.error_handlers import handle_errors
from onward.web.json_body import compact_json
from onward.web.request_id_middleware import client_request_id, set_response_request_id
from onward.web.sse import parse_last_event_id

DETACH_TIMEOUT_S = 5.0
LOOKUP_INTERVAL_S = 0.5


class RouterGenerationEndpoint:
    """An ASGI application for every path that generates. `routing_tokenizer`: only where a policy
    selects by the prompt's tokens."""

    def __init__(self, runner: StreamRunner, routing_tokenizer: RoutingTokenizer | None) -> None:
        self.runner = runner
        self._routing_tokenizer = routing_tokenizer
        self.config = runner.core.config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await handle_errors(scope, send, self._handle(scope, receive, send))

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        cursor = parse_last_event_id(scope)
        if cursor is not None and not owns_request_id(get_caller(scope), cursor.request_id):
            raise unknown_stream(cursor.request_id)
        if (
            cursor is not None
            and scope["method"] != "HEAD"
            and await self.try_send_end(cursor, get_caller(scope), send)
        ):
            return
        if scope["method"] != "POST":
            if cursor is None or scope["method"] == "HEAD":
                raise InvalidRequest("Last-Event-ID: is required, with GET", param="Last-Event-ID")
            resumed = await self._try_resume(scope["path"], cursor, get_caller(scope))
            if isinstance(resumed, OnwardError):
                raise resumed
            routing = resumed
        else:
            body = await asgi.read_body(receive, self.config.max_body_bytes)
            routing = await self._open_or_resume(scope, body, cursor)
        set_response_request_id(scope, routing.stream.request.client_request_id or routing.stream.request_id)
        _begin_trace(access_record(scope), routing, cursor)
        try:
            await self.stream_to_client(routing, get_caller(scope), receive, send)
        finally:
            _describe(access_record(scope), routing)

    async def resolve_body(self, caller: Caller, body: bytes) -> bytes:
        """Returns the body with everything that must be known before the first attempt, such as the items of a previous
        response. This base class returns it unchanged."""
        return body

    async def try_send_end(self, cursor: Cursor, caller: Caller, send: Send) -> bool:
        """Sends the rest of a stream that has ended and does not run again. Returns whether it did."""
        return False

    async def with_latest_epoch(self, cursor: Cursor) -> Cursor:
        """Returns the cursor with the highest attempt epoch that may have been used, so that the next attempt has a
        higher one."""
        return cursor

    async def stream_to_client(self, routing: StreamRoutingState, caller: Caller, receive: Receive, send: Send) -> None:
        writer = PartialOutputWriter(send, routing.stream, self.runner, reports_resumes=self.config.report_resumes)
        await asgi.run_until_disconnect(receive, self.runner.run_stream(routing, writer))

    async def _open_or_resume(self, scope: Scope, body: bytes, cursor: Cursor | None) -> StreamRoutingState:
        caller, runner = get_caller(scope), self.runner
        resumed = None if cursor is None else await self._try_resume(scope["path"], cursor, caller)
        if isinstance(resumed, StreamRoutingState):
            return resumed
        check_body(body)
        body = compact_json(await self.resolve_body(caller, body))
        metadata = RequestMetadata(
            request_id=make_owned_id(runner.random.hex_token(), caller.name),
            random_seed=runner.random.bits(SEED_BITS),
            arrived_wall_s=runner.clock.wall_s(),
            arrived_at_s=runner.clock.now_s(),
            client_request_id=client_request_id(scope),
            caller=caller.name,
            caller_limits=caller.limits,
            caller_priority=caller.priority,
            session=asgi.header(scope, b"x-session-id") or "",
            timeout_s=self.config.request_timeout_s,
            default_max_tokens=self.config.default_max_tokens,
            strict_fields=self.config.strict_fields,
        )
        client_request = build_client_request(scope["path"], body, metadata, cursor)
        if cursor is not None and not client_request.is_streaming:
            raise InvalidRequest("Last-Event-ID: only for a request that streams", param="Last-Event-ID")
        if self._routing_tokenizer is not None:
            client_request = await self._routing_tokenizer.add_token_ids(client_request)
        routing = runner.core.open_stream(
            client_request, runner.clock.now_s(), epoch=0 if cursor is None else cursor.attempt_epoch
        )
        routing.may_exist_at_unreachable_instance = isinstance(resumed, Unavailable)
        return routing

    async def _try_resume(
        self, path: str, cursor: Cursor, caller: Caller
    ) -> StreamRoutingState | NotFound | Unavailable:
        """Resumes a stream, or returns the error. A stream of another caller counts as unknown, and is neither
        interrupted nor generated again."""
        core, clock = self.runner.core, self.runner.clock
        core.check_not_aborted(cursor.request_id, clock.now_s())
        live = core.find_live(cursor.request_id)
        if live is not None and not may_access(caller, live.stream.request.caller):
            raise unknown_stream(cursor.request_id)
        await self.runner.detach(cursor.request_id, DETACH_TIMEOUT_S)
        cursor = await self.with_latest_epoch(cursor)
        stream, is_complete = core.resumable_streams.find(cursor.request_id, clock.now_s()), True
        if stream is None or not covers_cursor(stream, cursor):
            # It may have been elsewhere since it was here.
            stream, is_complete = await self._find_at_instances(cursor.request_id)
        if stream is not None and not may_access(caller, stream.request.caller):
            raise unknown_stream(cursor.request_id)
        error = unknown_stream(cursor.request_id) if is_complete else instance_unreachable("Last-Event-ID")
        # Another client may have resumed the stream while the instances were queried.
        if stream is None or stream.request.path != path or core.find_live(cursor.request_id) is not None:
            return error
        if caller.name == stream.request.caller:
            # An admin may continue a stream of another caller, which is within that caller's limits.
            stream.request = replace(stream.request, caller_limits=caller.limits, caller_priority=caller.priority)
        return core.resume_stream(stream, cursor, clock.now_s()) or error

    async def _find_at_instances(self, request_id: str) -> tuple[ClientStream | None, bool]:
        """Returns the most advanced record of the instances, and whether all of them could be queried. A router that
        has just started waits for instances to register before it reports a stream as unknown."""
        runner = self.runner
        while True:
            found = await find_records(runner, request_id)
            now_s = runner.clock.now_s()
            if found.records:
                best = max((record.attempt for record in found.records), key=_num_tokens)
                return stream_from_record(best, now_s), found.is_complete
            if now_s >= runner.settled_at_s:
                return None, found.is_complete
            await runner.wait_for_change(LOOKUP_INTERVAL_S)


def _begin_trace(access: AccessRecord, routing: StreamRoutingState, cursor: Cursor | None) -> None:
    """Begins the request's trace, or continues the trace in which a resumed stream began. Stores it in `routing` and in
    the stream's request, and describes the request in the access record."""
    client_request = routing.stream.request
    context = access.begin_trace(client_request.request_id, client_request.trace, cursor, is_attempt=False)
    routing.stream.request = replace(client_request, trace=context)
    routing.trace = access.trace
    access.describe_request(client_request.path, client_request.body)


def _num_tokens(attempt: Attempt) -> int:
    return sum(len(choice.token_ids) for choice in attempt.choices)


def _describe(access: AccessRecord, routing: StreamRoutingState) -> None:
    """Fills in the access log for a stream that has ended or whose client has gone."""
    stream, error = routing.stream, routing.final_error
    access.request_id = stream.request_id
    access.prompt_tokens, access.cached_tokens = stream.num_prompt_tokens, stream.num_cached_tokens
    access.output_tokens = stream.num_tokens
    access.first_token_at_s = routing.first_token_at_s
    access.num_resumes = stream.num_resumes
    if stream.all_finished:
        access.finish_reason = "/".join(dict.fromkeys(choice.finish_reason or "-" for choice in stream.choices))
    access.error_code = access.error_code or (None if error is None else error.code)
