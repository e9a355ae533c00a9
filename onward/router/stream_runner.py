"""Carries out what `core` decides, for one stream after the other: attempts, waits, and the client's end of it.

The only place where streams, sockets and time meet. Each stream is a task; the attempt under way is a task of its own,
so that it can be ended (a stall, a drain, an abort) without ending the stream.
"""

import asyncio
import contextlib
import logging
from dataclasses import replace

from onward import log
from onward.clock import Clock
from onward.errors import RETRY_SOON_S, InternalError, Unavailable
from onward.proto.engine import ErrorInfo
from onward.proto.error_info import to_error_info
from onward.proto.router import IGNORED_FIELDS_HEADER, Registration, RegistrationReply
from onward.random_source import RandomSource
from onward.router import attempt_spans
from onward.router.client_stream import FailureCause
from onward.router.client_writer import KEEP_ALIVE_S, ClientWriter
from onward.router.core import (
    STREAM_UNKNOWN,
    AbortResult,
    Dispatch,
    Finish,
    GiveUp,
    RouterCore,
    Wait,
    instance_unreachable,
)
from onward.router.instance_registry import InstanceInfo
from onward.router.stream_routing_state import StreamRoutingState
from onward.router.upstream_client import UpstreamClient, read_error_body
from onward.router.upstream_connections import UpstreamConnectError, UpstreamResponse
from onward.router.upstream_errors import parse_error_info
from onward.router.upstream_events import BLANK_LINE, EventSplitter, MalformedEvent, parse_event
from onward.web.json_body import short_repr
from onward.web.openai_api.abort_request import MAX_IDS

TICK_S = 0.25
STARTUP_GRACE_S = 4.0
"""After the start: all instances that are there have registered by then."""
MODEL_POLL_S = 0.25
_NOT_ACCEPTING_CODES = ("unavailable", "draining")
_logger = logging.getLogger(__name__)


class StreamRunner:
    def __init__(
        self,
        core: RouterCore,
        upstream: UpstreamClient,
        clock: Clock,
        random: RandomSource,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.core = core
        self.upstream = upstream
        self.clock = clock
        self.random = random
        self.is_stopping = False
        self._keep_alive_s = keep_alive_s
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._attempts: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._probe_tasks: set[asyncio.Task[None]] = set()

    @property
    def settled_at_s(self) -> float:
        """By then every instance that is there has registered."""
        return self.core.models.settled_at_s

    # Stream.

    async def run_stream(self, routing: StreamRoutingState, writer: ClientWriter) -> None:
        """Runs a stream until its client has the end or an error, then closes it. If the task is cancelled because the
        client has left, the stream is kept for a resume."""
        task = asyncio.current_task()
        assert task is not None, "a stream runs in a task"
        self._streams[routing.stream.request_id] = task
        try:
            await self._run_actions(routing, writer)
        except asyncio.CancelledError:
            self.core.close_stream(routing, self.clock.now_s(), keep=True)
            raise
        except Exception:
            self.core.close_stream(routing, self.clock.now_s(), keep=False)
            _logger.exception(log.event("a stream failed because of an internal error", **_request_fields(routing)))
            await writer.fail(to_error_info(InternalError("internal error")), None)
        else:
            self.core.close_stream(routing, self.clock.now_s(), keep=True)
        finally:
            # While the failure is written to this client, the stream may already run again for a client that resumes it.
            if self._streams.get(routing.stream.request_id) is task:
                del self._streams[routing.stream.request_id]

    async def detach(self, request_id: str, timeout_s: float) -> None:
        """Cancels the running task of a stream and waits for its end, at most `timeout_s`. The stream's client has come
        back before the router noticed the loss of its previous connection."""
        task = self._streams.get(request_id)
        if task is not None:
            task.cancel()
            await asyncio.wait((task,), timeout=timeout_s)

    async def _run_actions(self, routing: StreamRoutingState, writer: ClientWriter) -> None:
        while True:
            action = self.core.next_action(routing, self.clock.now_s())
            match action:
                case Dispatch():
                    await self._attempt(routing, action, writer)
                case Wait():
                    await self.wait_for_change(action.seconds)
                    await self._send_keep_alive(routing, writer)
                case GiveUp():
                    await writer.fail(action.info, action.body)
                    return
                case Finish():
                    await writer.finish()
                    return

    async def wait_for_change(self, seconds: float) -> None:
        """Waits until an instance changes, at most this long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def choose_model(self, name: str, request_id: str, deadline_at_s: float | None) -> str:
        """Returns the model for a request that one instance answers as a whole. A router that has just started waits
        for its instances to register. Raises if the model is not served."""
        last_s = self.settled_at_s if deadline_at_s is None else min(self.settled_at_s, deadline_at_s)
        while True:
            now_s = self.clock.now_s()
            model = self.core.models.for_name(name, request_id, now_s)
            if model is not None:
                return model
            if now_s >= last_s:
                raise no_instance_of(name)
            await self.wait_for_change(MODEL_POLL_S)

    def notify_change(self) -> None:
        """Wakes all callers of `wait_for_change`, which then check whether they can continue."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _send_keep_alive(self, routing: StreamRoutingState, writer: ClientWriter) -> None:
        now_s = self.clock.now_s()
        if now_s - routing.last_write_at_s >= self._keep_alive_s:
            routing.last_write_at_s = now_s
            await writer.keep_alive()

    # Attempt.

    async def _attempt(self, routing: StreamRoutingState, dispatch: Dispatch, writer: ClientWriter) -> None:
        trace, span = routing.trace, None
        if trace is not None:
            span, dispatch = attempt_spans.begin_attempt(trace, routing.stream, dispatch, self.clock.now_s())
        try:
            await self._supervise_attempt(routing, dispatch, writer)
        finally:
            if trace is not None and span is not None:
                attempt_spans.end_attempt(trace, span, routing.stream, self.clock.now_s())

    async def _supervise_attempt(self, routing: StreamRoutingState, dispatch: Dispatch, writer: ClientWriter) -> None:
        request_id = routing.stream.request_id
        assert request_id not in self._attempts, f"the stream {request_id} has one attempt at a time"
        task = asyncio.create_task(self._run_attempt(routing, dispatch, writer))
        self._attempts[request_id] = task
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=self._keep_alive_s)
                await self._send_keep_alive(routing, writer)
        finally:
            task.cancel()
            try:
                await asyncio.wait((task,))
            finally:
                # A stream may be cancelled a second time while its attempt ends: when its client leaves, and comes back.
                del self._attempts[request_id]
            if not task.cancelled() and (fault := task.exception()) is not None:
                raise fault
            self.core.on_attempt_ended(routing, self.clock.now_s())

    async def _run_attempt(self, routing: StreamRoutingState, dispatch: Dispatch, writer: ClientWriter) -> None:
        stream = routing.stream
        try:
            async with self.upstream.send_attempt(dispatch.url, dispatch.attempt) as response:
                if response.status != 200:
                    await self._on_http_error(routing, response)
                    return
                self.core.on_accepted(routing, self.clock.now_s())
                stream.ignored_fields = response.headers.get(IGNORED_FIELDS_HEADER)
                await self._relay_events(routing, response, writer)
        except UpstreamConnectError as fault:
            stream.fail_lost(FailureCause.UNREACHABLE, f"the instance could not be reached: {fault}")
        except MalformedEvent as fault:
            stream.fail(FailureCause.PROTOCOL, ErrorInfo("upstream_protocol", str(fault), 502, True))
        except OSError as fault:
            stream.fail_lost(FailureCause.LOST, f"the connection to the instance was lost: {type(fault).__name__}")

    async def _on_http_error(self, routing: StreamRoutingState, response: UpstreamResponse) -> None:
        body = await read_error_body(response)
        info = parse_error_info(body, response.status)
        if info.retry_after_s is None and response.headers.get("retry-after", "").isdigit():
            info = ErrorInfo(
                info.code, info.message, info.status, info.retryable, info.param, float(response.headers["retry-after"])
            )
        cause = cause_of_http_error(info)
        if routing.may_exist_at_unreachable_instance and info.code == STREAM_UNKNOWN:
            info, body = to_error_info(instance_unreachable("Last-Event-ID")), b""
        # Once there are tokens, an error without them says too little.
        routing.stream.fail(cause, info, None if routing.stream.has_progress else body or None)

    async def _relay_events(
        self, routing: StreamRoutingState, response: UpstreamResponse, writer: ClientWriter
    ) -> None:
        # Runs for every token of every stream: no JSON, no timers, one write for all that has come together.
        stream, splitter, clock = routing.stream, EventSplitter(), self.clock
        is_new = True
        async for chunk in response.iter_any():
            now_s = clock.now_s()
            for_client: list[bytes] = []
            for raw in splitter.feed(chunk):
                event = parse_event(raw)
                if event is not None and (client_chunk := stream.on_event(event, now_s)) is not None:
                    for_client.append(client_chunk)
                if stream.failure is not None or stream.is_complete:
                    break
            if is_new and stream.attempt_advanced:
                is_new = False
                self.core.on_first_tokens(routing, now_s)
            if for_client:
                for_client.append(b"")
                stream.is_sending = True
                try:
                    await writer.write(BLANK_LINE.join(for_client))
                finally:
                    stream.is_sending = False
                stream.last_progress_at_s = routing.last_write_at_s = clock.now_s()
            if stream.failure is not None or stream.is_complete:
                return
        stream.fail_lost(FailureCause.LOST, "the instance closed the connection")

    # From outside.

    async def abort(self, names: list[str] | None, caller: str | None = None) -> AbortResult:
        """Ends streams by id or label, here and at the instances; of one caller, or of all. Returns the ids that ended
        here, and the names that were known anywhere."""
        aborted = self.abort_local(names, caller)
        # Instances know labels too, so it does not matter where a label means more streams than may be named.
        all_names = [] if names is None else list(dict.fromkeys((*names, *aborted.ids)))[: 2 * MAX_IDS]
        query: dict[str, object] = {"all": True} if names is None else {"ids": all_names}
        known_names, idle = await self._abort_at_instances(query if caller is None else {**query, "caller": caller})
        return replace(aborted, known_names={*aborted.known_names, *known_names}, idle=idle)

    def abort_local(self, names: list[str] | None, caller: str | None = None) -> AbortResult:
        """Aborts streams at this router only: ends their attempts and wakes streams that wait. `abort` also queries the
        instances."""
        aborted = self.core.abort(names, self.clock.now_s(), caller)
        for routing in aborted.running:
            self._cancel_attempt(routing)
        self.notify_change()
        return aborted

    async def _abort_at_instances(self, query: dict[str, object]) -> tuple[set[str], dict[str, set[str]]]:
        """Forwards an abort to all serving instances. Returns the names that they knew, and the stored responses that
        they left to this router: by id, the names that mean them."""
        urls = [instance.url for instance in self.core.serving_instances(self.clock.now_s())]
        answers = await asyncio.gather(*(self.upstream.abort(url, query) for url in urls))
        known_names, idle = set[str](), dict[str, set[str]]()
        for answer in answers:
            if answer is not None:
                known_names.update(answer.aborted)
                for request_id, names in answer.idle.items():
                    idle.setdefault(request_id, set()).update(names)
        return known_names, idle

    def _cancel_attempt(self, routing: StreamRoutingState) -> None:
        if (task := self._attempts.get(routing.stream.request_id)) is not None:
            task.cancel()

    def stop_all(self) -> None:
        """Ends all streams with an error that asks their clients to reconnect. Called when the grace period of the
        shutdown is over."""
        self.is_stopping = True
        info = to_error_info(
            Unavailable("the router is stopping; reconnect with Last-Event-ID", retry_after_s=RETRY_SOON_S)
        )
        routings = self.core.live_streams()
        if routings:
            _logger.warning(log.event("streams cut", clients=len(routings)))
        for routing in routings:
            routing.set_final_error(info)
            self._cancel_attempt(routing)
        self.notify_change()

    # The clockwork.

    async def run_maintenance(self) -> None:
        while True:
            try:
                self._tick()
            except Exception:
                _logger.exception("a periodic task of the router failed because of an internal error")
            await asyncio.sleep(TICK_S)

    def _tick(self) -> None:
        now_s = self.clock.now_s()
        for routing in self.core.tick(now_s):
            failure = routing.stream.failure
            if failure is not None:
                _logger.info(
                    log.event(
                        "attempt ended",
                        **_request_fields(routing),
                        cause=failure.cause.value,
                        why=failure.error.message,
                    )
                )
            self._cancel_attempt(routing)
        for routing in self.core.streams_with_stalled_client(now_s):
            self._streams[routing.stream.request_id].cancel()
        for url in self.core.instances.due_probes(now_s):
            task = asyncio.create_task(self._probe(url))
            self._probe_tasks.add(task)
            task.add_done_callback(self._probe_tasks.discard)

    async def _probe(self, url: str) -> None:
        registry = self.core.instances
        wants_kv_events = registry.index is not None
        num_others = registry.num_ready_others(url)
        reply = RegistrationReply(
            self.core.incarnation, 1.0, "", wants_kv_events, registry.next_kv_event(url), num_others
        )
        registration = await self.upstream.probe(url, reply)
        previous = registry.get(registration.instance) if registration is not None else None
        error = self.core.on_probe_result(url, registration, self.clock.now_s())
        if registration is not None:
            current = registry.get(registration.instance)
            if (previous and previous.state) != (current and current.state):
                log_instance_state(registration, current)
        if error:
            _logger.warning(log.event("instance not taken", url=url, error=error))
        self.notify_change()

    async def close(self) -> None:
        for task in self._probe_tasks:
            task.cancel()
        await self.upstream.close()


def _request_fields(routing: StreamRoutingState) -> dict[str, str]:
    return log.request_fields(routing.stream.request_id, routing.stream.request.client_request_id)


def log_instance_state(registration: Registration, instance: InstanceInfo | None) -> None:
    state = instance.state.value if instance is not None else "gone"
    _logger.info(log.event("instance", id=registration.instance, url=registration.url, state=state))


def no_instance_of(model: str) -> Unavailable:
    of_model = f" of {short_repr(model)}" if model else ""
    return Unavailable(f"no instance{of_model} can answer now", retry_after_s=RETRY_SOON_S)


def cause_of_http_error(info: ErrorInfo) -> FailureCause:
    """Returns the cause for an HTTP error of an instance before its stream has begun."""
    if info.status == 429:
        return FailureCause.OVERLOADED
    if info.status < 500:
        return FailureCause.REJECTED
    return FailureCause.REFUSED if info.code in _NOT_ACCEPTING_CODES else FailureCause.ERROR
