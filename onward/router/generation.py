"""The routes that generate: from a client's request to a stream that `serving` carries to its end.

A POST begins one, or with `Last-Event-ID` takes one up again; a GET with `Last-Event-ID` only takes up. What was lost is
looked for here, then at the instances; only a POST can do without, since it brings the request and the cursor the seed.
"""

from dataclasses import replace

from starlette.types import Receive, Scope, Send

from onward.chance import SEED_BITS
from onward.errors import InvalidRequest, NotFound, OnwardError, Unavailable
from onward.proto.cursor import Cursor
from onward.proto.router import Attempt
from onward.router.closing import ClosingClientSide
from onward.router.core import out_of_reach, unknown_stream
from onward.router.kept import kept_at_instances
from onward.router.origin import Arrival, check_body, origin_of, stream_of_record
from onward.router.route import Route
from onward.router.serving import Serving
from onward.router.stream import Stream, reaches
from onward.router.tokenizing import Tokenizing
from onward.web import http
from onward.web.body import compact
from onward.web.callers import caller_of, may_see
from onward.web.envelope import label_of, show_id
from onward.web.error_answers import answer_errors
from onward.web.keys import Caller
from onward.web.last_event import last_event
from onward.web.owned_ids import may_ask_for, owned_id

TAKE_OVER_S = 5.0
ASK_AGAIN_S = 0.5


class GenerationEndpoint:
    """An ASGI application for every path that generates. `tokenizing`: where somebody chooses by the prompt's tokens."""

    def __init__(self, serving: Serving, tokenizing: Tokenizing | None) -> None:
        self._serving = serving
        self._tokenizing = tokenizing
        self._config = serving.core.config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_errors(send, self._handle(scope, receive, send))

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        place = last_event(scope)
        if place is not None and not may_ask_for(caller_of(scope), place.request_id):
            raise unknown_stream(place.request_id)
        if place is not None and scope["method"] != "HEAD" and await self.told_end(place, caller_of(scope), send):
            return
        if scope["method"] != "POST":
            if place is None or scope["method"] == "HEAD":
                raise InvalidRequest("Last-Event-ID: is required, with GET", param="Last-Event-ID")
            route = await self._taken_up(scope["path"], place, caller_of(scope))
            if isinstance(route, OnwardError):
                raise route
        else:
            body = await http.read_body(receive, self._config.max_body_bytes)
            route = await self._posted(scope, body, place)
        show_id(scope, route.stream.origin.label or route.stream.request_id)
        await self.carry(route, caller_of(scope), receive, send)

    async def completed(self, caller: Caller, body: bytes) -> bytes:
        """With whatever must be known before the first attempt."""
        return body

    async def told_end(self, place: Cursor, caller: Caller, send: Send) -> bool:
        """Whether the client was told the rest of what has ended, and does not run again."""
        return False

    async def behind_all(self, place: Cursor) -> Cursor:
        """With the highest epoch that anybody may have used: what goes on from here comes after that."""
        return place

    async def carry(self, route: Route, caller: Caller, receive: Receive, send: Send) -> None:
        client = ClosingClientSide(send, route.stream, self._serving, tells_resumes=self._config.tell_resumes)
        await http.while_connected(receive, self._serving.serve(route, client))

    async def _posted(self, scope: Scope, body: bytes, place: Cursor | None) -> Route:
        caller, serving = caller_of(scope), self._serving
        why_anew = None if place is None else await self._taken_up(scope["path"], place, caller)
        if isinstance(why_anew, Route):
            return why_anew
        check_body(body)
        body = compact(await self.completed(caller, body))
        arrival = Arrival(
            request_id=owned_id(serving.chance.token(), caller.name),
            random_seed=serving.chance.bits(SEED_BITS),
            wall_s=serving.clock.wall_s(),
            now_s=serving.clock.now_s(),
            label=label_of(scope),
            caller=caller.name,
            caller_limits=caller.limits,
            caller_priority=caller.priority,
            session=http.header(scope, b"x-session-id") or "",
            timeout_s=self._config.request_timeout_s,
            default_max_tokens=self._config.default_max_tokens,
            strict_fields=self._config.strict_fields,
        )
        origin = origin_of(scope["path"], body, arrival, place)
        if place is not None and not origin.streams:
            raise InvalidRequest("Last-Event-ID: only for a request that streams", param="Last-Event-ID")
        if self._tokenizing is not None:
            origin = await self._tokenizing.with_ids(origin)
        route = serving.core.open(origin, serving.clock.now_s(), epoch=0 if place is None else place.epoch)
        route.may_be_kept = isinstance(why_anew, Unavailable)
        return route

    async def _taken_up(self, path: str, place: Cursor, caller: Caller) -> Route | NotFound | Unavailable:
        """Or why it is not. Somebody else's is unknown, and is neither cut off nor made again."""
        core, clock = self._serving.core, self._serving.clock
        core.check_alive(place.request_id, clock.now_s())
        live = core.live(place.request_id)
        if live is not None and not may_see(caller, live.stream.origin.caller):
            raise unknown_stream(place.request_id)
        await self._serving.detach(place.request_id, TAKE_OVER_S)
        place = await self.behind_all(place)
        known, is_all = core.records.find(place.request_id, clock.now_s()), True
        if known is None or not reaches(known, place):
            # It may have been elsewhere since it was here.
            known, is_all = await self._looked_for(place.request_id)
        if known is not None and not may_see(caller, known.origin.caller):
            raise unknown_stream(place.request_id)
        why_not = unknown_stream(place.request_id) if is_all else out_of_reach("Last-Event-ID")
        # Somebody else may have come back for it while we asked around.
        if known is None or known.origin.path != path or core.live(place.request_id) is not None:
            return why_not
        if caller.name == known.origin.caller:
            # An admin may continue a stream of another caller, which is within that caller's limits.
            known.origin = replace(known.origin, caller_limits=caller.limits, caller_priority=caller.priority)
        return core.continue_stream(known, place, clock.now_s()) or why_not

    async def _looked_for(self, request_id: str) -> tuple[Stream | None, bool]:
        """The furthest that instances have, and whether all could be asked. A router that has just started waits for them
        to register before it says that nobody has it."""
        serving = self._serving
        while True:
            kept = await kept_at_instances(serving, request_id)
            now_s = serving.clock.now_s()
            if kept.records:
                best = max((record.attempt for record in kept.records), key=_num_tokens)
                return stream_of_record(best, now_s), kept.is_all
            if now_s >= serving.settled_s:
                return None, kept.is_all
            await serving.wait_for_change(ASK_AGAIN_S)


def _num_tokens(attempt: Attempt) -> int:
    return sum(len(choice.token_ids) for choice in attempt.choices)
