"""The loop that keeps an instance alive. Plain code on `selectors`: it must be the process that never dies.

worker dies   -> the engine is told, a new worker starts; the engine restarts what ran, from its tokens
engine dies   -> the worker is killed and reaped (its KV is nobody's now), both start anew, the apis resubmit
api dies      -> the engine drops its requests, a new one starts on the same listening socket; the shelf keeps records
shelf dies    -> the apis are told, a new one starts, empty: clients that come back repeat their POST
"""

import logging
import os
import selectors
import signal
import socket
from collections.abc import Callable

import msgspec

from onward import log
from onward.clock import Clock
from onward.config import ApiConfig, EngineConfig, ServeConfig, WorkerConfig, derive_config
from onward.errors import StartupError
from onward.obs.metrics import Registry, merge, usable
from onward.proto.control import (
    ApiGone,
    ChildReady,
    Drain,
    EngineGone,
    EngineUp,
    FromChild,
    InstanceView,
    IsolatedRequestRunning,
    MetricsSnapshot,
    ProcessView,
    QueryInstance,
    QueryMetrics,
    ReplaceWorker,
    RequestDrain,
    RequestUndrain,
    StartApi,
    StartEngine,
    StartFailed,
    StartStreamStore,
    StartupProgress,
    StartWorker,
    StopChild,
    StreamStoreGone,
    StreamStoreUp,
    ToChild,
    Undrain,
    UpdateApiKeys,
    WorkerGone,
    WorkerStarting,
)
from onward.proto.model import PreparedModel
from onward.proto.speculative_config import num_draft_tokens_of
from onward.proto.step import WorkerHello
from onward.supervisor import worker_wire
from onward.supervisor.child_process import ChildProcess, ChildState, ProcessRole, new_incarnation, spawn
from onward.supervisor.oom import OomEvidence, OomWatch
from onward.supervisor.pd_config import PdConfig
from onward.supervisor.registration_config import RegistrationConfig
from onward.supervisor.restart_policy import RestartPolicy
from onward.supervisor.snapshots import SnapshotAggregator
from onward.transport.control_channel import ChannelClosed
from onward.transport.curve import make_private_address
from onward.web.auth import audit_log
from onward.web.auth.api_key_file import ApiKeySource

logger = logging.getLogger(__name__)

POLL_S = 0.1
SNAPSHOT_INTERVAL_S = 1.0
SUSPENDED_AFTER_S = 5.0
"""A turn of ours takes far less. After a longer one it was we, or the whole machine, that stood still."""
START_FACTOR = 10.0
"""A worker may take so many times as long to start as one has taken before: files may have been in memory then."""
START_RETRY_S = 1.0
"""After so long a start is tried again that the system did not allow."""
KILL_AFTER_S = 3.0
"""Beyond the grace: how long a child that was told to stop may take."""


class Supervisor:
    def __init__(
        self,
        config: ServeConfig,
        model: PreparedModel,
        listening: socket.socket,
        clock: Clock,
        *,
        pd: PdConfig,
        routers: RegistrationConfig,
        handoff: socket.socket | None,
        on_progress: Callable[[str, float | None], None],
        on_ready: Callable[[WorkerHello], None],
        key_source: ApiKeySource | None = None,
        oom_watch: OomWatch | None = None,
    ) -> None:
        self._config, self._model, self._listening, self._clock = config, model, listening, clock
        self._pd, self._routers, self._handoff = pd, routers, handoff
        self._on_progress, self._on_ready = on_progress, on_ready
        self._key_source = key_source or ApiKeySource()
        self._keys = self._key_source.read()
        self._reload_pending = False
        self._incarnation = new_incarnation(config.instance_name)
        self._selector = selectors.DefaultSelector()
        self._children: set[ChildProcess] = set()
        self._snapshots = SnapshotAggregator()
        self._restart_policy = RestartPolicy()
        self._stream_store_restart_policy = RestartPolicy()
        """Its deaths say nothing about those who compute."""
        self._restart_at_s: dict[tuple[ProcessRole, int], float] = {}
        self._restarts = {role.value: 0 for role in ProcessRole}
        self._oom_watch = oom_watch or OomWatch()
        self._metrics = Registry()
        self._oom_kills = self._metrics.counter(
            "onward_oom_kills_total", "processes that the kernel killed for lack of memory", ["role", "evidence"]
        )
        self._metrics_unusable = self._metrics.counter(
            "onward_metrics_unusable_total", "series left out, since a number of theirs is not finite", ["role"]
        )
        self._unusable_names: set[tuple[ProcessRole, str]] = set()
        self._messages_dropped = self._metrics.counter(
            "onward_control_messages_dropped_total", "messages of children that could not be decoded", ["role"]
        )
        self._engine_up: EngineUp | None = None
        self._stream_store_up: StreamStoreUp | None = None
        self._engine_address = ""
        """As api processes connect to it."""
        self._num_kv_blocks = config.num_kv_blocks
        self._longest_worker_start_s = 0.0
        """A worker's start, at most."""
        self._was_ready = False
        self._is_draining = False
        self._stop_requests = 0
        self._next_snapshot_s = 0.0
        self._last_turn_at_s = self._running_since_s = clock.now_s()

    def run(self) -> None:
        """Serves until told to stop. Raises `StartupError` if it never came to that."""
        wakeup_read, wakeup_write = socket.socketpair()
        with wakeup_read, wakeup_write:
            self._catch_signals(wakeup_write)
            wakeup_read.setblocking(False)
            self._selector.register(wakeup_read, selectors.EVENT_READ, None)
            try:
                self._start_stream_store()
                self._start_engine()
                for index in range(self._config.api_processes):
                    self._start_api(index)
                while not self._stop_requests:
                    self._run_once(wakeup_read)
                self._shut_down(wakeup_read)
            finally:
                self._clean_up()

    def _catch_signals(self, wakeup: socket.socket) -> None:
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

        # Without a file there is nothing to read again, and the end of a terminal ends us.
        if self._key_source.file is not None:
            signal.signal(signal.SIGHUP, self._on_reload_signal)

    def _on_reload_signal(self, _number: int, _frame: object) -> None:
        self._reload_pending = True

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stop_requests += 1

    def _run_once(self, wakeup: socket.socket) -> None:
        for key, _ in self._selector.select(POLL_S):
            if key.fileobj is wakeup:
                wakeup.recv(64)
            elif key.data in self._children:
                self._read_messages(key.data)
        if self._reload_pending:
            self._reload_pending = False
            self._reload_keys()
        now_s = self._clock.now_s()
        if now_s - self._last_turn_at_s > SUSPENDED_AFTER_S:
            self._running_since_s = now_s
        self._last_turn_at_s = now_s
        self._reap(now_s)
        self._restart_due(now_s)
        self._request_snapshots(now_s)
        self._answer_queries(now_s)

    # Births.

    def _start(
        self, role: ProcessRole, index: int = 0, inherit_fds: tuple[int, ...] = (), incarnation: str | None = None
    ) -> ChildProcess:
        incarnation = incarnation or new_incarnation(role.value)
        child = spawn(role, index, incarnation, self._clock.now_s(), inherit_fds)
        self._children.add(child)
        self._selector.register(child.channel.fileno(), selectors.EVENT_READ, child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        logger.info(log.event("started", role=role.value, pid=child.process.pid, incarnation=child.incarnation))
        return child

    def _start_stream_store(self) -> None:
        shelf = self._start(ProcessRole.STREAM_STORE)
        to_bind, to_connect = make_private_address(shelf.incarnation)
        shelf.send(StartStreamStore(shelf.incarnation, to_bind, self._config.log_level))
        # What is sent before it listens waits for it.
        self._stream_store_up = StreamStoreUp(shelf.incarnation, to_connect)
        self._broadcast(ProcessRole.API, self._stream_store_up)

    def _start_engine(self) -> None:
        # The listening socket for decode instances is ours for life, so that a new engine keeps the old one's address.
        fd = self._handoff.fileno() if self._handoff is not None else -1
        engine = self._start(ProcessRole.ENGINE, inherit_fds=(fd,) if self._handoff is not None else ())
        address, self._engine_address = make_private_address(engine.incarnation)
        config = derive_config(
            self._config,
            EngineConfig,
            prefill_peers=self._pd.prefill_peers,
            kv_checksums=self._pd.kv_checksums,
            num_draft_tokens=num_draft_tokens_of(self._config.speculative),
        )
        engine.send(StartEngine(engine.incarnation, config, address, fd, self._pd.cluster_key))
        self._start_worker(engine)

    def _start_worker(self, engine: ChildProcess) -> None:
        incarnation = new_incarnation(ProcessRole.WORKER.value)
        config = derive_config(
            self._config,
            WorkerConfig,
            num_kv_blocks=self._num_kv_blocks,
            kv_backend=self._pd.kv_backend,
            kv_host=self._pd.kv_host,
        )
        to_bind, to_connect = self._kv_addresses(engine.incarnation, incarnation)
        with worker_wire.open_worker_wire(self._config, self._model, engine.incarnation, incarnation) as made:
            worker = self._start(ProcessRole.WORKER, inherit_fds=made.worker_fds, incarnation=incarnation)
            engine.send(WorkerStarting(incarnation, made.for_engine, to_bind), made.engine_fds)
            worker.send(
                StartWorker(
                    incarnation,
                    engine.incarnation,
                    config,
                    self._model,
                    made.for_worker,
                    to_connect,
                    self._pd.cluster_key,
                )
            )

    def _kv_addresses(self, engine_incarnation: str, worker_incarnation: str) -> tuple[str, str]:
        """Where the two speak of KV transfers; empty where there are none."""
        if not self._pd.is_enabled:
            return "", ""
        return make_private_address(f"kv-{engine_incarnation}-{worker_incarnation}")

    def _start_api(self, index: int) -> None:
        self._send_start_api(self._start(ProcessRole.API, index, (self._listening.fileno(),)))

    def _send_start_api(self, api: ChildProcess) -> None:
        """What it is, and what has been said before it was there."""
        instance = {name: getattr(self._config, name) for name in ServeConfig.__slots__ if name != "api_key"}
        instance["handoff_address"] = self._pd.handoff_address
        config = derive_config(
            self._config,
            ApiConfig,
            routers=self._routers.router_urls,
            url=self._routers.own_url,
            handoff_address=self._pd.handoff_address or "",
            cluster_key=self._pd.cluster_key,
            serve_config=instance,
        )
        fd, keys = self._listening.fileno(), list(self._keys.entries)
        api.send(StartApi(api.incarnation, api.index, config, self._model, fd, keys))
        if self._stream_store_up is not None:
            api.send(self._stream_store_up)
        if self._engine_up is not None:
            api.send(self._engine_up)
        if self._is_draining:
            api.send(Drain())

    # Messages.

    def _read_messages(self, child: ChildProcess) -> None:
        try:
            while self._read_one(child):
                pass
        except ChannelClosed:
            self._stop_watching(child.channel.fileno())  # its death follows, or is being reaped

    def _read_one(self, child: ChildProcess) -> bool:
        """False: there is none yet. A message that cannot be decoded is dropped. A child that sends no others counts as
        silent, and is killed for that."""
        try:
            message = child.channel.receive()
        except msgspec.DecodeError as fault:
            self._messages_dropped.inc(child.role.value)
            logger.error(log.event("message dropped", role=child.role.value, fault=str(fault)))
            return True
        if message is not None:
            self._on_message(child, message)
        return message is not None

    def _on_message(self, child: ChildProcess, message: FromChild) -> None:
        match message:
            case ChildReady():
                child.state = ChildState.READY
                if child.role is ProcessRole.ENGINE and message.worker is not None:
                    self._on_engine_ready(child, message.worker)
                self._announce_readiness()
            case StartupProgress():
                if not self._was_ready:
                    self._on_progress(message.message, message.fraction)
            case StartFailed():
                if not self._was_ready:
                    raise StartupError(message.message)
                logger.error(log.event("cannot start", role=child.role.value, why=message.message))
            case ReplaceWorker():
                self._replace_worker(message)
            case IsolatedRequestRunning():
                child.isolated_request_id = message.request_id
            case MetricsSnapshot():
                self._on_snapshot(child, message, self._clock.now_s())
            case QueryInstance():
                self._open_query(child, message)
            case RequestDrain():
                self._drain()
            case RequestUndrain():
                self._undrain()

    def _drain(self) -> None:
        """All api processes take no more requests, those to come as well."""
        if not self._is_draining:
            logger.info(log.event("draining"))
        self._is_draining = True
        self._broadcast(ProcessRole.API, Drain())

    def _undrain(self) -> None:
        if self._is_draining:
            logger.info(log.event("undrained"))
        self._is_draining = False
        self._broadcast(ProcessRole.API, Undrain())

    def _reload_keys(self) -> None:
        """A file that is broken changes nothing."""
        try:
            self._keys = self._key_source.read()
        except StartupError as fault:
            audit_log.log_failed_key_reload(fault.message)
            return
        self._broadcast(ProcessRole.API, UpdateApiKeys(list(self._keys.entries)))
        audit_log.log_key_reload(len(self._keys))

    def _replace_worker(self, message: ReplaceWorker) -> None:
        """From here on it is a death like any other. One that has happened already needs no second."""
        for worker in self._children_of(ProcessRole.WORKER):
            if worker.incarnation == message.incarnation:
                logger.warning(log.event("worker renewed", pid=worker.process.pid, cause=message.cause))
                worker.send_sigkill()

    def _on_engine_ready(self, engine: ChildProcess, worker: WorkerHello) -> None:
        self._num_kv_blocks = worker.num_blocks  # a restarted worker shall have the same pool
        for child in self._children_of(ProcessRole.WORKER):
            child.state = ChildState.READY
            self._longest_worker_start_s = max(self._longest_worker_start_s, self._clock.now_s() - child.started_at_s)
        if self._engine_up is None or self._engine_up.incarnation != engine.incarnation:
            self._engine_up = EngineUp(engine.incarnation, self._engine_address, worker)
            self._broadcast(ProcessRole.API, self._engine_up)

    def _announce_readiness(self) -> None:
        if self._was_ready or self._engine_up is None:
            return
        if all(child.state is ChildState.READY for child in self._children):
            self._was_ready = True
            self._on_ready(self._engine_up.worker)

    # Deaths.

    def _reap(self, now_s: float) -> None:
        for child in [c for c in self._children if c.process.poll() is not None]:
            if child not in self._children:
                continue  # the death of its engine has taken it along
            self._read_messages(child)  # its last words, if any
            cause, oom = child.exit_cause(), self._oom_evidence(child)
            cause += f", {oom.value}" if oom is not None else ""
            if not self._was_ready:
                advice = "the lines above say why" if oom is None else "try a smaller --num-kv-blocks or --max-num-seqs"
                raise StartupError(f"the {child.role.value} process ended while starting ({cause}); {advice}")
            logger.warning(log.event("died", role=child.role.value, pid=child.process.pid, cause=cause))
            self._remove_child(child)
            self._on_exit(child, cause, now_s)

    def _oom_evidence(self, child: ChildProcess) -> OomEvidence | None:
        evidence = self._oom_watch.explain_kill() if child.killed_externally else None
        if evidence is not None:
            self._oom_kills.inc(child.role.value, evidence.name.lower())
        return evidence

    def _on_exit(self, child: ChildProcess, cause: str, now_s: float) -> None:
        match child.role:
            case ProcessRole.WORKER:
                self._broadcast(ProcessRole.ENGINE, WorkerGone(child.incarnation, cause))
            case ProcessRole.ENGINE:
                self._engine_up = None
                for worker in self._children_of(ProcessRole.WORKER):
                    worker.kill()
                    self._remove_child(worker)
                self._restart_at_s.pop((ProcessRole.WORKER, 0), None)  # the engine's restart brings one
                self._broadcast(ProcessRole.API, EngineGone(child.incarnation, cause, child.isolated_request_id))
            case ProcessRole.API:
                self._broadcast(ProcessRole.ENGINE, ApiGone(child.incarnation))
                self._broadcast(ProcessRole.STREAM_STORE, ApiGone(child.incarnation))
            case ProcessRole.STREAM_STORE:
                self._stream_store_up = None
                self._broadcast(ProcessRole.API, StreamStoreGone(child.incarnation))
        policy = self._stream_store_restart_policy if child.role is ProcessRole.STREAM_STORE else self._restart_policy
        delay_s = policy.record_death(now_s, self._snapshots.num_progress_reports)
        if delay_s:
            logger.warning(log.event("waiting before the restart", role=child.role.value, seconds=delay_s))
        self._restart_at_s[child.role, child.index] = now_s + delay_s

    def _restart_due(self, now_s: float) -> None:
        for (role, index), due_s in list(self._restart_at_s.items()):
            if due_s > now_s:
                continue
            del self._restart_at_s[role, index]
            self._restarts[role.value] += 1
            try:
                self._restart(role, index)
            except OSError as fault:
                # No process, file or memory to be had, for now. An engine that could be started only lacks its worker.
                role = (
                    ProcessRole.WORKER if role is ProcessRole.ENGINE and self._children_of(ProcessRole.ENGINE) else role
                )
                self._restart_at_s[role, index] = now_s + START_RETRY_S
                logger.error(log.event("cannot start", role=role.value, why=fault, again_in_s=START_RETRY_S))

    def _restart(self, role: ProcessRole, index: int) -> None:
        match role:
            case ProcessRole.STREAM_STORE:
                self._start_stream_store()
            case ProcessRole.ENGINE:
                self._start_engine()
            case ProcessRole.WORKER:
                for engine in self._children_of(ProcessRole.ENGINE):
                    self._start_worker(engine)
            case ProcessRole.API:
                self._start_api(index)

    def _remove_child(self, child: ChildProcess) -> None:
        self._stop_watching(child.channel.fileno())
        self._stop_watching(child.pidfd)
        self._snapshots.forget(child)
        self._children.discard(child)
        child.close()

    def _stop_watching(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    # The picture of the whole.

    def _request_snapshots(self, now_s: float) -> None:
        if now_s < self._next_snapshot_s:
            return
        self._next_snapshot_s = now_s + SNAPSHOT_INTERVAL_S
        self._oom_watch.sample(now_s)
        for child in self._snapshot_sources():
            child.send(QueryMetrics(self._snapshots.next_ask_id()))
        self._kill_unresponsive(now_s)

    def _kill_unresponsive(self, now_s: float) -> None:
        """A process that does not answer is killed before it is replaced, so there are never two. Only what it owes since
        we are awake counts: whoever was stopped and continued finds everybody silent."""
        timeout_s = self._config.stall_timeout_s
        if now_s - self._running_since_s <= timeout_s:
            return
        stats = self._snapshots.engine_stats()
        stuck = [child for child, heard_s in self._snapshots.last_heard_at_s.items() if now_s - heard_s > timeout_s]
        if stats is not None and stats.worker_ready and stats.stalled_s > timeout_s:
            # What the engine has said may be a second old, and about a worker that was replaced since.
            stuck += [
                worker for worker in self._children_of(ProcessRole.WORKER) if now_s - worker.started_at_s > timeout_s
            ]
        for child in stuck + self._late_workers(now_s):
            logger.warning(log.event("killed for silence", role=child.role.value, pid=child.process.pid))
            child.send_sigkill()

    def _late_workers(self, now_s: float) -> list[ChildProcess]:
        """Those that do not come to the end of their start. Nobody knows how long a first one takes; but what one has done
        another can do, and if it was killed wrongly, the next one has twice the time."""
        allowed_s = max(self._config.stall_timeout_s, START_FACTOR * self._longest_worker_start_s)
        starting = [worker for worker in self._children_of(ProcessRole.WORKER) if worker.state is ChildState.STARTING]
        late = [worker for worker in starting if self._was_ready and now_s - worker.started_at_s > allowed_s]
        if late:
            self._longest_worker_start_s = 2 * allowed_s / START_FACTOR
        return late

    def _on_snapshot(self, child: ChildProcess, snapshot: MetricsSnapshot, now_s: float) -> None:
        """An engine tells of its steps once a second. If there were some before a death, that death was bad luck, and
        nobody has to wait for it."""
        before = self._snapshots.num_progress_reports
        families, unusable = usable(snapshot.families)
        self._note_unusable(child.role, unusable)
        self._snapshots.record(child, msgspec.structs.replace(snapshot, families=families), now_s)
        if self._snapshots.num_progress_reports > before:
            for role, index in self._restart_at_s:
                if role is not ProcessRole.STREAM_STORE:
                    self._restart_at_s[role, index] = min(now_s, self._restart_at_s[role, index])

    def _note_unusable(self, role: ProcessRole, names: list[str]) -> None:
        """Logged once for each metric: snapshots come every second."""
        for name in names:
            self._metrics_unusable.inc(role.value)
            if (role, name) not in self._unusable_names:
                self._unusable_names.add((role, name))
                logger.error(log.event("metric left out, it is no finite number", role=role.value, metric=name))

    def _open_query(self, asker: ChildProcess, message: QueryInstance) -> None:
        asked = set(self._snapshot_sources())
        number = self._snapshots.open_query(asker, message.query_id, asked, self._clock.now_s())
        for child in asked:
            child.send(QueryMetrics(number))

    def _answer_queries(self, now_s: float) -> None:
        for question in self._snapshots.pop_answerable(now_s):
            question.asker.send(self._instance_view(question.ask_id))

    def _instance_view(self, ask_id: int) -> InstanceView:
        ours = ProcessView("supervisor", os.getpid(), self._incarnation, "ready")
        children = sorted(self._children, key=lambda child: (child.role.value, child.index))
        return InstanceView(
            ask_id,
            self._incarnation,
            [ours, *(child.view() for child in children)],
            dict(self._restarts),
            merge([self._snapshots.families(), self._metrics.snapshot()]),
            self._snapshots.engine_stats(),
            self._oom_kills_by_role(),
        )

    def _oom_kills_by_role(self) -> dict[str, int]:
        kinds = [evidence.name.lower() for evidence in OomEvidence]
        return {role.value: int(sum(self._oom_kills.value(role.value, kind) for kind in kinds)) for role in ProcessRole}

    def _snapshot_sources(self) -> list[ChildProcess]:
        """Those that can describe themselves. The worker's numbers are the engine's to know."""
        return [c for c in self._children if c.role is not ProcessRole.WORKER and c.state is ChildState.READY]

    def _children_of(self, role: ProcessRole) -> list[ChildProcess]:
        return [child for child in self._children if child.role is role]

    def _broadcast(self, role: ProcessRole, message: ToChild) -> None:
        for child in self._children_of(role):
            child.send(message)

    # The end.

    def _shut_down(self, wakeup: socket.socket) -> None:
        """The apis first, while there is still an engine for their streams; a second signal ends the waiting."""
        self._stop_apis(wakeup)
        self._stop_role(ProcessRole.STREAM_STORE, 0.0, wakeup)
        self._wait_for_handoffs(wakeup)
        self._stop_role(ProcessRole.ENGINE, 0.0, wakeup)
        self._stop_role(ProcessRole.WORKER, 0.0, wakeup)

    def _stop_apis(self, wakeup: socket.socket) -> None:
        """At a second signal they end their streams at once, and tell each client."""
        signals_before = self._stop_requests
        self._stop_role(ProcessRole.API, self._config.drain_s, wakeup)
        if self._children_of(ProcessRole.API) and self._stop_requests > signals_before:
            logger.warning("stopping at once")
            self._stop_role(ProcessRole.API, 0.0, wakeup)

    def _stop_role(self, role: ProcessRole, grace_s: float, wakeup: socket.socket) -> None:
        """Who is still starting has nothing to finish, and would not hear: a worker that loads listens to nobody."""
        signals_before = self._stop_requests  # one that comes while they are told counts as well
        for child in self._children_of(role):
            if child.state is ChildState.STARTING:
                child.send_sigkill()
            else:
                child.send(StopChild(grace_s))
        self._wait_until(lambda: not self._children_of(role), grace_s + KILL_AFTER_S, wakeup, signals_before)

    def _wait_for_handoffs(self, wakeup: socket.socket) -> None:
        """Decode instances that we have promised a prompt get it. Only what the engine says from now on counts; one that
        is still starting has promised nothing."""
        if self._handoff is None:
            return
        first_ask, self._next_snapshot_s = self._snapshots.next_ask_id(), 0.0

        def is_over() -> bool:
            engines = self._ready_engines()
            if (now_s := self._clock.now_s()) >= self._next_snapshot_s:
                self._next_snapshot_s = now_s + POLL_S
                for engine in engines:
                    engine.send(QueryMetrics(self._snapshots.next_ask_id()))
            return not engines or self._snapshots.has_no_handoffs(since_ask=first_ask)

        self._wait_until(is_over, self._config.drain_s, wakeup, self._stop_requests)

    def _ready_engines(self) -> list[ChildProcess]:
        return [engine for engine in self._children_of(ProcessRole.ENGINE) if engine.state is ChildState.READY]

    def _wait_until(
        self, is_over: Callable[[], bool], timeout_s: float, wakeup: socket.socket, signals_before: int
    ) -> None:
        """Until then, for so long, or until there are more signals. Buries who dies meanwhile, and restarts nobody."""
        deadline_s = self._clock.now_s() + timeout_s
        while not is_over() and self._clock.now_s() < deadline_s and self._stop_requests == signals_before:
            for key, _ in self._selector.select(POLL_S):
                if key.fileobj is wakeup:
                    wakeup.recv(64)
                elif key.data in self._children:
                    self._read_messages(key.data)
            for child in [c for c in self._children if c.process.poll() is not None]:
                self._remove_child(child)
                if child.role is ProcessRole.API:
                    for engine in self._ready_engines():
                        engine.send(ApiGone(child.incarnation))
            self._answer_queries(self._clock.now_s())

    def _clean_up(self) -> None:
        for child in list(self._children):
            child.kill()
            self._remove_child(child)
        self._selector.close()
