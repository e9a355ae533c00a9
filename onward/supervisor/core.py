"""Decides which processes of an instance are started, restarted, killed and informed, and when. Does no I/O.

worker dies       -> the engine is informed, a new worker starts; the engine's requests go on with their KV if that is kept
                     (`worker_deaths`), else from their tokens
standby           -> a worker that has loaded everything takes over at once, and another standby starts
engine dies       -> the worker is killed and reaped, because its steps have no owner; both start again, the apis resubmit
api dies          -> the engine drops its requests; a new one starts on the same listening socket
stream store dies -> the apis are informed; a new one starts, empty

`Supervisor` (real processes) and the simulator report what has happened, with the time, and carry out the returned
actions in order, then call `tick`. A process is dead and reaped before its successor is announced, so there are never two.
"""

import logging
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from onward import log
from onward.proto.control import (
    ApiGone,
    ChildReady,
    Drain,
    EngineGone,
    EngineUp,
    FromChild,
    IsolatedRequestRunning,
    MetricsSnapshot,
    QueryInstance,
    QueryMetrics,
    ReplaceWorker,
    RequestDrain,
    RequestUndrain,
    StopChild,
    StreamStoreGone,
    StreamStoreUp,
    ToChild,
    Undrain,
    WorkerGone,
)
from onward.proto.demo import KillTarget, RequestKill
from onward.proto.live import LiveEngine, LiveSnapshot, QueryLive
from onward.proto.step import WorkerHello
from onward.supervisor.children import Child, ChildState, ProcessRole
from onward.supervisor.live_queries import LiveQueries
from onward.supervisor.restart_policy import COOL_DOWN_S, RestartPolicy
from onward.supervisor.snapshots import SnapshotAggregator
from onward.supervisor.worker_deaths import KillReason, classify_death, keeps_memory

logger = logging.getLogger(__name__)

SNAPSHOT_INTERVAL_S = 1.0
HANDOFF_POLL_S = 0.1
"""How often the engine is asked, during a shutdown, whether its handoffs are complete."""
SUSPENDED_AFTER_S = 5.0
"""The supervisor calls `tick` far more often. After a longer pause, it or the whole machine was suspended."""
START_FACTOR = 10.0
"""A worker may take this many times as long to start as the slowest start so far: files may have been cached then."""
START_RETRY_S = 1.0
"""Delay before a start that the operating system refused is tried again."""
MEMORY_DOUBT_DELAY_S = 1.0
"""The KV memory is given up when a restart is delayed by this or more, which happens from the third death without a
completed step on. The kept KV memory, or a lack of other memory, is then a likely cause."""
KILL_AFTER_S = 3.0
"""How long a child may take to stop, beyond its grace period."""
STANDBY_DELAY_S = 1.0
"""Delay from the readiness of a worker to the start of the next standby, so that resumed streams come first."""
ACTIVATION_TIMEOUT_S = 5.0
"""How long a standby worker may take until it serves. It has nothing left to load."""


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start this process, then call `SupervisorCore.on_started` or `on_start_failed`."""

    role: ProcessRole
    index: int


@dataclass(frozen=True, slots=True)
class ActivateStandby:
    """Make this standby the worker of the present engine, then call `SupervisorCore.on_activated`."""

    child: Child


@dataclass(frozen=True, slots=True)
class KillProcess:
    """Send SIGKILL. The death is reported by `SupervisorCore.on_exit`, like any other."""

    child: Child
    cause: str


@dataclass(frozen=True, slots=True)
class RemoveProcess:
    """Kill the process and wait until it is gone, before the next action, and call `SupervisorCore.on_removed`. The core
    has forgotten it already."""

    child: Child


@dataclass(frozen=True, slots=True)
class SendMessage:
    child: Child
    message: ToChild


@dataclass(frozen=True, slots=True)
class AnswerQuery:
    """Send an `InstanceView` to the api process that asked for it."""

    child: Child
    query_id: int


@dataclass(frozen=True, slots=True)
class AnswerLiveQuery:
    """Send a `LiveView` to the api process that asked for it."""

    child: Child
    query_id: int
    engine: LiveEngine | None


@dataclass(frozen=True, slots=True)
class KillInstance:
    """Send SIGKILL to every process of the instance, the supervisor included."""


SupervisorAction = (
    StartProcess
    | ActivateStandby
    | KillProcess
    | RemoveProcess
    | SendMessage
    | AnswerQuery
    | AnswerLiveQuery
    | KillInstance
)


class Phase(Enum):
    RUNNING = "running"
    STOPPING_APIS = "stopping_apis"
    ENDING_STREAMS = "ending_streams"
    """A second signal came: api processes get no grace period."""
    STOPPING_STREAM_STORE = "stopping_stream_store"
    COMPLETING_HANDOFFS = "completing_handoffs"
    """Decode instances get the prompts that this instance has accepted for them."""
    STOPPING_ENGINE = "stopping_engine"
    STOPPING_WORKER = "stopping_worker"
    STOPPED = "stopped"


_NEXT_PHASE = {
    Phase.RUNNING: Phase.STOPPING_APIS,  # first, while their streams still have an engine
    Phase.STOPPING_APIS: Phase.STOPPING_STREAM_STORE,
    Phase.ENDING_STREAMS: Phase.STOPPING_STREAM_STORE,
    Phase.STOPPING_STREAM_STORE: Phase.COMPLETING_HANDOFFS,
    Phase.COMPLETING_HANDOFFS: Phase.STOPPING_ENGINE,
    Phase.STOPPING_ENGINE: Phase.STOPPING_WORKER,
    Phase.STOPPING_WORKER: Phase.STOPPED,
}
_STOPPED_ROLES = {
    Phase.STOPPING_APIS: ProcessRole.API,
    Phase.ENDING_STREAMS: ProcessRole.API,
    Phase.STOPPING_STREAM_STORE: ProcessRole.STREAM_STORE,
    Phase.STOPPING_ENGINE: ProcessRole.ENGINE,
    Phase.STOPPING_WORKER: ProcessRole.WORKER,
}


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    num_api_processes: int
    stall_timeout_s: float
    drain_s: float
    serves_handoffs: bool
    """Whether decode instances may ask this one to compute prompts."""
    allows_kills: bool = False
    """Whether an api process may have processes killed, as `--demo` does."""
    owns_kv_memory: bool = False
    """Whether workers attach KV memory that the supervisor owns."""
    has_standby: bool = False
    """Whether a standby worker waits for the death of the present one."""
    awaits_release: bool = False
    """Whether an old server still uses the KV memory, or the port where peers write KV, until `begin_serving`. Only a
    standby worker starts in the meantime: it writes no memory, and opens no port."""


class SupervisorCore:
    def __init__(self, settings: SupervisorSettings, now_s: float) -> None:
        self.children: dict[str, Child] = {}
        """The live children by incarnation."""
        self.snapshots = SnapshotAggregator()
        self._live_queries = LiveQueries()
        self.restarts = dict.fromkeys(ProcessRole, 0)
        self.engine_up: EngineUp | None = None
        self.stream_store_up: StreamStoreUp | None = None
        self.was_ready = False
        """Whether all processes were ready at the same time once: from then on a death leads to a restart."""
        self.is_draining = False
        self.phase = Phase.RUNNING
        self.is_replaced = False
        """A new server takes over, so the shutdown has no grace periods."""
        self._awaits_release = settings.awaits_release
        self._settings = settings
        self._restart_policy = RestartPolicy()
        self._stream_store_restart_policy = RestartPolicy()
        """Separate: deaths of the stream store say nothing about the other processes."""
        self._standby_restart_policy = RestartPolicy()
        self._standby_starts_at_s: float | None = None
        self._restart_at_s: dict[tuple[ProcessRole, int], float] = {}
        self._engine_address = ""
        """The address at which api processes connect to the engine."""
        self._longest_worker_start_s = 0.0
        self._kv_memory_number = 1
        self._next_snapshot_s = now_s
        self._phase_ends_at_s = 0.0
        self._first_handoff_query = 0
        self._last_tick_s = self._running_since_s = now_s

    # Processes.

    def replace_stopped(self, children: Iterable[Child]) -> list[SupervisorAction]:
        """Kills children that a signal has stopped for too long. Does nothing in a shutdown, because each of its phases has
        its own time limit."""
        if not self.is_running:
            return []
        return [self._kill(child, KillReason.STOPPED, "stopped by a signal") for child in children]

    @property
    def kv_memory(self) -> str:
        """Name of the KV memory that the next worker attaches. Empty if each worker allocates its own."""
        return f"memory-{self._kv_memory_number}" if self._settings.owns_kv_memory else ""

    def start(self) -> list[SupervisorAction]:
        apis = [StartProcess(ProcessRole.API, index) for index in range(self._settings.num_api_processes)]
        return [StartProcess(ProcessRole.STREAM_STORE, 0), StartProcess(ProcessRole.ENGINE, 0), *apis]

    def on_started(
        self, role: ProcessRole, index: int, incarnation: str, address: str, now_s: float
    ) -> list[SupervisorAction]:
        """Records a started process. `address`: where api processes connect to an engine or a stream store; messages sent
        there wait until the process listens."""
        assert self.is_running, "no process is started during a shutdown"
        assert not any(c.index == index for c in self.children_of(role)), (
            "a process is reaped before its successor starts"
        )
        child = self.children[incarnation] = Child(role, index, incarnation, now_s)
        match role:
            case ProcessRole.STREAM_STORE:
                self.stream_store_up = StreamStoreUp(incarnation, address)
                return self._broadcast(ProcessRole.API, self.stream_store_up)
            case ProcessRole.ENGINE:
                self._engine_address = address
                return self._start_worker()
            case ProcessRole.WORKER | ProcessRole.STANDBY:
                child.kv_memory = self.kv_memory
                return []
            case ProcessRole.API:
                messages = (self.stream_store_up, self.engine_up, Drain() if self.is_draining else None)
                return [SendMessage(child, message) for message in messages if message is not None]

    def on_activated(self, child: Child, now_s: float) -> None:
        """Makes a standby the worker, after it was sent its engine."""
        assert child.role is ProcessRole.STANDBY, "only a standby is activated"
        child.role, child.state, child.started_at_s, child.was_standby = (
            ProcessRole.WORKER, ChildState.STARTING, now_s, True,
        )  # fmt: skip

    def give_up_standby(self) -> None:
        """Runs this instance without a standby worker until the instance is restarted."""
        self._settings = replace(self._settings, has_standby=False)

    def schedule_standby(self, at_s: float) -> None:
        """Schedules the start of a standby for `at_s`, or for the time scheduled before if that is later: the restart of a
        standby that keeps dying stays delayed."""
        self._standby_starts_at_s = max(at_s, self._standby_starts_at_s or at_s)

    def _start_worker(self) -> list[SupervisorAction]:
        """Activates a ready standby that has attached the present memory; without one, starts a new worker. While an old
        server has not released what the worker needs, starts a standby instead."""
        if self._awaits_release:
            return [StartProcess(ProcessRole.STANDBY, 0)]
        standby = [child for child in self._ready(ProcessRole.STANDBY) if child.kv_memory == self.kv_memory]
        return [ActivateStandby(standby[0])] if standby else [StartProcess(ProcessRole.WORKER, 0)]

    def _tend_standby(self, now_s: float) -> list[SupervisorAction]:
        """Starts a standby when one is due. Removes a standby that has attached earlier memory: it can never take over."""
        actions: list[SupervisorAction] = []
        for child in self.children_of(ProcessRole.STANDBY):
            if child.kv_memory != self.kv_memory:
                self._forget(child)
                actions.append(RemoveProcess(child))
                self.schedule_standby(now_s + STANDBY_DELAY_S)
        if self._standby_starts_at_s is not None and now_s >= self._standby_starts_at_s:
            self._standby_starts_at_s = None
            if not self.children_of(ProcessRole.STANDBY):
                actions.append(StartProcess(ProcessRole.STANDBY, 0))
        return actions

    def on_start_failed(self, role: ProcessRole, index: int, now_s: float) -> None:
        """Schedules another start, after the operating system refused one for lack of processes, files or memory."""
        if role is ProcessRole.STANDBY:
            self.schedule_standby(now_s + START_RETRY_S)
        else:
            self._restart_at_s[role, index] = now_s + START_RETRY_S

    def on_exit(
        self, child: Child, return_code: int, cause: str, now_s: float, *, peer_may_write: bool = False
    ) -> list[SupervisorAction]:
        """Handles the death of a child that was reaped. `return_code` is negative for a signal; `cause` is for people.
        `peer_may_write`: a peer of a worker may still write its KV memory."""
        if child.incarnation not in self.children:
            return []  # the death of its engine has removed it
        self._forget(child)
        if not self.is_running:
            if child.role is ProcessRole.WORKER and (return_code != 0 or peer_may_write):
                # A new server may adopt this memory.
                self._keep_or_end_memory(child, return_code, has_engine=True, peer_may_write=peer_may_write)
            engines = self._ready(ProcessRole.ENGINE) if child.role is ProcessRole.API else []
            messages = [SendMessage(engine, ApiGone(child.incarnation)) for engine in engines]
            return [*messages, *self._advance_shutdown(now_s)]
        if child.role is ProcessRole.STANDBY:
            return self._on_standby_exit(child, return_code, now_s)
        policy = self._stream_store_restart_policy if child.role is ProcessRole.STREAM_STORE else self._restart_policy
        isolated_request_id = self._isolated_request_of(child)
        delay_s = policy.record_death(now_s, self.snapshots.num_progress_reports, isolated_request_id)
        # The memory that an engine was to adopt may be the cause of its failed start.
        fails_to_start = child.role is ProcessRole.ENGINE and child.state is ChildState.STARTING
        keeps_dying = child.role in (ProcessRole.WORKER, ProcessRole.ENGINE) and delay_s >= MEMORY_DOUBT_DELAY_S
        if keeps_dying or (fails_to_start and return_code != -signal.SIGKILL):
            self._end_memory()
        actions = self._announce_exit(child, return_code, cause, peer_may_write=peer_may_write)
        if delay_s:
            logger.warning(log.event("restart delayed", role=child.role.value, seconds=delay_s))
        self._restart_at_s[child.role, child.index] = now_s + delay_s
        return actions

    def _isolated_request_of(self, child: Child) -> str | None:
        """Returns the request that explains the death of this child: the one that the engine has announced to run alone."""
        engines = self.children_of(ProcessRole.ENGINE) if child.role is ProcessRole.WORKER else [child]
        return next((engine.isolated_request_id for engine in engines), None)

    def _on_standby_exit(self, standby: Child, return_code: int, now_s: float) -> list[SupervisorAction]:
        """Handles the death of a standby, on which no request depends. A standby that died of a fault may have written to
        the memory that it shares with the worker, so this memory is given up. A standby that reported a failed start and
        ended with 0 has written nothing."""
        self.restarts[ProcessRole.STANDBY] += 1
        delay_s = self._standby_restart_policy.record_death(now_s, progress=0)  # a standby completes no steps
        if delay_s >= COOL_DOWN_S:
            logger.warning(log.event("no standby worker any more, since it keeps dying"))
            self.give_up_standby()
        else:
            self.schedule_standby(now_s + max(STANDBY_DELAY_S, delay_s))
        death = classify_death(return_code, standby.kill_reason, has_engine=True)
        if return_code == 0 or keeps_memory(death) or standby.kv_memory != self.kv_memory:
            return []
        return self.give_up_memory(f"a standby worker died: {death.value}")

    def give_up_memory(self, cause: str) -> list[SupervisorAction]:
        """Gives up the KV memory and kills the worker that has attached it. If there is no worker at the moment, the next
        one does not attach this memory either."""
        self._end_memory()
        workers = self.children_of(ProcessRole.WORKER)
        return [self._kill(worker, KillReason.REPLACEMENT, cause) for worker in workers]

    def on_removed(self, child: Child, return_code: int, *, peer_may_write: bool = False) -> None:
        """Handles the end of a worker that was removed with its engine. It may have died before, of another cause."""
        self._keep_or_end_memory(child, return_code, has_engine=False, peer_may_write=peer_may_write)

    def _keep_or_end_memory(self, worker: Child, return_code: int, *, has_engine: bool, peer_may_write: bool) -> bool:
        """Returns whether the next worker gets the memory of this one. Gives the memory up if it may be damaged."""
        if worker.kv_memory != self.kv_memory:
            return False  # it was given up before
        death = classify_death(return_code, worker.kill_reason, has_engine=has_engine, peer_may_write=peer_may_write)
        if not keeps_memory(death):
            self._end_memory()
            return False
        return self._settings.owns_kv_memory

    def _end_memory(self) -> None:
        """Gives up the present KV memory, so that the next worker gets a new one. The contents may be damaged, or may be
        the reason why processes die."""
        self._kv_memory_number += 1

    def _announce_exit(
        self, child: Child, return_code: int, cause: str, *, peer_may_write: bool
    ) -> list[SupervisorAction]:
        match child.role:
            case ProcessRole.WORKER:
                is_kept = self._keep_or_end_memory(child, return_code, has_engine=True, peer_may_write=peer_may_write)
                return self._broadcast(ProcessRole.ENGINE, WorkerGone(child.incarnation, cause, is_kept))
            case ProcessRole.ENGINE:
                self.engine_up = None
                workers = self.children_of(ProcessRole.WORKER)
                for worker in workers:
                    self._forget(worker)
                self._restart_at_s.pop((ProcessRole.WORKER, 0), None)  # the new engine starts one
                message = EngineGone(child.incarnation, cause, child.isolated_request_id)
                return [*map(RemoveProcess, workers), *self._broadcast(ProcessRole.API, message)]
            case ProcessRole.API:
                message = ApiGone(child.incarnation)
                return [
                    *self._broadcast(ProcessRole.ENGINE, message),
                    *self._broadcast(ProcessRole.STREAM_STORE, message),
                ]
            case ProcessRole.STREAM_STORE:
                self.stream_store_up = None
                return self._broadcast(ProcessRole.API, StreamStoreGone(child.incarnation))
            case ProcessRole.STANDBY:
                return []

    def _restart_due(self, now_s: float) -> list[SupervisorAction]:
        due = [process for process, at_s in self._restart_at_s.items() if at_s <= now_s]
        actions: list[SupervisorAction] = []
        for role, index in due:
            del self._restart_at_s[role, index]
            assert role is not ProcessRole.WORKER or self.children_of(ProcessRole.ENGINE), "a worker has an engine"
            self.restarts[role] += 1
            actions += self._start_worker() if role is ProcessRole.WORKER else [StartProcess(role, index)]
        return actions

    # Messages.

    def on_message(self, child: Child, message: FromChild, now_s: float) -> list[SupervisorAction]:
        match message:
            case ChildReady():
                return self._on_ready(child, message.worker, now_s)
            case MetricsSnapshot():
                return self._on_snapshot(child, message, now_s)
            case IsolatedRequestRunning():
                child.isolated_request_id = message.request_id
            case ReplaceWorker():
                workers = self.children_of(ProcessRole.WORKER)
                return [
                    self._kill(worker, KillReason.REPLACEMENT, message.cause)
                    for worker in workers
                    if worker.incarnation == message.incarnation
                ]
            case QueryInstance():
                return self._open_query(child, message, now_s)
            case QueryLive():
                return self._open_live_query(child, message, now_s)
            case LiveSnapshot():
                query = self._live_queries.close(message.query_id)
                return [] if query is None else [AnswerLiveQuery(query.requester, query.query_id, message.engine)]
            case RequestKill():
                return self._kill_for_demo(message.target)
            case RequestDrain():
                return self._set_draining(True)
            case RequestUndrain():
                return self._set_draining(False)
            case _:
                pass
        return []

    def _on_ready(self, child: Child, worker: WorkerHello | None, now_s: float) -> list[SupervisorAction]:
        child.state, child.last_reply_at_s = ChildState.READY, now_s
        actions: list[SupervisorAction] = []
        if child.role is ProcessRole.ENGINE and worker is not None:
            for process in self.children_of(ProcessRole.WORKER):
                process.state = ChildState.READY
                if not process.was_standby:
                    self._longest_worker_start_s = max(self._longest_worker_start_s, now_s - process.started_at_s)
            if self.engine_up is None or self.engine_up.incarnation != child.incarnation:
                self.engine_up = EngineUp(child.incarnation, self._engine_address, worker)
                actions = self._broadcast(ProcessRole.API, self.engine_up)
            if self._settings.has_standby and not self.children_of(ProcessRole.STANDBY):
                self.schedule_standby(now_s + STANDBY_DELAY_S)
        self.was_ready = self.was_ready or self._is_complete
        return actions

    @property
    def _is_complete(self) -> bool:
        """Whether all processes are ready at this moment. A standby is not needed."""
        serving = [process for process in self.children.values() if process.role is not ProcessRole.STANDBY]
        is_complete = self.engine_up is not None and len(serving) == 3 + self._settings.num_api_processes
        return is_complete and all(process.state is ChildState.READY for process in serving)

    def _on_snapshot(self, child: Child, snapshot: MetricsSnapshot, now_s: float) -> list[SupervisorAction]:
        """Records a snapshot. An engine reports its steps once a second. If it reports further steps, a death since its
        last report was bad luck, and the restart is no longer delayed."""
        child.last_reply_at_s = now_s
        progress_before = self.snapshots.num_progress_reports
        self.snapshots.record(child, snapshot)
        actions = self._answer_queries(now_s)
        if not self.is_running:
            return [*actions, *self._advance_shutdown(now_s)]
        if self.snapshots.num_progress_reports > progress_before:
            for role, index in self._restart_at_s:
                if role is not ProcessRole.STREAM_STORE:
                    self._restart_at_s[role, index] = min(now_s, self._restart_at_s[role, index])
        return actions

    def _open_query(self, child: Child, message: QueryInstance, now_s: float) -> list[SupervisorAction]:
        sources = self._snapshot_sources()
        query_id = self.snapshots.open_query(child, message.query_id, set(sources), now_s)
        return [SendMessage(source, QueryMetrics(query_id)) for source in sources]

    def _answer_queries(self, now_s: float) -> list[SupervisorAction]:
        return [AnswerQuery(query.requester, query.query_id) for query in self.snapshots.pop_answerable(now_s)]

    def _open_live_query(self, child: Child, message: QueryLive, now_s: float) -> list[SupervisorAction]:
        """Asks the engine for its state. Without a ready engine, answers at once with the processes alone."""
        engines = self._ready(ProcessRole.ENGINE)
        if not engines:
            return [AnswerLiveQuery(child, message.query_id, None)]
        query_id = self._live_queries.open(child, message.query_id, now_s)
        return [SendMessage(engine, QueryLive(query_id)) for engine in engines]

    def _kill_for_demo(self, target: KillTarget) -> list[SupervisorAction]:
        if not self._settings.allows_kills:
            logger.warning(log.event("kill refused because --demo is not given", target=target))
            return []
        if target == "instance":
            return [KillInstance()]
        return [self._kill(child, KillReason.DEMO) for child in self.children_of(ProcessRole(target))]

    def _answer_live_queries(self, now_s: float) -> list[SupervisorAction]:
        """Answers the queries that the engine has not answered in time, or cannot answer any more."""
        has_engine = bool(self._ready(ProcessRole.ENGINE))
        late = self._live_queries.pop_late(now_s) if has_engine else self._live_queries.pop_all()
        return [AnswerLiveQuery(query.requester, query.query_id, None) for query in late]

    def _set_draining(self, is_draining: bool) -> list[SupervisorAction]:
        """Applies to all api processes, including those that start later."""
        if is_draining != self.is_draining:
            logger.info(log.event("draining" if is_draining else "undrained"))
        self.is_draining = is_draining
        return self._broadcast(ProcessRole.API, Drain() if is_draining else Undrain())

    # Time.

    def tick(self, now_s: float) -> list[SupervisorAction]:
        if now_s - self._last_tick_s > SUSPENDED_AFTER_S:
            self._running_since_s = now_s
        self._last_tick_s = now_s
        actions = [*self._answer_queries(now_s), *self._answer_live_queries(now_s)]
        if not self.is_running:
            return [*actions, *self._poll_handoffs(now_s), *self._advance_shutdown(now_s)]
        actions += self._restart_due(now_s)
        if self._settings.has_standby:
            actions += self._tend_standby(now_s)
        if now_s >= self._next_snapshot_s:
            self._next_snapshot_s = now_s + SNAPSHOT_INTERVAL_S
            actions += self._query_metrics(self._snapshot_sources())
            actions += [self._kill(child, KillReason.SILENCE) for child in self._unresponsive(now_s)]
        return actions

    def next_tick_s(self) -> float:
        """Returns when `tick` must be called next, if nothing is reported before."""
        due_times = [query.deadline_at_s for query in self.snapshots.queries.values()]
        due_times += self._live_queries.deadlines()
        match self.phase:
            case Phase.RUNNING:
                due_times += [*self._restart_at_s.values(), self._next_snapshot_s]
                due_times += [] if self._standby_starts_at_s is None else [self._standby_starts_at_s]
            case Phase.COMPLETING_HANDOFFS:
                due_times += [self._phase_ends_at_s, self._next_snapshot_s]
            case _:
                due_times.append(self._phase_ends_at_s)
        return min(due_times)

    def _unresponsive(self, now_s: float) -> list[Child]:
        """Returns the processes to kill because they do not answer or make no progress. Only silence while the supervisor
        itself was running counts: after it was suspended, every child seems silent."""
        timeout_s = self._settings.stall_timeout_s
        if now_s - self._running_since_s <= timeout_s:
            return []
        silent = [child for child in self._snapshot_sources() if now_s - child.last_reply_at_s > timeout_s]
        workers, stats = self.children_of(ProcessRole.WORKER), self.snapshots.engine_stats()
        if stats is not None and stats.worker_ready and stats.stalled_s > timeout_s:
            # The engine's report may be a second old, and about a worker that was replaced since.
            silent += [worker for worker in workers if now_s - worker.started_at_s > timeout_s]
        return silent + self._late_workers([*workers, *self.children_of(ProcessRole.STANDBY)], now_s)

    def _late_workers(self, workers: list[Child], now_s: float) -> list[Child]:
        """Returns the workers that take too long to start, and doubles the limit for the next start, in case a worker was
        killed wrongly. The first start has no limit; the limit of later ones is derived from the longest start so far.
        An activated standby has a limit of its own."""
        allowed_s = max(self._settings.stall_timeout_s, START_FACTOR * self._longest_worker_start_s)
        starting = [worker for worker in workers if worker.state is ChildState.STARTING]
        activated = [worker for worker in starting if worker.was_standby]
        starting = [worker for worker in starting if not worker.was_standby]
        late = [worker for worker in starting if self.was_ready and now_s - worker.started_at_s > allowed_s]
        if late:
            self._longest_worker_start_s = 2 * allowed_s / START_FACTOR
        # A worker that was activated for a new engine also waits for the start of that engine.
        activation_s = ACTIVATION_TIMEOUT_S if self._ready(ProcessRole.ENGINE) else allowed_s
        return late + [worker for worker in activated if now_s - worker.started_at_s > activation_s]

    # A new server takes over from an old one.

    @property
    def awaits_release(self) -> bool:
        return self._awaits_release

    @property
    def is_prepared(self) -> bool:
        """Whether all processes of a new server that can run while the old server serves are ready at this moment."""
        if not self._awaits_release:
            return self._is_complete
        roles = (ProcessRole.STREAM_STORE, ProcessRole.STANDBY, ProcessRole.API)
        return sum(len(self._ready(role)) for role in roles) == 2 + self._settings.num_api_processes

    def begin_serving(self, *, keeps_memory: bool) -> list[SupervisorAction]:
        """Starts the worker of a new server, after the old server has released its memory and ports. If `keeps_memory` is
        False, nothing is known about the memory that the standby has mapped, and this server begins with new memory."""
        assert self._awaits_release, "an old server releases its memory once"
        assert self.is_running, "a new server that stops does not begin to serve"
        self._awaits_release = False
        if keeps_memory:
            return self._start_worker()
        self._end_memory()
        return [*self._remove_standby(), *self._start_worker()]

    def stop_for_successor(self, now_s: float) -> list[SupervisorAction]:
        """Stops an old server that a new one replaces: like `stop`, but without grace periods. Ends the grace period of a
        server that was told to stop before, also that of its handoffs: clients wait for the new one already."""
        assert not self.is_stopped, "the caller leaves once the core is stopped"
        self.is_replaced = True
        has_grace = self.phase in (Phase.RUNNING, Phase.STOPPING_APIS, Phase.COMPLETING_HANDOFFS)
        return self.stop(now_s) if has_grace else []

    def start_again(self, now_s: float, *, keeps_memory: bool) -> list[SupervisorAction]:
        """Starts an old server again, whose processes are all dead, because the new server has failed."""
        assert self.is_stopped, "no process of it is left"
        for child in list(self.children.values()):
            self._forget(child)
        if not keeps_memory:
            self._end_memory()
        self.phase, self.is_replaced = Phase.RUNNING, False
        self.engine_up = self.stream_store_up = self._standby_starts_at_s = None
        self._restart_at_s.clear()
        self._next_snapshot_s = self._last_tick_s = self._running_since_s = now_s
        return self.start()

    # Shutdown.

    @property
    def is_running(self) -> bool:
        return self.phase is Phase.RUNNING

    @property
    def is_stopped(self) -> bool:
        return self.phase is Phase.STOPPED

    def stop(self, now_s: float) -> list[SupervisorAction]:
        """Handles a stop signal. A further signal ends the wait of the present phase."""
        assert self.phase is not Phase.STOPPED, "the caller leaves once the core is stopped"
        next_phase = _NEXT_PHASE[self.phase]
        if self.phase is Phase.STOPPING_APIS and self.children_of(ProcessRole.API):
            logger.warning("stopping at once")
            next_phase = Phase.ENDING_STREAMS
        return [*self._remove_standby(), *self._enter(next_phase, now_s), *self._advance_shutdown(now_s)]

    def _remove_standby(self) -> list[SupervisorAction]:
        standby = self.children_of(ProcessRole.STANDBY)
        for child in standby:
            self._forget(child)
        return [RemoveProcess(child) for child in standby]

    def _enter(self, phase: Phase, now_s: float) -> list[SupervisorAction]:
        self.phase = phase
        if phase is Phase.COMPLETING_HANDOFFS:
            # Only the engine's answers from now on count.
            self._first_handoff_query, self._next_snapshot_s = self.snapshots.next_query_id(), now_s
            self._phase_ends_at_s = now_s if self.is_replaced else now_s + self._settings.drain_s
            return self._poll_handoffs(now_s)
        grace_s = self._settings.drain_s if phase is Phase.STOPPING_APIS and not self.is_replaced else 0.0
        self._phase_ends_at_s = now_s + grace_s + KILL_AFTER_S
        return [] if phase is Phase.STOPPED else self._stop_role(_STOPPED_ROLES[phase], grace_s)

    def _stop_role(self, role: ProcessRole, grace_s: float) -> list[SupervisorAction]:
        """Stops the processes of a role. A process that is still starting is killed: it has nothing to complete, and a
        worker that loads reads no messages."""
        return [
            self._kill(child, KillReason.SHUTDOWN, "stopped while it was starting")
            if child.state is ChildState.STARTING
            else SendMessage(child, StopChild(grace_s, self.is_replaced))
            for child in self.children_of(role)
        ]

    def _advance_shutdown(self, now_s: float) -> list[SupervisorAction]:
        actions: list[SupervisorAction] = []
        while self.phase is not Phase.STOPPED and self._is_phase_over(now_s):
            actions += self._enter(_NEXT_PHASE[self.phase], now_s)
        return actions

    def _is_phase_over(self, now_s: float) -> bool:
        if now_s >= self._phase_ends_at_s:
            return True
        if self.phase is Phase.COMPLETING_HANDOFFS:
            has_engine = self._settings.serves_handoffs and self._ready(ProcessRole.ENGINE)
            return not has_engine or self.snapshots.has_no_handoffs(since_query_id=self._first_handoff_query)
        return not self.children_of(_STOPPED_ROLES[self.phase])

    def _poll_handoffs(self, now_s: float) -> list[SupervisorAction]:
        is_due = self.phase is Phase.COMPLETING_HANDOFFS and now_s >= self._next_snapshot_s
        if not is_due or not self._settings.serves_handoffs:
            return []
        self._next_snapshot_s = now_s + HANDOFF_POLL_S
        return self._query_metrics(self._ready(ProcessRole.ENGINE))

    # Children.

    def children_of(self, role: ProcessRole) -> list[Child]:
        return [child for child in self.children.values() if child.role is role]

    def _ready(self, role: ProcessRole) -> list[Child]:
        return [child for child in self.children_of(role) if child.state is ChildState.READY]

    def _snapshot_sources(self) -> list[Child]:
        """Returns the ready processes that answer `QueryMetrics`. Workers do not: the engine reports their numbers."""
        return [
            child
            for child in self.children.values()
            if child.role not in (ProcessRole.WORKER, ProcessRole.STANDBY) and child.state is ChildState.READY
        ]

    def _query_metrics(self, children: list[Child]) -> list[SupervisorAction]:
        return [SendMessage(child, QueryMetrics(self.snapshots.next_query_id())) for child in children]

    def _broadcast(self, role: ProcessRole, message: ToChild) -> list[SupervisorAction]:
        return [SendMessage(child, message) for child in self.children_of(role)]

    def _kill(self, child: Child, reason: KillReason, cause: str = "") -> KillProcess:
        child.kill_reason = child.kill_reason or reason  # it dies of the first signal
        return KillProcess(child, cause or reason.value)

    def _forget(self, child: Child) -> None:
        del self.children[child.incarnation]
        self.snapshots.forget(child)
        self._live_queries.forget(child)
