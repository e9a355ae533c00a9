"""The loop that keeps an instance alive: real processes, sockets and signals around `SupervisorCore`, which decides.

Plain code on `selectors`: this is the process that must never die.
"""

import contextlib
import logging
import os
import selectors
import signal
import socket
from collections.abc import Callable, Iterable
from dataclasses import fields

import msgspec

from onward import log
from onward.clock import Clock
from onward.config import ApiConfig, EngineConfig, ServeConfig, WorkerConfig, derive_config
from onward.errors import StartupError
from onward.obs.build_info import register_build_info
from onward.obs.metrics import Registry, merge, usable
from onward.obs.process_usage import ProcessUsage, private_memory_bytes
from onward.proto.control import (
    ActivateWorker,
    ChildReady,
    DeviceKvAllocated,
    DeviceWeightsLoaded,
    FromChild,
    InstanceView,
    LiveView,
    MetricsSnapshot,
    ProcessView,
    ReplaceWorker,
    StartApi,
    StartEngine,
    StartFailed,
    StartStreamStore,
    StartupProgress,
    StartWorker,
    UpdateApiKeys,
    WorkerStarting,
)
from onward.proto.live import LiveEngine
from onward.proto.model import PreparedModel
from onward.proto.speculative_config import num_draft_tokens_of
from onward.proto.step import WorkerHello
from onward.supervisor import worker_wire
from onward.supervisor.child_process import ChildProcess, new_incarnation, spawn
from onward.supervisor.children import Child, ChildState, ProcessRole
from onward.supervisor.core import (
    SNAPSHOT_INTERVAL_S,
    START_RETRY_S,
    ActivateStandby,
    AnswerLiveQuery,
    AnswerQuery,
    KillInstance,
    KillProcess,
    RemoveProcess,
    SendMessage,
    StartProcess,
    SupervisorAction,
    SupervisorCore,
    SupervisorSettings,
)
from onward.supervisor.kv_memory_owner import KvMemoryOwner, can_keep_kv_memory
from onward.supervisor.oom import OomEvidence, OomWatch
from onward.supervisor.pd_config import PdConfig
from onward.supervisor.registration_config import RegistrationConfig
from onward.transport.control_channel import ChannelClosed
from onward.transport.curve import make_private_address
from onward.web.auth import audit_log
from onward.web.auth.api_key_file import ApiKeySource
from onward.worker.kv_memory_budget import free_memory_bytes

logger = logging.getLogger(__name__)

POLL_S = 0.1
STANDBY_MEMORY_RETRY_S = 60.0
STANDBY_SPARE_BYTES = 1 << 30
"""What must be free beside the memory of a standby worker, unless it is asked for."""


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
        owns_kv_memory = can_keep_kv_memory(config, pd)
        settings = SupervisorSettings(
            config.api_processes,
            config.stall_timeout_s,
            config.drain_s,
            serves_handoffs=handoff is not None,
            allows_kills=config.demo,
            owns_kv_memory=owns_kv_memory,
            has_standby=owns_kv_memory and config.standby_worker != "off",
        )
        self._kv_memory = KvMemoryOwner(config.device)
        self._core = SupervisorCore(settings, clock.now_s())
        self._selector = selectors.DefaultSelector()
        self._processes: dict[Child, ChildProcess] = {}
        self._oom_watch = oom_watch or OomWatch()
        self._next_oom_sample_s = 0.0
        self._metrics = Registry()
        self._oom_kills = self._metrics.counter(
            "onward_oom_kills_total", "processes that the kernel killed for lack of memory", ["process", "evidence"]
        )
        for role in ProcessRole:  # a rate needs a first sample before the first event
            for evidence in OomEvidence:
                self._oom_kills.inc(role.value, evidence.name.lower(), by=0)
        self._metrics_unusable = self._metrics.counter(
            "onward_metrics_unusable_total", "series left out, since a number of theirs is not finite", ["process"]
        )
        self._unusable_names: set[tuple[ProcessRole, str]] = set()
        self._messages_dropped = self._metrics.counter(
            "onward_control_messages_dropped_total", "messages of children that could not be decoded", ["process"]
        )
        self._metrics.derived_counter(
            "onward_process_restarts_total",
            "processes that were started again after a death, by process",
            ["process"],
            lambda: {(role.value,): count for role, count in self._core.restarts.items()},
        )
        register_build_info(self._metrics)
        self._usage = ProcessUsage()
        self._usage.register(self._metrics)
        self._num_kv_blocks = config.num_kv_blocks
        self._lacks_standby_memory = False
        if config.standby_worker == "on" and not owns_kv_memory:
            logger.warning("--standby-worker on: there is none with split roles or an EAGLE layer")
        self._has_announced_readiness = False
        self._num_stop_signals = self._num_handled_signals = 0

    def run(self) -> None:
        """Serves until told to stop. Raises `StartupError` if it never came to that."""
        wakeup_read, wakeup_write = socket.socketpair()
        with wakeup_read, wakeup_write:
            self._catch_signals(wakeup_write)
            wakeup_read.setblocking(False)
            self._selector.register(wakeup_read, selectors.EVENT_READ, None)
            try:
                self._execute(self._core.start())
                while not self._core.is_stopped:
                    self._run_once(wakeup_read)
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
        self._num_stop_signals += 1

    def _run_once(self, wakeup: socket.socket) -> None:
        for key, _ in self._selector.select(POLL_S):
            if key.fileobj is wakeup:
                wakeup.recv(64)
            elif key.data in self._processes:
                self._read_messages(key.data)
        if self._reload_pending:
            self._reload_pending = False
            self._reload_keys()
        while self._num_handled_signals < self._num_stop_signals and not self._core.is_stopped:
            self._num_handled_signals += 1
            self._execute(self._core.stop(self._clock.now_s()))
        self._reap()
        now_s = self._clock.now_s()
        if now_s >= self._next_oom_sample_s:
            self._next_oom_sample_s = now_s + SNAPSHOT_INTERVAL_S
            self._oom_watch.sample(now_s)
            self._sample_usage()
        self._execute(self._core.tick(now_s))

    def _execute(self, actions: Iterable[SupervisorAction]) -> None:
        for action in actions:
            match action:
                case StartProcess(role, index):
                    self._start(role, index)
                case ActivateStandby(child):
                    self._activate_standby(child)
                case KillProcess(child, cause):
                    pid = self._processes[child].process.pid
                    logger.warning(log.event("killed", role=child.role.value, pid=pid, cause=cause))
                    self._processes[child].send_sigkill()
                case RemoveProcess(child):
                    process = self._processes[child]
                    process.kill()
                    self._take_last_device_memory(child)
                    self._close(child)
                    # An engine may have relied on a pool that we did not get: then nothing of that memory may be adopted.
                    lacks_pool = self._config.device == "cuda" and not self._kv_memory.has_pool(child.kv_memory)
                    self._core.on_removed(child, 1 if lacks_pool else process.return_code)
                case SendMessage(child, message):
                    self._processes[child].send(message)
                case AnswerQuery(child, query_id):
                    self._processes[child].send(self._instance_view(query_id))
                case KillInstance():
                    self._kill_instance()
                case AnswerLiveQuery(child, query_id, engine):
                    self._processes[child].send(self._live_view(query_id, engine))

    def _kill_instance(self) -> None:
        """As a machine that loses its power: no process of it does anything more."""
        logger.warning(log.event("killed", role="instance", pid=os.getpid(), cause="demo"))
        for process in self._processes.values():
            process.send_sigkill()
        os.kill(os.getpid(), signal.SIGKILL)

    # Starts.

    def _start(self, role: ProcessRole, index: int) -> None:
        try:
            match role:
                case ProcessRole.STREAM_STORE:
                    self._start_stream_store()
                case ProcessRole.ENGINE:
                    self._start_engine()
                case ProcessRole.WORKER:
                    self._start_worker()
                case ProcessRole.STANDBY:
                    self._start_standby()
                case ProcessRole.API:
                    self._start_api(index)
        except OSError as fault:
            if not self._core.was_ready and role is not ProcessRole.STANDBY:
                raise
            logger.error(log.event("cannot start", role=role.value, why=fault, again_in_s=START_RETRY_S))
            self._core.on_start_failed(role, index, self._clock.now_s())

    def _start_stream_store(self) -> None:
        incarnation = new_incarnation(ProcessRole.STREAM_STORE.value)
        to_bind, to_connect = make_private_address(incarnation)
        process = spawn(ProcessRole.STREAM_STORE)
        process.send(StartStreamStore(incarnation, to_bind, self._config.log_level, self._config.log_format))
        self._on_started(ProcessRole.STREAM_STORE, 0, incarnation, process, to_connect)

    def _start_engine(self) -> None:
        # The listening socket for decode instances is ours for life, so that a new engine keeps the old one's address.
        fd = self._handoff.fileno() if self._handoff is not None else -1
        incarnation = new_incarnation(ProcessRole.ENGINE.value)
        to_bind, to_connect = make_private_address(incarnation)
        config = derive_config(
            self._config,
            EngineConfig,
            prefill_peers=self._pd.prefill_peers,
            kv_checksums=self._pd.kv_checksums,
            num_draft_tokens=num_draft_tokens_of(self._config.speculative),
        )
        process = spawn(ProcessRole.ENGINE, (fd,) if self._handoff is not None else ())
        process.send(StartEngine(incarnation, config, to_bind, fd, self._pd.cluster_key))
        self._on_started(ProcessRole.ENGINE, 0, incarnation, process, to_connect)

    def _start_worker(self) -> None:
        (engine,) = self._core.children_of(ProcessRole.ENGINE)
        incarnation = new_incarnation(ProcessRole.WORKER.value)
        to_bind, to_connect = self._kv_addresses(engine.incarnation, incarnation)
        with worker_wire.open_worker_wire(self._config, self._model, engine.incarnation, incarnation) as wire:
            process = spawn(ProcessRole.WORKER, (*wire.worker_fds, *self._memory_fds()))
            self._announce_worker(engine, incarnation, wire, to_bind)
            start = self._worker_start_message(incarnation)
            process.send(
                msgspec.structs.replace(
                    start, engine_incarnation=engine.incarnation, wire=wire.for_worker, kv_address=to_connect
                )
            )
        self._on_started(ProcessRole.WORKER, 0, incarnation, process)

    def _start_standby(self) -> None:
        if self._config.standby_worker == "auto" and (missing := self._memory_missing_for_standby()) > 0:
            if not self._lacks_standby_memory:
                logger.info(log.event("no standby worker, for lack of memory", missing_mib=missing >> 20))
            self._lacks_standby_memory = True
            self._core.schedule_standby(self._clock.now_s() + STANDBY_MEMORY_RETRY_S)
            return
        if not self._kv_memory.has_pool(self._core.kv_memory):
            self._core.schedule_standby(self._clock.now_s() + START_RETRY_S)  # the worker has not allocated it yet
            return
        self._lacks_standby_memory = False
        incarnation = new_incarnation(ProcessRole.WORKER.value)
        process = spawn(ProcessRole.STANDBY, self._memory_fds())
        process.send(self._worker_start_message(incarnation))
        self._on_started(ProcessRole.STANDBY, 0, incarnation, process)

    def _memory_missing_for_standby(self) -> int:
        """A standby has as much memory of its own as the worker: what they share, weights and KV, is there already."""
        pids = [self._processes[worker].process.pid for worker in self._core.children_of(ProcessRole.WORKER)]
        return sum(map(private_memory_bytes, pids)) + STANDBY_SPARE_BYTES - free_memory_bytes()

    def _activate_standby(self, standby: Child) -> None:
        (engine,) = self._core.children_of(ProcessRole.ENGINE)
        try:
            wire_ends = worker_wire.open_worker_wire(self._config, self._model, engine.incarnation, standby.incarnation)
            with wire_ends as wire:
                self._announce_worker(engine, standby.incarnation, wire, "")
                self._processes[standby].send(ActivateWorker(engine.incarnation, wire.for_worker), wire.worker_fds)
        except OSError as fault:
            logger.error(log.event("cannot activate the standby", why=fault, again_in_s=START_RETRY_S))
            self._core.on_start_failed(ProcessRole.WORKER, 0, self._clock.now_s())
            return
        logger.info(log.event("standby activated", pid=self._processes[standby].process.pid))
        self._core.on_activated(standby, self._clock.now_s())

    def _announce_worker(
        self, engine: Child, incarnation: str, wire: worker_wire.WorkerWireEnds, kv_address: str
    ) -> None:
        """To its engine, with what the engine has of the wire and of the memory."""
        kv_memory = self._core.kv_memory
        memory = self._kv_memory.fds_of(kv_memory)
        hashes_fds = (memory.hashes,) if memory is not None else ()
        starting = WorkerStarting(incarnation, wire.for_engine, kv_address, kv_memory)
        self._processes[engine].send(starting, (*wire.engine_fds, *hashes_fds))

    def _memory_fds(self) -> tuple[int, ...]:
        """What a worker inherits to attach memory that is kept."""
        memory, weights = self._kv_memory.fds_of(self._core.kv_memory), self._kv_memory.weights
        fds = (-1 if memory is None else memory.pool, -1 if weights is None else weights.fd)
        return tuple(fd for fd in fds if fd >= 0)

    def _worker_start_message(self, incarnation: str) -> StartWorker:
        """Without an engine and a wire to it."""
        config = derive_config(
            self._config,
            WorkerConfig,
            num_kv_blocks=self._num_kv_blocks,
            keeps_pool_size=self._num_kv_blocks != self._config.num_kv_blocks,
            kv_backend=self._pd.kv_backend,
            kv_host=self._pd.kv_host,
        )
        start = StartWorker(incarnation, "", config, self._model, None, cluster_key=self._pd.cluster_key)
        memory = self._kv_memory.fds_of(self._core.kv_memory)
        if memory is None:
            return start
        return msgspec.structs.replace(
            start,
            kv_memory=self._core.kv_memory,
            kv_memory_fd=memory.pool,
            kv_memory_bytes=self._kv_memory.num_pool_bytes,
            weights=self._kv_memory.weights,
        )

    def _kv_addresses(self, engine_incarnation: str, worker_incarnation: str) -> tuple[str, str]:
        """Where the two speak of KV transfers; empty where there are none."""
        if not self._pd.is_enabled:
            return "", ""
        return make_private_address(f"kv-{engine_incarnation}-{worker_incarnation}")

    def _start_api(self, index: int) -> None:
        start = self._api_start_message(new_incarnation(ProcessRole.API.value), index)
        process = spawn(ProcessRole.API, (start.listen_fd,))
        process.send(start)
        self._on_started(ProcessRole.API, index, start.incarnation, process)

    def _api_start_message(self, incarnation: str, index: int) -> StartApi:
        instance = {f.name: getattr(self._config, f.name) for f in fields(self._config) if f.name != "api_key"}
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
        return StartApi(incarnation, index, config, self._model, self._listening.fileno(), list(self._keys.entries))

    def _on_started(
        self, role: ProcessRole, index: int, incarnation: str, process: ChildProcess, address: str = ""
    ) -> None:
        actions = self._core.on_started(role, index, incarnation, address, self._clock.now_s())
        child = self._core.children[incarnation]
        self._processes[child] = process
        self._selector.register(process.channel.fileno(), selectors.EVENT_READ, child)
        self._selector.register(process.pidfd, selectors.EVENT_READ, child)
        logger.info(log.event("started", role=role.value, pid=process.process.pid, incarnation=incarnation))
        self._execute(actions)

    # Messages.

    def _read_messages(self, child: Child) -> None:
        try:
            while self._read_one(child):
                pass
        except ChannelClosed:
            self._stop_watching(self._processes[child].channel.fileno())  # its death follows, or is being reaped

    def _read_one(self, child: Child) -> bool:
        """False: there is none yet. A message that cannot be decoded is dropped. A child that sends no others counts as
        silent, and is killed for that."""
        try:
            message = self._processes[child].channel.receive()
        except msgspec.DecodeError as fault:
            self._messages_dropped.inc(child.role.value)
            logger.error(log.event("message dropped", role=child.role.value, fault=str(fault)))
            return True
        if message is not None:
            self._on_message(child, message)
        return message is not None

    def _on_message(self, child: Child, message: FromChild) -> None:
        match message:
            case StartupProgress():
                if not self._core.was_ready:
                    self._on_progress(message.message, message.fraction)
            case StartFailed():
                if not self._core.was_ready and child.role is not ProcessRole.STANDBY:
                    raise StartupError(message.message)
                logger.error(log.event("cannot start", role=child.role.value, why=message.message))
            case DeviceWeightsLoaded() | DeviceKvAllocated():
                self._take_device_memory(child, message)
            case ChildReady() if child.role is ProcessRole.STANDBY:
                memory = private_memory_bytes(self._processes[child].process.pid)
                logger.info(log.event("standby ready", incarnation=child.incarnation, memory_mib=memory >> 20))
            case MetricsSnapshot():
                families, unusable = usable(message.families)
                self._count_unusable(child.role, unusable)
                message = msgspec.structs.replace(message, families=families)
            case ChildReady(WorkerHello() as worker):
                self._num_kv_blocks = worker.num_blocks  # a restarted worker gets a pool of the same size
            case _:
                pass
        self._execute(self._core.on_message(child, message, self._clock.now_s()))
        if self._core.was_ready and not self._has_announced_readiness:
            assert self._core.engine_up is not None, "a ready instance has an engine"
            self._has_announced_readiness = True
            self._on_ready(self._core.engine_up.worker)

    def _take_device_memory(self, child: Child, message: DeviceWeightsLoaded | DeviceKvAllocated) -> None:
        fds = self._processes[child].channel.take_fds()
        if isinstance(message, DeviceWeightsLoaded):
            for fd in fds:
                self._kv_memory.take_weights(message, fd)
            return
        if not fds:
            # The engine relies on memory that is not kept, so that worker must not go on.
            self._execute(
                self._core.on_message(
                    child,
                    ReplaceWorker(child.incarnation, "its KV memory could not be taken over: too many open files"),
                    self._clock.now_s(),
                )
            )
            return
        self._kv_memory.take_kv(message, fds[0])
        if not message.has_standby_room and not self._core.was_ready and self._config.standby_worker != "off":
            level = logging.WARNING if self._config.standby_worker == "on" else logging.INFO
            logger.log(level, log.event("no standby worker: the KV pool leaves it no memory on the device"))
            self._core.give_up_standby()

    def _take_last_device_memory(self, child: Child) -> None:
        """Of a process that is dead. Its engine may have relied on memory of which we have not heard yet."""
        with contextlib.suppress(ChannelClosed, msgspec.DecodeError):
            while (message := self._processes[child].channel.receive()) is not None:
                if isinstance(message, DeviceWeightsLoaded | DeviceKvAllocated):
                    self._take_device_memory(child, message)

    def _count_unusable(self, role: ProcessRole, names: list[str]) -> None:
        """Logged once for each metric: snapshots come every second."""
        for name in names:
            self._metrics_unusable.inc(role.value)
            if (role, name) not in self._unusable_names:
                self._unusable_names.add((role, name))
                logger.error(log.event("metric left out, it is no finite number", role=role.value, metric=name))

    def _reload_keys(self) -> None:
        """A file that is broken changes nothing."""
        try:
            self._keys = self._key_source.read()
        except StartupError as fault:
            audit_log.log_failed_key_reload(fault.message)
            return
        for api in self._core.children_of(ProcessRole.API):
            self._processes[api].send(UpdateApiKeys(list(self._keys.entries)))
        audit_log.log_key_reload(len(self._keys))

    def _sample_usage(self) -> None:
        children = {child: (child.role.value, process.process.pid) for child, process in self._processes.items()}
        self._usage.sample({None: ("supervisor", os.getpid()), **children})

    def _live_view(self, query_id: int, engine: LiveEngine | None) -> LiveView:
        return LiveView(query_id, self._incarnation, self._process_views(), self._restarts_by_role(), engine)

    def _process_views(self) -> list[ProcessView]:
        supervisor_view = ProcessView("supervisor", os.getpid(), self._incarnation, "ready")
        children = sorted(self._processes.items(), key=lambda item: (item[0].role.value, item[0].index))
        views = [
            ProcessView(child.role.value, process.process.pid, child.incarnation, child.state.value)
            for child, process in children
        ]
        return [supervisor_view, *views]

    def _restarts_by_role(self) -> dict[str, int]:
        return {role.value: count for role, count in self._core.restarts.items()}

    def _instance_view(self, query_id: int) -> InstanceView:
        self._sample_usage()
        return InstanceView(
            query_id,
            self._incarnation,
            self._process_views(),
            self._restarts_by_role(),
            merge([self._core.snapshots.families(), self._metrics.snapshot()]),
            self._core.snapshots.engine_stats(),
            self._oom_kills_by_role(),
        )

    # Deaths.

    def _reap(self) -> None:
        for child in [c for c, process in self._processes.items() if process.process.poll() is not None]:
            if child not in self._processes:
                continue  # the death of its engine has removed it
            process = self._processes[child]
            self._read_messages(child)  # its last words, if any
            if child.role is ProcessRole.WORKER:
                for engine in self._core.children_of(ProcessRole.ENGINE):
                    self._read_messages(engine)  # it announces an isolated request before the worker runs it
            cause, oom = process.exit_cause(), self._oom_evidence(child)
            cause += f", {oom.value}" if oom is not None else ""
            if not self._core.was_ready and self._core.is_running and child.role is not ProcessRole.STANDBY:
                advice = "the lines above say why" if oom is None else "try a smaller --num-kv-blocks or --max-num-seqs"
                raise StartupError(f"the {child.role.value} process ended while starting ({cause}); {advice}")
            if self._core.is_running:
                logger.warning(log.event("died", role=child.role.value, pid=process.process.pid, cause=cause))
            self._close(child)
            if child.role in (ProcessRole.WORKER, ProcessRole.STANDBY):
                self._judge_weights(child, process.return_code)
            self._execute(self._core.on_exit(child, process.return_code, cause, self._clock.now_s()))

    def _judge_weights(self, worker: Child, return_code: int) -> None:
        """Weights that a worker could not start with may be the cause; the next one loads them. A worker that has served
        leaves them to its successor, which compares their checksum."""
        if worker.state is ChildState.STARTING and return_code not in (0, -signal.SIGKILL):
            self._kv_memory.drop_weights()

    def _oom_evidence(self, child: Child) -> OomEvidence | None:
        evidence = self._oom_watch.explain_kill() if self._processes[child].killed_externally else None
        if evidence is not None:
            self._oom_kills.inc(child.role.value, evidence.name.lower())
        return evidence

    def _oom_kills_by_role(self) -> dict[str, int]:
        kinds = [evidence.name.lower() for evidence in OomEvidence]
        return {role.value: int(sum(self._oom_kills.value(role.value, kind) for kind in kinds)) for role in ProcessRole}

    def _close(self, child: Child) -> None:
        process = self._processes.pop(child)
        self._stop_watching(process.channel.fileno())
        self._stop_watching(process.pidfd)
        process.close()

    def _stop_watching(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _clean_up(self) -> None:
        for child in list(self._processes):
            self._processes[child].kill()
            self._close(child)
        self._kv_memory.close()
        self._selector.close()
