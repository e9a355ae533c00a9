"""Carries out what `core` decides, for one stream after the other: attempts, waits, and the client's end of it.

The only place where streams, sockets and time meet. Each stream is a task; the attempt under way is a task of its own,
so that it can be ended (a stall, a drain, an abort) without ending the stream.
"""

import asyncio
import contextlib
import logging
from dataclasses import replace

from onward import log
from onward.chance import Chance
from onward.clock import Clock
from onward.errors import InternalError, Unavailable
from onward.proto.request import ErrorInfo
from onward.proto.router import IGNORED_FIELDS_HEADER, RegisterAnswer, Registration
from onward.router.client_side import KEEP_ALIVE_S, ClientSide
from onward.router.core import STREAM_UNKNOWN, Aborted, Dispatch, Finish, GiveUp, RouterCore, Wait, out_of_reach
from onward.router.events import BLANK_LINE, EventSplitter, MalformedEvent, read_event
from onward.router.failures import info_from_body
from onward.router.posting import Answer, NotReached
from onward.router.replicas import Replica
from onward.router.route import Route
from onward.router.stream import Cause
from onward.router.upstream import Upstream, error_bytes
from onward.web.aborts import MAX_IDS
from onward.web.failures import info_of

TICK_S = 0.25
SETTLE_S = 4.0
"""After the start: all instances that are there have registered by then."""
_NOT_TAKING = ("unavailable", "draining")
_logger = logging.getLogger(__name__)


class Serving:
    def __init__(
        self,
        core: RouterCore,
        upstream: Upstream,
        clock: Clock,
        chance: Chance,
        settle_s: float = SETTLE_S,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.core = core
        self.upstream = upstream
        self.clock = clock
        self.chance = chance
        self.settled_s = clock.now_s() + settle_s
        self.is_stopping = False
        self._keep_alive_s = keep_alive_s
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._attempts: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._asides: set[asyncio.Task[None]] = set()

    # One stream.

    async def serve(self, route: Route, client: ClientSide) -> None:
        """To its end, or until cancelled since the client has gone."""
        task = asyncio.current_task()
        assert task is not None
        self._streams[route.stream.request_id] = task
        try:
            await self._serve(route, client)
        except asyncio.CancelledError:
            self.core.close(route, self.clock.now_s(), keep=True)
            raise
        except Exception:
            self.core.close(route, self.clock.now_s(), keep=False)
            _logger.exception("a stream failed by a fault of ours")
            await client.fail(info_of(InternalError("internal error")), None)
        else:
            self.core.close(route, self.clock.now_s(), keep=True)
        finally:
            del self._streams[route.stream.request_id]

    async def detach(self, request_id: str, timeout_s: float) -> None:
        """A client has come back before we noticed that it had gone: the connection it had is given up."""
        task = self._streams.get(request_id)
        if task is not None:
            task.cancel()
            await asyncio.wait((task,), timeout=timeout_s)

    async def _serve(self, route: Route, client: ClientSide) -> None:
        while True:
            step = self.core.next_step(route, self.clock.now_s())
            match step:
                case Dispatch():
                    await self._attempt(route, step, client)
                case Wait():
                    await self.wait_for_change(step.seconds)
                    await self._break_silence(route, client)
                case GiveUp():
                    await client.fail(step.info, step.body)
                    return
                case Finish():
                    await client.finish()
                    return

    async def wait_for_change(self, seconds: float) -> None:
        """Of the instances; or so many seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def wake(self) -> None:
        """Something has changed that waiting streams may wait for."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _break_silence(self, route: Route, client: ClientSide) -> None:
        now_s = self.clock.now_s()
        if now_s - route.spoken_s >= self._keep_alive_s:
            route.spoken_s = now_s
            await client.keep_alive()

    # One attempt.

    async def _attempt(self, route: Route, dispatch: Dispatch, client: ClientSide) -> None:
        request_id = route.stream.request_id
        task = asyncio.create_task(self._run_attempt(route, dispatch, client))
        assert request_id not in self._attempts, f"{request_id} has two attempts under way"
        self._attempts[request_id] = task
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=self._keep_alive_s)
                await self._break_silence(route, client)
        finally:
            task.cancel()
            try:
                await asyncio.wait((task,))
            finally:
                # A stream may be cancelled a second time while its attempt ends: when its client leaves, and comes back.
                del self._attempts[request_id]
            if not task.cancelled() and (fault := task.exception()) is not None:
                raise fault
            self.core.ended(route, self.clock.now_s())

    async def _run_attempt(self, route: Route, dispatch: Dispatch, client: ClientSide) -> None:
        stream = route.stream
        try:
            async with self.upstream.attempt(dispatch.url, dispatch.attempt) as response:
                if response.status != 200:
                    await self._note_refusal(route, response)
                    return
                self.core.accepted(route, self.clock.now_s())
                stream.ignored_fields = response.headers.get(IGNORED_FIELDS_HEADER)
                await self._pump(route, response, client)
        except NotReached as fault:
            stream.lose(Cause.UNREACHABLE, f"the instance could not be reached: {fault}")
        except MalformedEvent as fault:
            stream.fail(Cause.PROTOCOL, ErrorInfo("upstream_protocol", str(fault), 502, True))
        except OSError as fault:
            stream.lose(Cause.LOST, f"the connection to the instance was lost: {type(fault).__name__}")

    async def _note_refusal(self, route: Route, response: Answer) -> None:
        body = await error_bytes(response)
        info = info_from_body(body, response.status)
        if info.retry_after_s is None and response.headers.get("retry-after", "").isdigit():
            info = ErrorInfo(
                info.code, info.message, info.status, info.retryable, info.param, float(response.headers["retry-after"])
            )
        cause = refusal_cause(info)
        if route.may_be_kept and info.code == STREAM_UNKNOWN:
            info, body = info_of(out_of_reach("Last-Event-ID")), b""
        # Once there are tokens, an error without them says too little.
        route.stream.fail(cause, info, None if route.stream.has_progress else body or None)

    async def _pump(self, route: Route, response: Answer, client: ClientSide) -> None:
        # Runs for every token of every stream: no JSON, no timers, one write for all that has come together.
        stream, splitter, clock = route.stream, EventSplitter(), self.clock
        is_new = True
        async for chunk in response.iter_any():
            now_s = clock.now_s()
            for_client: list[bytes] = []
            for raw in splitter.feed(chunk):
                event = read_event(raw)
                if event is not None and (piece := stream.hear(event, now_s)) is not None:
                    for_client.append(piece)
                if stream.failed is not None or stream.is_complete:
                    break
            if is_new and stream.advanced:
                is_new = False
                self.core.advanced(route, now_s)
            if for_client:
                for_client.append(b"")
                stream.is_sending = True
                try:
                    await client.write(BLANK_LINE.join(for_client))
                finally:
                    stream.is_sending = False
                stream.moved_s = route.spoken_s = clock.now_s()
            if stream.failed is not None or stream.is_complete:
                return
        stream.lose(Cause.LOST, "the instance closed the connection")

    # From outside.

    async def abort(self, names: list[str] | None, caller: str | None = None) -> Aborted:
        """Ends streams by id or label, here and at the instances; a caller's own, or everybody's. What has ended here, and
        the names that anybody knew."""
        aborted = self.end_here(names, caller)
        # Instances know labels too, so it does not matter where a label means more streams than may be named.
        every_name = [] if names is None else list(dict.fromkeys((*names, *aborted.ids)))[: 2 * MAX_IDS]
        asked: dict[str, object] = {"all": True} if names is None else {"ids": every_name}
        known, idle = await self._abort_at_instances(asked if caller is None else {**asked, "caller": caller})
        return replace(aborted, known={*aborted.known, *known}, idle=idle)

    def end_here(self, names: list[str] | None, caller: str | None = None) -> Aborted:
        """The part of an abort that is this router's own."""
        aborted = self.core.abort(names, self.clock.now_s(), caller)
        for route in aborted.routes:
            self._cut(route)
        self.wake()
        return aborted

    async def _abort_at_instances(self, asked: dict[str, object]) -> tuple[set[str], dict[str, set[str]]]:
        """The names that they knew, and the responses that they have left to this router."""
        urls = [replica.url for replica in self.core.takers(self.clock.now_s())]
        answers = await asyncio.gather(*(self.upstream.abort(url, asked) for url in urls))
        known, idle = set[str](), dict[str, set[str]]()
        for answer in answers:
            if answer is not None:
                known.update(answer.aborted)
                for request_id, names in answer.idle.items():
                    idle.setdefault(request_id, set()).update(names)
        return known, idle

    def _cut(self, route: Route) -> None:
        if (task := self._attempts.get(route.stream.request_id)) is not None:
            task.cancel()

    def stop_all(self) -> None:
        """The grace is over: every stream ends now, and says so."""
        self.is_stopping = True
        info = info_of(Unavailable("the router is stopping; reconnect with Last-Event-ID", retry_after_s=1.0))
        routes = self.core.routes()
        if routes:
            _logger.warning(log.event("streams cut", clients=len(routes)))
        for route in routes:
            route.settle(info)
            self._cut(route)
        self.wake()

    # The clockwork.

    async def run_clockwork(self) -> None:
        while True:
            try:
                self._tick()
            except Exception:
                _logger.exception("the clockwork failed by a fault of ours")
            await asyncio.sleep(TICK_S)

    def _tick(self) -> None:
        now_s = self.clock.now_s()
        for route in self.core.tick(now_s):
            failed = route.stream.failed
            if failed is not None:
                _logger.info(
                    log.event(
                        "attempt ended",
                        request=route.stream.request_id,
                        cause=failed.cause.value,
                        why=failed.info.message,
                    )
                )
            self._cut(route)
        for route in self.core.unread(now_s):
            self._streams[route.stream.request_id].cancel()
        for url in self.core.replicas.due_probes(now_s):
            aside = asyncio.create_task(self._probe(url))
            self._asides.add(aside)
            aside.add_done_callback(self._asides.discard)

    async def _probe(self, url: str) -> None:
        replicas = self.core.replicas
        wants = replicas.index is not None
        num_others = replicas.num_others(url)
        question = RegisterAnswer(self.core.incarnation, 1.0, "", wants, replicas.next_kv_event(url), num_others)
        registration = await self.upstream.probe(url, question)
        before = replicas.get(registration.instance) if registration is not None else None
        error = self.core.probed(url, registration, self.clock.now_s())
        if registration is not None:
            after = replicas.get(registration.instance)
            if (before and before.state) != (after and after.state):
                note_state(registration, after)
        if error:
            _logger.warning(log.event("instance not taken", url=url, error=error))
        self.wake()

    async def close(self) -> None:
        for aside in self._asides:
            aside.cancel()
        await self.upstream.close()


def note_state(registration: Registration, now: Replica | None) -> None:
    state = now.state.value if now is not None else "gone"
    _logger.info(log.event("instance", id=registration.instance, url=registration.url, state=state))


def refusal_cause(info: ErrorInfo) -> Cause:
    """What an HTTP error of an instance means, before its stream has begun."""
    if info.status == 429:
        return Cause.OVERLOADED
    if info.status < 500:
        return Cause.REJECTED
    return Cause.REFUSED if info.code in _NOT_TAKING else Cause.ERROR
