"""The routes that generate: from a client's request to a stream that `serving` carries to its end.

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
from onward.router.routed_stream import RoutedStream
from onward.router.routing_tokenizer import RoutingTokenizer
from onward.router.stream_runner import StreamRunner
from onward.web import asgi
from onward.web.auth.api_key_table import Caller
from onward.web.auth.authenticator import get_caller, may_access
from onward.web.auth.owned_request_ids import make_owned_id, owns_request_id
from onward.web.error_handlers import handle_errors
from onward.web.json_body import compact_json
from onward.web.last_event import parse_last_event_id
from onward.web.request_id_middleware import client_request_id, set_response_request_id

DETACH_TIMEOUT_S = 5.0
LOOKUP_INTERVAL_S = 0.5


class RouterGenerationEndpoint:
    """An ASGI application for every path that generates. `tokenizing`: where somebody chooses by the prompt's tokens."""

    def __init__(self, serving: StreamRunner, tokenizing: RoutingTokenizer | None) -> None:
        self._serving = serving
        self._tokenizing = tokenizing
        self._config = serving.core.config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await handle_errors(send, self._handle(scope, receive, send))

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        place = parse_last_event_id(scope)
        if place is not None and not owns_request_id(get_caller(scope), place.request_id):
            raise unknown_stream(place.request_id)
        if place is not None and scope["method"] != "HEAD" and await self.told_end(place, get_caller(scope), send):
            return
        if scope["method"] != "POST":
            if place is None or scope["method"] == "HEAD":
                raise InvalidRequest("Last-Event-ID: is required, with GET", param="Last-Event-ID")
            route = await self._try_resume(scope["path"], place, get_caller(scope))
            if isinstance(route, OnwardError):
                raise route
        else:
            body = await asgi.read_body(receive, self._config.max_body_bytes)
            route = await self._open_or_resume(scope, body, place)
        set_response_request_id(scope, route.stream.request.client_request_id or route.stream.request_id)
        await self.stream_to_client(route, get_caller(scope), receive, send)

    async def resolve_body(self, caller: Caller, body: bytes) -> bytes:
        """With whatever must be known before the first attempt."""
        return body

    async def told_end(self, place: Cursor, caller: Caller, send: Send) -> bool:
        """Whether the client was told the rest of what has ended, and does not run again."""
        return False

    async def with_latest_epoch(self, place: Cursor) -> Cursor:
        """With the highest epoch that anybody may have used: what goes on from here comes after that."""
        return place

    async def stream_to_client(self, route: RoutedStream, caller: Caller, receive: Receive, send: Send) -> None:
        client = PartialOutputWriter(send, route.stream, self._serving, tells_resumes=self._config.report_resumes)
        await asgi.run_until_disconnect(receive, self._serving.run_stream(route, client))

    async def _open_or_resume(self, scope: Scope, body: bytes, place: Cursor | None) -> RoutedStream:
        caller, serving = get_caller(scope), self._serving
        why_anew = None if place is None else await self._try_resume(scope["path"], place, caller)
        if isinstance(why_anew, RoutedStream):
            return why_anew
        check_body(body)
        body = compact_json(await self.resolve_body(caller, body))
        arrival = RequestMetadata(
            request_id=make_owned_id(serving.random.hex_token(), caller.name),
            random_seed=serving.random.bits(SEED_BITS),
            arrived_wall_s=serving.clock.wall_s(),
            arrived_at_s=serving.clock.now_s(),
            client_request_id=client_request_id(scope),
            caller=caller.name,
            caller_limits=caller.limits,
            caller_priority=caller.priority,
            session=asgi.header(scope, b"x-session-id") or "",
            timeout_s=self._config.request_timeout_s,
            default_max_tokens=self._config.default_max_tokens,
            strict_fields=self._config.strict_fields,
        )
        origin = build_client_request(scope["path"], body, arrival, place)
        if place is not None and not origin.is_streaming:
            raise InvalidRequest("Last-Event-ID: only for a request that streams", param="Last-Event-ID")
        if self._tokenizing is not None:
            origin = await self._tokenizing.add_token_ids(origin)
        route = serving.core.open_stream(
            origin, serving.clock.now_s(), epoch=0 if place is None else place.attempt_epoch
        )
        route.may_exist_at_unreachable_instance = isinstance(why_anew, Unavailable)
        return route

    async def _try_resume(self, path: str, place: Cursor, caller: Caller) -> RoutedStream | NotFound | Unavailable:
        """Or why it is not. Somebody else's is unknown, and is neither cut off nor made again."""
        core, clock = self._serving.core, self._serving.clock
        core.check_not_aborted(place.request_id, clock.now_s())
        live = core.find_live(place.request_id)
        if live is not None and not may_access(caller, live.stream.request.caller):
            raise unknown_stream(place.request_id)
        await self._serving.detach(place.request_id, DETACH_TIMEOUT_S)
        place = await self.with_latest_epoch(place)
        known, is_all = core.detached.find(place.request_id, clock.now_s()), True
        if known is None or not covers_cursor(known, place):
            # It may have been elsewhere since it was here.
            known, is_all = await self._find_at_instances(place.request_id)
        if known is not None and not may_access(caller, known.request.caller):
            raise unknown_stream(place.request_id)
        why_not = unknown_stream(place.request_id) if is_all else instance_unreachable("Last-Event-ID")
        # Somebody else may have come back for it while we asked around.
        if known is None or known.request.path != path or core.find_live(place.request_id) is not None:
            return why_not
        if caller.name == known.request.caller:
            # An admin may continue a stream of another caller, which is within that caller's limits.
            known.request = replace(known.request, caller_limits=caller.limits, caller_priority=caller.priority)
        return core.resume_stream(known, place, clock.now_s()) or why_not

    async def _find_at_instances(self, request_id: str) -> tuple[ClientStream | None, bool]:
        """The furthest that instances have, and whether all could be asked. A router that has just started waits for them
        to register before it says that nobody has it."""
        serving = self._serving
        while True:
            kept = await find_records(serving, request_id)
            now_s = serving.clock.now_s()
            if kept.records:
                best = max((record.attempt for record in kept.records), key=_num_tokens)
                return stream_from_record(best, now_s), kept.is_complete
            if now_s >= serving.settled_at_s:
                return None, kept.is_complete
            await serving.wait_for_change(LOOKUP_INTERVAL_S)


def _num_tokens(attempt: Attempt) -> int:
    return sum(len(choice.token_ids) for choice in attempt.choices)
