"""The asyncio side of the RequestTracker: the socket to the engine, and an OutputCollector for each client's request.

One task reads the engine's messages. A collector holds the new outputs of one request until its stream takes them, so
several tokens share one event if the connection is slow. It holds tokens and their logprobs, and never more than the
request may produce.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from onward import log
from onward.api.engine_link.request_tracker import (
    DEADLINE_EXCEEDED,
    ENGINE_WAIT_S,
    NO_ENGINE,
    EngineOutput,
    RequestTracker,
    TrackerActions,
)
from onward.clock import Clock
from onward.errors import RETRY_SOON_S, Conflict, Overloaded, Unavailable
from onward.obs.metrics import Registry
from onward.obs.request_trace import EnginePhaseSpans
from onward.proto.control import EngineGone, EngineUp
from onward.proto.engine import AbortReply, ErrorInfo, FromEngine, KvEventsReply, Submit, ToEngine
from onward.proto.kv_events import KvEvents
from onward.proto.router import StreamProgress
from onward.proto.step import WorkerHello
from onward.proto.trace import RequestPhases
from onward.web.error_format import RequestFailed

MAX_OPEN_REQUESTS = 4096
TICK_S = 0.25
TICKS_PER_WAKE = 4
ABORT_ANSWER_S = 5.0
"""How long the engine may take to reply to an abort by name."""
KV_EVENTS_ANSWER_S = 1.0
"""How long the engine may take to reply with KV events. After that, a registration is sent without them."""
STOPPING = ErrorInfo("unavailable", "the server is stopping", 503, True)

_logger = logging.getLogger(__name__)


class EngineTransport(Protocol):
    """The interface of `transport.zmq_sockets.EngineClientSocket`."""

    def send(self, message: ToEngine) -> bool: ...
    async def receive(self) -> FromEngine: ...
    def close(self) -> None: ...


class OutputCollector:
    """Collects the outputs of one client's request, over all its choices, until its reader takes them."""

    def __init__(self, request_ids: list[str], client_request_id: str = "", caller: str = "") -> None:
        self.request_ids = request_ids
        self.client_request_id = client_request_id
        self.caller = caller
        self.phases: EnginePhaseSpans | None = None
        """Set if the request is traced."""
        self._unaccepted = set(request_ids)
        self._outputs: list[EngineOutput] = []
        self._is_quiet = self._is_nudged = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: asyncio.Future[None] | None = None
        """Future that the reader waits for while there is no output."""

    def put(self, output: EngineOutput) -> None:
        self._unaccepted.discard(output.request_id)
        if output.token_ids or output.finish_reason is not None or output.rescored_logprobs is not None:
            self._outputs.append(output)
        self._is_quiet = False
        self._wake()

    def wake_if_idle(self) -> None:
        """Wakes the waiting reader (a nudge) if no output has come since the last call."""
        if self._is_quiet:
            self._is_nudged = True
            self._wake()
        self._is_quiet = True

    def drain(self) -> list[EngineOutput]:
        """Returns and removes the outputs that the reader has not taken."""
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def has_output(self) -> bool:
        return bool(self._outputs)

    async def wait_accepted(self) -> None:
        """Waits until the engine has accepted or given up every choice, or until a nudge. Raises `RequestFailed` if a
        choice has failed."""
        while self._unaccepted and not self._failures() and not self._is_nudged:
            await self._wait()
        if failures := self._failures():
            raise RequestFailed(failures[0])

    async def next_outputs(self) -> list[EngineOutput]:
        """Returns all outputs since the last call, and waits if there are none. Returns an empty list at a nudge."""
        while not self._outputs and not self._is_nudged:
            await self._wait()
        self._is_nudged = False
        outputs, self._outputs = self._outputs, []
        return outputs

    def _failures(self) -> list[ErrorInfo]:
        return [output.error for output in self._outputs if output.error is not None and output.failed]

    def _wait(self) -> "asyncio.Future[None]":
        # Called for every token. A future costs a third of an `asyncio.Event`, and `get_running_loop` is a system call.
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._waiting = self._loop.create_future()
        return self._waiting

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class EngineClient:
    def __init__(
        self,
        tracker: RequestTracker,
        clock: Clock,
        connect: Callable[[str], EngineTransport],
        on_fault: Callable[[], None],
    ) -> None:
        self.worker: WorkerHello | None = None
        """The limits of the engine's worker, kept while the engine restarts. None before the first worker."""
        self._tracker = tracker
        self._clock = clock
        self._connect = connect
        self._on_fault = on_fault
        self._transport: EngineTransport | None = None
        self._collectors: dict[str, OutputCollector] = {}
        self._client_request_ids: dict[tuple[str, str], OutputCollector] = {}
        """By caller and client request id: callers do not see each other's ids."""
        self._woken_each_second: dict[OutputCollector, None] = {}
        """Collectors submitted with `wake_each_second`, in that order."""
        self._query_ids = itertools.count(1)
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._first_engine = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._ticking = self._spawn_critical(self._tick_loop())
        self._stopping = False

    @property
    def num_open(self) -> int:
        """Number of choices that a reader waits for, plus the number that the engine may still have. A running choice
        counts twice."""
        return len(self._collectors) + len(self._tracker)

    @property
    def engine(self) -> str | None:
        """Incarnation of the current engine. None while there is none."""
        return self._tracker.engine

    def engine_up(self, message: EngineUp) -> None:
        self.worker = message.worker
        if message.incarnation != self.engine:
            self._disconnect()
            self._transport = self._connect(message.address)
            self._reading = self._spawn_critical(self._read_loop(self._transport, message.incarnation))
            _logger.info(log.event("engine up", incarnation=message.incarnation, requests=len(self._tracker)))
        self._execute(self._tracker.engine_up(message.incarnation, self._clock.now_s()))
        self._first_engine.set()

    def engine_gone(self, message: EngineGone) -> None:
        if message.incarnation != self.engine:
            return
        _logger.warning(log.event("engine gone", incarnation=message.incarnation, cause=message.cause))
        self._disconnect()
        now_s = self._clock.now_s()
        for collector in dict.fromkeys(self._collectors.values()):
            if collector.phases is not None:
                collector.phases.engine_lost(now_s, message.cause)
        self._execute(self._tracker.engine_gone(message.incarnation, now_s, message.isolated_request_id))

    async def wait_worker(self, deadline_at_s: float | None) -> WorkerHello:
        """Returns the limits of the worker announced last, even if its engine is gone. Waits for the first engine, at
        most `ENGINE_WAIT_S` and not beyond the deadline; then raises `RequestFailed`."""
        if self.worker is None:
            await self._wait_for_engine(deadline_at_s)
        assert self.worker is not None, "an engine announces its worker"
        return self.worker

    def submit(self, specs: list[Submit], *, is_new: bool = True, wake_each_second: bool = False) -> OutputCollector:
        """Submits the choices of one request and returns its collector. `is_new`: the request does not continue an
        earlier one, so it is refused if another request has its client request id. `wake_each_second`: the reader is
        woken each second, also without output."""
        if self._stopping:
            raise RequestFailed(STOPPING)
        if len(self._collectors) + len(specs) > MAX_OPEN_REQUESTS:
            raise Overloaded(
                f"this server has {MAX_OPEN_REQUESTS} open requests already; try again later",
                retry_after_s=RETRY_SOON_S,
            )
        collector = OutputCollector([spec.request_id for spec in specs], specs[0].client_request_id, specs[0].caller)
        self._reserve_client_request_id(collector, is_new)
        if wake_each_second:
            self._woken_each_second[collector] = None
        now_s = self._clock.now_s()
        for spec in specs:
            self._collectors[spec.request_id] = collector
            self._execute(self._tracker.submit(spec, now_s))
        return collector

    def stop(self, request_id: str, num_tokens: int) -> None:
        """Ends a choice in whose output a stop string was found after this number of tokens."""
        self._collectors.pop(request_id, None)
        self._execute(self._tracker.stop(request_id, num_tokens))

    def abort(self, collector: OutputCollector) -> None:
        """Aborts a request and removes its collector. Idempotent, and also called for requests that have ended by
        themselves."""
        if self._client_request_ids.get((collector.caller, collector.client_request_id)) is collector:
            del self._client_request_ids[collector.caller, collector.client_request_id]
        self._woken_each_second.pop(collector, None)
        for request_id in collector.request_ids:
            self._collectors.pop(request_id, None)
            self._execute(self._tracker.abort(request_id))

    async def abort_by_name(self, names: list[str], abort_all: bool = False, caller: str | None = None) -> set[str]:
        """Aborts the requests with these names, or all requests: those of one caller, or of all callers for None. Returns
        the names that were known."""
        own_names, now_s = self._tracker.matching_names(names, abort_all, caller), self._clock.now_s()
        query_id = next(self._query_ids)
        reply = self._queries[query_id] = asyncio.get_running_loop().create_future()
        try:
            self._execute(self._tracker.abort_by_name(query_id, names, abort_all, now_s, caller))
            if self.engine is None and not abort_all and own_names.issuperset(names):
                return own_names
            return own_names.union((await asyncio.wait_for(reply, ABORT_ANSWER_S)).aborted)
        except TimeoutError:
            problem = f"the engine did not say within {ABORT_ANSWER_S:g} s what it has aborted; ask again"
            raise Unavailable(problem, retry_after_s=RETRY_SOON_S) from None
        finally:
            del self._queries[query_id]

    async def kv_events(self, next_number: int) -> KvEvents | None:
        """Queries the changes of the engine's prefix cache since the change with this number; -1 queries a complete
        listing. Returns None without a reply in time, and if the engine has been replaced meanwhile."""
        engine, query_id = self.engine, next(self._query_ids)
        reply = self._queries[query_id] = asyncio.get_running_loop().create_future()
        try:
            self._execute(self._tracker.query_kv_events(query_id, next_number))
            if engine is None:
                return None
            events = (await asyncio.wait_for(reply, KV_EVENTS_ANSWER_S)).events
            return events if self.engine == engine else None
        except TimeoutError:
            return None
        finally:
            del self._queries[query_id]

    def fail(self, collector: OutputCollector, error: ErrorInfo) -> None:
        """Ends the unfinished choices of a request with this error. Its stream gets the error after the tokens so far."""
        self._execute(self._tracker.fail(collector.request_ids, error))

    def progress(self, collector: OutputCollector) -> StreamProgress:
        return self._tracker.progress(collector.request_ids)

    def fail_all(self) -> None:
        """Ends all requests with an error when the grace period is over, and refuses new ones."""
        self._stopping = True
        self._execute(self._tracker.fail_all(STOPPING))

    async def close(self) -> None:
        tasks = [self._ticking] + ([self._reading] if self._reading else [])
        self._disconnect()
        self._ticking.cancel()
        await asyncio.wait(tasks)

    def _reserve_client_request_id(self, collector: OutputCollector, is_new: bool) -> None:
        if is_new and (collector.caller, collector.client_request_id) in self._client_request_ids:
            raise Conflict(
                f"X-Request-Id: {collector.client_request_id!r} is the label of a request that is still running",
                param="X-Request-Id",
            )
        if collector.client_request_id:
            self._client_request_ids[collector.caller, collector.client_request_id] = collector

    async def _wait_for_engine(self, deadline_at_s: float | None) -> None:
        timeout_s = ENGINE_WAIT_S
        if deadline_at_s is not None:
            timeout_s = min(timeout_s, deadline_at_s - self._clock.now_s())
        try:
            await asyncio.wait_for(self._first_engine.wait(), timeout_s)
        except TimeoutError:
            raise RequestFailed(NO_ENGINE if timeout_s == ENGINE_WAIT_S else DEADLINE_EXCEEDED) from None

    def _execute(self, actions: TrackerActions) -> None:
        for message in actions.send:
            # A message that the transport refuses counts as lost: the engine's next `HeldRequestsReport` shows it.
            if self._transport is not None and not self._transport.send(message):
                _logger.warning(log.event("engine queue full", lost=type(message).__name__))
        for output in actions.deliver:
            if collector := self._collectors.get(output.request_id):
                collector.put(output)

    async def _read_loop(self, transport: EngineTransport, incarnation: str) -> None:
        while True:
            message = await transport.receive()
            if isinstance(message, AbortReply | KvEventsReply):
                self._resolve_query(message)
            elif isinstance(message, RequestPhases):
                self._on_phases(message)
            else:
                self._execute(self._tracker.receive(incarnation, message, self._clock.now_s()))

    def _on_phases(self, message: RequestPhases) -> None:
        collector = self._collectors.get(message.request_id)
        if collector is not None and collector.phases is not None:
            collector.phases.receive(message, self._clock.now_s())

    def _resolve_query(self, message: AbortReply | KvEventsReply) -> None:
        reply = self._queries.get(message.query_id)
        if reply is not None and not reply.done():
            reply.set_result(message)

    async def _tick_loop(self) -> None:
        for tick in itertools.count(1):
            await asyncio.sleep(TICK_S)
            self._execute(self._tracker.tick(self._clock.now_s()))
            if tick % TICKS_PER_WAKE == 0:
                for collector in self._woken_each_second:
                    collector.wake_if_idle()

    def _disconnect(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._transport is not None:
            self._transport.close()
        self._reading = self._transport = None

    def _spawn_critical(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task that ends only by being cancelled. Any other end is a bug, and the process must not go on."""
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (fault := task.exception()) is not None:
            _logger.critical("the engine client has failed", exc_info=fault)
            self._on_fault()


HOLD_S = 0.1
"""Shorter than it takes to empty a full queue, so that a refusal is not repeated once there is room."""
OVERLOADED_CODE = "overloaded"


class LoadShedder:
    """Rejects new requests for `hold_s` after the engine has refused one because its queue is full, with the same error.

    They are rejected before their bodies are parsed. Otherwise they would be tokenized only to be refused by the engine,
    and a flood of requests would be expensive. There is no limit of its own. Requests that the engine has accepted are
    not affected, and refusals for limits of single callers are not repeated."""

    def __init__(self, clock: Clock, registry: Registry, hold_s: float = HOLD_S) -> None:
        self._clock, self._hold_s = clock, hold_s
        self._refusal: ErrorInfo | None = None
        self._until_s = 0.0
        self._turned_away = registry.counter(
            "onward_early_refusals_total",
            "New requests refused without asking the engine, whose queue was full a moment before",
        )

    def record_refusal(self, refusal: ErrorInfo) -> None:
        """Records the error with which the engine has refused a new request. Only an overload has an effect."""
        if refusal.code == OVERLOADED_CODE:
            self._refusal, self._until_s = refusal, self._clock.now_s() + self._hold_s

    async def wait_accepted(self, collector: OutputCollector) -> None:
        """Waits until the engine has accepted a request, and records a refusal."""
        try:
            await collector.wait_accepted()
        except RequestFailed as failure:
            self.record_refusal(failure.info)
            raise

    def check(self) -> None:
        """Raises the engine's last overload error if it is recent."""
        if self._refusal is not None and self._clock.now_s() < self._until_s:
            self._turned_away.inc()
            raise RequestFailed(self._refusal)
