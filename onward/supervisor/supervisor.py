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
from onward.obs.metrics import merge, usable
from onward.proto.adoption import MemoryOffer
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
    StartListening,
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
from onward.supervisor import takeover, worker_wire
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
from onward.supervisor.kv_memory_owner import KvMemoryFds, KvMemoryOwner, can_keep_kv_memory
from onward.supervisor.memory_format import is_length_unknown, memory_format
from onward.supervisor.oom import OomEvidence, OomWatch
from onward.supervisor.pd_config import PdConfig
from onward.supervisor.predecessor import Predecessor, Release
from onward.supervisor.registration_config import RegistrationConfig
from onward.supervisor.stopped_processes import StoppedProcesses
from onward.supervisor.successor import Offer, SuccessorEvent, SuccessorListener
from onward.supervisor.supervisor_metrics import SupervisorMetrics
from onward.supervisor.worker_start import spawn_worker
from onward.transport.control_channel import ChannelClosed
from onward.transport.curve import make_private_address
from onward.web.auth import audit_log
from onward.web.auth.api_key_file import ApiKeySource
from onward.worker.kv_memory_budget import free_memory_bytes

logger = logging.getLogger(__name__)

POLL_S = 0.1
STANDBY_MEMORY_RETRY_S = 60.0
STANDBY_SPARE_BYTES = 1 << 30
"""Memory that must be free beside that of a standby worker. Checked only with `--standby-worker auto`."""


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
        predecessor: Predecessor | None = None,
    ) -> None:
        """`predecessor`: the old server that this one replaces once it is ready."""
        self._config, self._model, self._listening, self._clock = config, model, listening, clock
        self._pd, self._routers, self._handoff = pd, routers, handoff
        self._on_progress, self._on_ready = on_progress, on_ready
        self._key_source = key_source or ApiKeySource()
        self._keys = self._key_source.read()
        self._reload_pending = False
        self._incarnation = new_incarnation(config.instance_name)
        owns_kv_memory = can_keep_kv_memory(config)
        self._predecessor = predecessor
        adopted = takeover.adoptable_memory(predecessor, config, model) if owns_kv_memory else None
        self._successor = SuccessorListener(config.host, listening.getsockname()[1], self._make_offer)
        self._num_kv_blocks = config.num_kv_blocks
        settings = SupervisorSettings(
            config.api_processes,
            config.stall_timeout_s,
            config.drain_s,
            serves_handoffs=handoff is not None,
            allows_kills=config.demo,
            owns_kv_memory=owns_kv_memory,
            has_standby=owns_kv_memory and config.standby_worker != "off",
            awaits_release=adopted is not None or takeover.needs_port_of_predecessor(predecessor, config, pd),
        )
        self._kv_memory = KvMemoryOwner(config.device)
        self._core = SupervisorCore(settings, clock.now_s())
        self._adopts_memory = adopted is not None
        if adopted is not None:
            fds = KvMemoryFds(adopted.pool_fd, adopted.hashes_fd)
            self._kv_memory.adopt(self._core.kv_memory, fds, adopted.offer.num_pool_bytes, adopted.weights)
            self._num_kv_blocks = adopted.offer.format.num_kv_blocks
        self._selector = selectors.DefaultSelector()
        self._processes: dict[Child, ChildProcess] = {}
        self._oom_watch = oom_watch or OomWatch()
        self._next_oom_sample_s = 0.0
        self._metrics = SupervisorMetrics(
            num_ranks=config.tensor_parallel,
            count_ranks=self._count_worker_ranks,
            restarts=lambda: self._core.restarts,
        )
        self._stopped = StoppedProcesses(min(config.stopped_timeout_s, config.stall_timeout_s))
        self._lacks_standby_memory = False
        if config.standby_worker == "on" and not owns_kv_memory:
            logger.warning("--standby-worker on: there is none with an EAGLE layer")
        self._has_announced_readiness = False
        self._is_released = predecessor is None
        """Whether no old server serves at this address any more."""
        self._has_withdrawn = False
        """Whether this new server was stopped before it served."""
        self._num_stop_signals = self._num_handled_signals = 0

    def run(self) -> None:
        """Serves until a stop signal, or until a new server has taken over. Raises `StartupError` if the instance never
        gets ready."""
        wakeup_read, wakeup_write = socket.socketpair()
        with wakeup_read, wakeup_write:
            self._catch_signals(wakeup_write)
            wakeup_read.setblocking(False)
            self._selector.register(wakeup_read, selectors.EVENT_READ, None)
            if self._predecessor is None:
                self._successor.open()
            else:
                self._selector.register(self._predecessor, selectors.EVENT_READ, None)
            try:
                self._execute(self._core.start())
                while not self._core.is_stopped and not self._has_withdrawn:
                    self._run_once(wakeup_read)
                    if self._core.is_stopped and self._core.is_replaced:
                        self._hand_over()
            finally:
                self._clean_up()

    # A new server that takes over, or an old one that is taken over.

    def _make_offer(self) -> Offer:
        sockets = [self._listening, self._handoff] if self._handoff is not None else [self._listening]
        memory = (
            self._kv_memory.fds_of(self._core.kv_memory) if self._kv_memory.has_pool(self._core.kv_memory) else None
        )
        socket_fds = tuple(sock.fileno() for sock in sockets)
        worker = None if self._core.engine_up is None else self._core.engine_up.worker
        if memory is None or worker is None or is_length_unknown(self._config, self._model):
            return Offer(socket_fds, None)
        weights = self._kv_memory.weights
        offer = MemoryOffer(
            self._core.kv_memory,
            memory_format(self._config, self._model, worker.num_blocks),
            self._kv_memory.num_pool_bytes,
            weights,
        )
        weights_fds = () if weights is None else (weights.fd,)
        return Offer(socket_fds, offer, (memory.pool, memory.hashes, *weights_fds))

    def _tend_successor(self) -> None:
        match self._successor.poll():
            case SuccessorEvent.TAKE_OVER if not self._core.is_stopped:
                logger.info(log.event("handing over to a new server"))
                self._execute(self._core.stop_for_successor(self._clock.now_s()))
            case SuccessorEvent.GONE_MEMORY_SUSPECT:
                self._execute(self._core.give_up_memory("the standby worker of a new server died"))
            case _:
                pass

    def _hand_over(self) -> None:
        """Releases the memory to the new server, after every child was asked to stop. If the new server dies before it
        serves, this one starts again."""
        stuck = list(self._processes)
        for child in stuck:
            self._processes[child].kill()
            self._close(child)
        kv_memory = "" if any(child.role is not ProcessRole.API for child in stuck) else self._core.kv_memory
        is_released = self._successor.release(kv_memory)
        if is_released and self._successor.await_serving():
            logger.info(log.event("handed over to a new server", keeps_memory=bool(kv_memory)))
            return
        if self._num_stop_signals:
            logger.error(log.event("the new server has failed, and this one was told to stop"))
            return
        logger.error(log.event("the new server has failed, starting again", keeps_memory=not is_released))
        self._successor.open()
        self._execute(self._core.start_again(self._clock.now_s(), keeps_memory=not is_released and bool(kv_memory)))

    def _tend_predecessor(self, predecessor: Predecessor) -> None:
        """Asks the old server to hand over once this server is prepared. The old server serves until then."""
        now_s = self._clock.now_s()
        if self._core.is_prepared and not predecessor.is_takeover_requested:
            predecessor.take_over(now_s)
        if self._is_released or (release := predecessor.released(now_s)) is None:
            return
        self._is_released = True
        self._stop_watching(predecessor.fileno())  # at its end it would be readable for ever
        logger.info(log.event("old server has ended", release=release.value))
        for engine in self._core.children_of(ProcessRole.ENGINE):
            self._processes[engine].send(StartListening())
        if self._core.awaits_release:
            keeps_memory = release is Release.WITH_MEMORY or not self._adopts_memory
            self._execute(self._core.begin_serving(keeps_memory=keeps_memory))
        self._announce_readiness()

    def _withdraw(self, predecessor: Predecessor) -> None:
        """Ends this new server, which was told to stop before it served. The old server goes on, or starts again."""
        logger.info(log.event("stopped before the takeover", old_server_serves=not self._is_released))
        predecessor.abort(is_memory_suspect=self._end_processes())
        self._has_withdrawn = True

    def _catch_signals(self, wakeup: socket.socket) -> None:
        wakeup.setblocking(False)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

        # Without a key file there is nothing to reload, and SIGHUP keeps its default action: it ends the supervisor.
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
        self._tend_successor()
        if self._predecessor is not None:
            if self._num_stop_signals:
                self._withdraw(self._predecessor)
                return
            self._tend_predecessor(self._predecessor)
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
            self._replace_stopped(now_s)
        self._execute(self._core.tick(now_s))

    def _replace_stopped(self, now_s: float) -> None:
        """Replaces processes that a signal has stopped for too long. A stopped process computes and sends nothing until it
        is continued."""
        stopped_keys = self._metrics.usage.stopped()
        stopped = [
            child
            for child, process in self._processes.items()
            if any((child, rank) in stopped_keys for rank in process.pids())
        ]
        self._stopped.record(stopped, now_s)
        overdue = set(self._stopped.overdue(now_s))
        self._execute(self._core.replace_stopped([child for child in self._processes if child in overdue]))

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
                    self._remove(child)
                case SendMessage(child, message):
                    self._processes[child].send(message)
                case AnswerQuery(child, query_id):
                    self._processes[child].send(self._instance_view(query_id))
                case KillInstance():
                    self._kill_instance()
                case AnswerLiveQuery(child, query_id, engine):
                    self._processes[child].send(self._live_view(query_id, engine))

    def _remove(self, child: Child) -> None:
        process = self._processes[child]
        process.kill()
        self._take_last_device_memory(child)
        peer_may_write = process.peer_may_write()
        self._close(child)
        # The engine may have relied on a pool whose descriptor did not arrive here. Nothing of it may be adopted then.
        lacks_pool = self._config.device == "cuda" and not self._kv_memory.has_pool(child.kv_memory)
        return_code = 1 if lacks_pool else process.return_code
        self._core.on_removed(child, return_code, peer_may_write=peer_may_write)

    def _kill_instance(self) -> None:
        """Kills all processes at once, the supervisor included, like a loss of power."""
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
            is_required = role is not ProcessRole.STANDBY or self._core.awaits_release
            if not self._core.was_ready and is_required:
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
        # The supervisor keeps the listening socket for decode instances, so that a new engine has the same address.
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
        # Two engines that listen on one socket would each get some of its connections.
        awaits_turn = not self._is_released
        process.send(StartEngine(incarnation, config, to_bind, fd, awaits_turn, self._pd.cluster_key))
        self._on_started(ProcessRole.ENGINE, 0, incarnation, process, to_connect)

    def _start_worker(self) -> None:
        (engine,) = self._core.children_of(ProcessRole.ENGINE)
        incarnation = new_incarnation(ProcessRole.WORKER.value)
        to_bind, to_connect = self._kv_addresses(engine.incarnation, incarnation)
        with worker_wire.open_worker_wire(self._config, self._model, engine.incarnation, incarnation) as wire:
            start = msgspec.structs.replace(
                self._worker_start_message(incarnation),
                engine_incarnation=engine.incarnation,
                wire=wire.for_worker,
                kv_address=to_connect,
            )
            process = spawn_worker(ProcessRole.WORKER, start, (*wire.worker_fds, *self._memory_fds()), self._pd)
            try:
                self._announce_worker(engine, incarnation, wire, to_bind)
            except OSError:
                process.discard()
                raise
        self._on_started(ProcessRole.WORKER, 0, incarnation, process)

    def _start_standby(self) -> None:
        is_required = self._core.awaits_release
        is_optional = self._config.standby_worker == "auto" and not is_required
        if is_optional and (missing := self._memory_missing_for_standby()) > 0:
            if not self._lacks_standby_memory:
                logger.info(log.event("no standby worker, for lack of memory", missing_mib=missing >> 20))
            self._lacks_standby_memory = True
            self._core.schedule_standby(self._clock.now_s() + STANDBY_MEMORY_RETRY_S)
            return
        if not is_required and not self._kv_memory.has_pool(self._core.kv_memory):
            self._core.schedule_standby(self._clock.now_s() + START_RETRY_S)  # the worker has not allocated it yet
            return
        self._lacks_standby_memory = False
        incarnation = new_incarnation(ProcessRole.WORKER.value)
        start = self._worker_start_message(incarnation)
        process = spawn_worker(ProcessRole.STANDBY, start, self._memory_fds(), self._pd)
        self._on_started(ProcessRole.STANDBY, 0, incarnation, process)

    def _memory_missing_for_standby(self) -> int:
        """Returns how many bytes a standby lacks. It needs as much memory of its own as the worker; the weights and the KV
        memory that they share are allocated already."""
        workers = self._core.children_of(ProcessRole.WORKER)
        own_bytes = sum(self._processes[worker].own_memory_bytes() for worker in workers)
        return own_bytes + STANDBY_SPARE_BYTES - free_memory_bytes()

    def _activate_standby(self, standby: Child) -> None:
        (engine,) = self._core.children_of(ProcessRole.ENGINE)
        to_bind, to_connect = self._kv_addresses(engine.incarnation, standby.incarnation)
        try:
            wire_ends = worker_wire.open_worker_wire(self._config, self._model, engine.incarnation, standby.incarnation)
            with wire_ends as wire:
                self._announce_worker(engine, standby.incarnation, wire, to_bind)
                activation = ActivateWorker(engine.incarnation, wire.for_worker, to_connect)
                self._processes[standby].send(activation, wire.worker_fds)
        except OSError as fault:
            logger.error(log.event("cannot activate the standby", why=fault, again_in_s=START_RETRY_S))
            self._core.on_start_failed(ProcessRole.WORKER, 0, self._clock.now_s())
            return
        logger.info(log.event("standby activated", pid=self._processes[standby].process.pid))
        self._core.on_activated(standby, self._clock.now_s())

    def _announce_worker(
        self, engine: Child, incarnation: str, wire: worker_wire.WorkerWireEnds, kv_address: str
    ) -> None:
        """Announces a worker to its engine, with the engine's file descriptors of the wire and of the block hashes."""
        kv_memory = self._core.kv_memory
        memory = self._kv_memory.fds_of(kv_memory)
        hashes_fds = (memory.hashes,) if memory is not None else ()
        starting = WorkerStarting(incarnation, wire.for_engine, kv_address, kv_memory)
        self._processes[engine].send(starting, (*wire.engine_fds, *hashes_fds))

    def _memory_fds(self) -> tuple[int, ...]:
        """Returns the file descriptors that a worker inherits to attach kept memory."""
        memory, weights = self._kv_memory.fds_of(self._core.kv_memory), self._kv_memory.weights
        fds = (-1 if memory is None else memory.pool, -1 if weights is None else weights.fd)
        return tuple(fd for fd in fds if fd >= 0)

    def _worker_start_message(self, incarnation: str) -> StartWorker:
        """Returns the start message of a worker, without its engine and the wire to it."""
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
        """Returns the two addresses of the KV wire (to bind, to connect); empty without KV transfers."""
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
        awaits_turn = not self._has_announced_readiness and self._predecessor is not None
        fd, keys = self._listening.fileno(), list(self._keys.entries)
        return StartApi(incarnation, index, config, self._model, fd, keys, awaits_turn)

    def _on_started(
        self, role: ProcessRole, index: int, incarnation: str, process: ChildProcess, address: str = ""
    ) -> None:
        actions = self._core.on_started(role, index, incarnation, address, self._clock.now_s())
        child = self._core.children[incarnation]
        self._processes[child] = process
        self._selector.register(process.channel.fileno(), selectors.EVENT_READ, child)
        for pidfd in process.pidfds():
            self._selector.register(pidfd, selectors.EVENT_READ, child)
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
        """Handles one message. Returns False if there is none yet. A message that cannot be decoded is dropped; a child
        that sends only such messages counts as silent and is killed."""
        try:
            message = self._processes[child].channel.receive()
        except msgspec.DecodeError as fault:
            self._metrics.messages_dropped.inc(child.role.value)
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
                memory = self._processes[child].own_memory_bytes()
                logger.info(log.event("standby ready", incarnation=child.incarnation, memory_mib=memory >> 20))
            case MetricsSnapshot():
                families, unusable = usable(message.families)
                self._metrics.count_unusable(child.role, unusable)
                message = msgspec.structs.replace(message, families=families)
            case ChildReady(WorkerHello() as worker):
                self._num_kv_blocks = worker.num_blocks  # a restarted worker gets a pool of the same size
            case _:
                pass
        self._execute(self._core.on_message(child, message, self._clock.now_s()))
        self._announce_readiness()

    def _announce_readiness(self) -> None:
        """Announces readiness once, when all processes are ready and no old server serves any more."""
        if self._has_announced_readiness or not self._core.was_ready or not self._is_released:
            return
        if self._core.engine_up is None:
            return  # it died before the old server ended; the next one announces itself
        if self._predecessor is not None and self._num_stop_signals:
            return  # the old server would exit, and this one too
        self._has_announced_readiness = True
        if self._predecessor is not None:
            if self._key_source.file is not None:
                self._reload_keys()  # the old server may have read the file after this one
            for api in self._core.children_of(ProcessRole.API):
                self._processes[api].send(StartListening())
            self._predecessor.send_serving()
            self._predecessor.close()
            self._predecessor = None
            self._successor.open()
        self._on_ready(self._core.engine_up.worker)

    def _take_device_memory(self, child: Child, message: DeviceWeightsLoaded | DeviceKvAllocated) -> None:
        fds = self._processes[child].channel.take_fds()
        if isinstance(message, DeviceWeightsLoaded):
            for fd in fds:
                self._kv_memory.take_weights(message, fd)
            return
        if not fds:
            # The engine relies on memory that is not kept, so this worker must not go on.
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
        """Takes the device memory in unread messages of a dead process. Its engine may have relied on this memory."""
        with contextlib.suppress(ChannelClosed, msgspec.DecodeError):
            while (message := self._processes[child].channel.receive()) is not None:
                if isinstance(message, DeviceWeightsLoaded | DeviceKvAllocated):
                    self._take_device_memory(child, message)

    def _reload_keys(self) -> None:
        """Reads the API keys again and sends them to all api processes. A broken file changes nothing."""
        try:
            self._keys = self._key_source.read()
        except StartupError as fault:
            audit_log.log_failed_key_reload(fault.message)
            return
        for api in self._core.children_of(ProcessRole.API):
            self._processes[api].send(UpdateApiKeys(list(self._keys.entries)))
        audit_log.log_key_reload(len(self._keys))

    def _sample_usage(self) -> None:
        children = {
            (child, rank): (_process_name(child, rank), pid)
            for child, process in self._processes.items()
            for rank, pid in process.pids().items()
        }
        self._metrics.usage.sample({None: ("supervisor", os.getpid()), **children})

    def _count_worker_ranks(self) -> int:
        return sum(len(self._processes[worker].pids()) for worker in self._core.children_of(ProcessRole.WORKER))

    def _live_view(self, query_id: int, engine: LiveEngine | None) -> LiveView:
        return LiveView(query_id, self._incarnation, self._process_views(), self._restarts_by_role(), engine)

    def _process_views(self) -> list[ProcessView]:
        supervisor_view = ProcessView("supervisor", os.getpid(), self._incarnation, "ready")
        children = sorted(self._processes.items(), key=lambda item: (item[0].role.value, item[0].index))
        views = [
            ProcessView(
                _process_name(child, rank), pid, child.incarnation, child.state.value, rank if process.ranks else None
            )
            for child, process in children
            for rank, pid in process.pids().items()
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
            self._metrics.oom_kills_by_role(),
        )

    # Deaths.

    def _reap(self) -> None:
        for child in [c for c, process in self._processes.items() if process.has_ended]:
            if child not in self._processes:
                continue  # the death of its engine has removed it
            process = self._processes[child]
            process.end()
            self._read_messages(child)  # the last messages that it sent
            if child.role is ProcessRole.WORKER:
                for engine in self._core.children_of(ProcessRole.ENGINE):
                    self._read_messages(engine)  # it announces an isolated request before the worker runs it
            cause, oom = process.exit_cause(), self._oom_evidence(child)
            peer_may_write = (self._core.is_running or self._core.is_replaced) and process.peer_may_write()
            cause += f", {oom.value}" if oom is not None else ""
            if self._core.awaits_release and child.role is ProcessRole.STANDBY:
                raise StartupError(f"the worker process ended while starting ({cause}); the old server goes on")
            if not self._core.was_ready and self._core.is_running and child.role is not ProcessRole.STANDBY:
                advice = "the lines above say why" if oom is None else "try a smaller --num-kv-blocks or --max-num-seqs"
                raise StartupError(f"the {child.role.value} process ended while starting ({cause}); {advice}")
            if self._core.is_running:
                if process.ranks and not process.killed_by_supervisor:
                    self._metrics.rank_deaths.inc(str(process.first_rank_to_end))
                logger.warning(log.event("died", role=child.role.value, pid=process.process.pid, cause=cause))
            self._close(child)
            if child.role in (ProcessRole.WORKER, ProcessRole.STANDBY):
                self._judge_weights(child, process.return_code)
            if peer_may_write:
                cause += ", and a peer may still write its KV memory"
            actions = self._core.on_exit(
                child, process.return_code, cause, self._clock.now_s(), peer_may_write=peer_may_write
            )
            self._execute(actions)

    def _judge_weights(self, worker: Child, return_code: int) -> None:
        """Drops the kept weights if a worker died of a fault while it started: they may be the cause, so the next worker
        loads them again. If the worker has served, they are kept, and the next worker compares their checksum."""
        if worker.state is ChildState.STARTING and return_code not in (0, -signal.SIGKILL):
            self._kv_memory.drop_weights()

    def _oom_evidence(self, child: Child) -> OomEvidence | None:
        evidence = self._oom_watch.explain_kill() if self._processes[child].killed_externally else None
        if evidence is not None:
            self._metrics.count_oom_kill(child.role, evidence)
        return evidence

    def _close(self, child: Child) -> None:
        process = self._processes.pop(child)
        self._stop_watching(process.channel.fileno())
        for pidfd in process.pidfds():
            self._stop_watching(pidfd)
        process.close()

    def _stop_watching(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _end_processes(self) -> bool:
        """Kills all processes. Returns whether a standby of this new server had died of a fault: it may have damaged the
        memory of the old server, which it had mapped."""
        is_memory_suspect = False
        for child in list(self._processes):
            process = self._processes[child]
            process.kill()
            if child.role is ProcessRole.STANDBY and process.return_code not in (0, -signal.SIGKILL):
                is_memory_suspect = self._adopts_memory
            self._close(child)
        return is_memory_suspect

    def _clean_up(self) -> None:
        is_memory_suspect = self._end_processes()
        if self._predecessor is not None and is_memory_suspect:
            self._predecessor.abort(is_memory_suspect=True)  # the end of the connection tells it the rest
        self._kv_memory.close()
        self._successor.close()
        self._selector.close()


def _process_name(child: Child, rank: int) -> str:
    """Returns the name of a process in metrics and in `/info`. Rank 0 is the worker that the engine knows."""
    return f"{child.role.value}_rank" if rank else child.role.value
