"""One instance of a simulation: the shipping `SupervisorCore`, and the simulated processes that it starts and kills."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from onward.api.requests.text_processor import TextProcessor
from onward.config import ApiConfig, EngineConfig
from onward.engine.core import EngineCore
from onward.engine.scheduling.persisted_block_hashes import PersistedBlockHashes, table_bytes
from onward.grammar.lazy import LazyGrammarCompiler
from onward.proto.api_key_entry import ApiKeyEntry
from onward.proto.control import (
    ChildReady,
    FromChild,
    InstanceView,
    ProcessView,
    StartApi,
    StartEngine,
    StopChild,
    ToChild,
    WorkerStarting,
)
from onward.proto.model import PreparedModel
from onward.proto.step import StepPlan
from onward.proto.worker_wire_address import ZmqWireAddress
from onward.sim.engine_wires import SimAddresses
from onward.sim.hash_worker import DelayedMaskMaker, HashDraftProposer, HashWorker, KvCells, new_memory
from onward.sim.http import SimHttpNetwork, SimListener, url_of
from onward.sim.kv_transfer import SimKvNetwork, SimKvTransfer
from onward.sim.nodes import ApiNode, EngineNode, StreamStoreNode, WorkerNode
from onward.sim.process import SimProcess
from onward.sim.scenario import SimInstanceSpec
from onward.sim.vocabulary import DOOM_ID, ENGINE_POISON_ID, NUM_SAMPLED_IDS, POISON_ID, grammars, token_bytes
from onward.supervisor.children import Child, ProcessRole
from onward.supervisor.core import (
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
from onward.supervisor.worker_deaths import KillReason

ACTIVATION_S = 0.02
"""From the activation of a standby worker to its hello."""
REAP_DELAY_S = 0.02
"""From a child's death until its supervisor has reaped it."""
RESPONSE_TTL_S = 20.0
"""So short that a run can wait for it."""
STALL_TIMEOUT_S = 4.0
TICK_RESOLUTION_S = 0.001
"""Shortest wait for a tick. A process's clock may run fast or slow, so by rounding a tick may come a moment early."""
DRAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class SimEnvironment:
    """What all instances of a run share."""

    http: SimHttpNetwork
    addresses: SimAddresses
    kv_network: SimKvNetwork
    model: PreparedModel
    prompts: TextProcessor
    routers: tuple[str, ...]
    prefill_peers: tuple[str, ...]
    keys: tuple[ApiKeyEntry, ...]
    cluster_key: str
    after_turn: Callable[["SimInstance"], None]
    """Called after each turn of the instance's engine."""
    watch_write: Callable[["SimInstance", int, str, int], None]
    """Called for each block that a worker writes, with the request id and the slot epoch."""
    watch_plan: Callable[["SimInstance", StepPlan], None]


SimNode = EngineNode | WorkerNode | StreamStoreNode | ApiNode


@dataclass(slots=True)
class InstanceLifetime:
    """One incarnation of an instance. All of it can be killed, and another one started in its place."""

    incarnation: str
    supervisor: SimProcess
    core: SupervisorCore
    nodes: dict[str, SimNode] = field(default_factory=dict)
    """Processes that the supervisor has started and not reaped, by incarnation."""
    next_tick: asyncio.TimerHandle | None = None
    was_killed: bool = False
    kv_memory: str = ""
    """Name of the KV memory for the supervisor's workers. The next two fields are its content."""
    kv_cells: KvCells = field(default_factory=list)
    block_hash_rows: bytearray = field(default_factory=bytearray)

    @property
    def is_leaving(self) -> bool:
        return self.was_killed or not self.core.is_running

    @property
    def engine(self) -> EngineNode | None:
        return next((node for node in self.nodes.values() if isinstance(node, EngineNode)), None)

    @property
    def worker(self) -> WorkerNode | None:
        workers = (node for node in self.nodes.values() if isinstance(node, WorkerNode))
        return next((node for node in workers if not node.is_standby), None)

    @property
    def standby(self) -> WorkerNode | None:
        workers = (node for node in self.nodes.values() if isinstance(node, WorkerNode))
        return next((node for node in workers if node.is_standby), None)

    @property
    def stream_store(self) -> StreamStoreNode | None:
        return next((node for node in self.nodes.values() if isinstance(node, StreamStoreNode)), None)

    @property
    def apis(self) -> dict[int, ApiNode]:
        return {node.index: node for node in self.nodes.values() if isinstance(node, ApiNode)}


class SimInstance:
    def __init__(self, environment: SimEnvironment, spec: SimInstanceSpec) -> None:
        self.environment, self.spec = environment, spec
        self.url = url_of(spec.name)
        self.handoff_address = f"tcp://{spec.name}:7000" if spec.role != "decode" else ""
        self._context = environment.http.context
        self._wall_offset_s = 0.0
        self._serials = itertools.count(1)
        self._stream_store_serials = itertools.count(1)
        """Counted separately, so that the names of all other processes, and the random numbers that depend on the
        names, do not depend on the stream store."""
        self._listener: SimListener = environment.http.listen(self.url, spec.name, waits=True)
        self.lifetime = self._begin()

    # Starts.

    def _begin(self) -> InstanceLifetime:
        serial = next(self._serials)
        supervisor = self._process("supervisor", serial)
        settings = SupervisorSettings(
            self.spec.num_api_processes,
            STALL_TIMEOUT_S,
            DRAIN_S,
            serves_handoffs=self._serves_handoffs,
            owns_kv_memory=self.spec.owns_kv_memory,
            has_standby=self.spec.has_standby,
        )
        core = SupervisorCore(settings, supervisor.now_s())
        self.lifetime = InstanceLifetime(f"instance-{self.spec.name}-{serial}", supervisor, core)
        self._listener = self.environment.http.listen(self.url, self.spec.name, waits=True)
        self._execute(self.lifetime, core.start())
        return self.lifetime

    @property
    def _serves_handoffs(self) -> bool:
        return bool(self.handoff_address) and self.spec.role != "mixed"

    def _execute(self, lifetime: InstanceLifetime, actions: Iterable[SupervisorAction]) -> None:
        for action in actions:
            match action:
                case StartProcess(ProcessRole.API, index):
                    lifetime.supervisor.call_later(self.spec.restart_s, self._start_api, lifetime, index)
                case ActivateStandby(child):
                    self._activate_standby(lifetime, child)
                case StartProcess(role):
                    start = {
                        ProcessRole.STREAM_STORE: self._start_stream_store,
                        ProcessRole.ENGINE: self._start_engine,
                        ProcessRole.WORKER: self._start_worker,
                        ProcessRole.STANDBY: self._start_standby,
                    }
                    start[role](lifetime)
                case KillProcess(child, cause):
                    self._kill(lifetime.nodes[child.incarnation].process, cause)
                case RemoveProcess(child):
                    node = lifetime.nodes.pop(child.incarnation)
                    node.process.kill()
                    lifetime.core.on_removed(child, node.process.return_code, peer_may_write=self._peer_may_write(node))
                case SendMessage(child, message):
                    self._send(lifetime.nodes[child.incarnation], message)
                case AnswerQuery(child, query_id):
                    self._send(lifetime.nodes[child.incarnation], self._instance_view(lifetime, query_id))
                case AnswerLiveQuery() | KillInstance():
                    raise AssertionError("no simulated client watches")
        self._schedule_tick(lifetime)

    def _send(self, node: SimNode, message: ToChild) -> None:
        if not isinstance(node, WorkerNode):
            node.channel.send_to_child(message)
        elif isinstance(message, StopChild):
            node.process.kill()  # it has no wire to its supervisor, and nothing to complete

    def _schedule_tick(self, lifetime: InstanceLifetime) -> None:
        if lifetime.next_tick is not None:
            lifetime.next_tick.cancel()
        if lifetime.core.is_stopped:
            self.kill()
            return
        wait_s = max(TICK_RESOLUTION_S, lifetime.core.next_tick_s() - lifetime.supervisor.now_s())
        lifetime.next_tick = lifetime.supervisor.call_later(wait_s, self._tick, lifetime)

    def _tick(self, lifetime: InstanceLifetime) -> None:
        self._execute(lifetime, lifetime.core.tick(lifetime.supervisor.now_s()))

    def _on_started(
        self, lifetime: InstanceLifetime, role: ProcessRole, index: int, node: SimNode, address: str = ""
    ) -> None:
        lifetime.nodes[node.incarnation] = node
        node.process.on_death.append(lambda: self._on_death(lifetime, node))
        self._execute(
            lifetime, lifetime.core.on_started(role, index, node.incarnation, address, lifetime.supervisor.now_s())
        )

    def _process(self, role: str, serial: int) -> SimProcess:
        process = SimProcess(self._context.loop, f"{self.spec.name}/{role}.{serial}", self.spec.clock_rate)
        process.wall_offset_s = self._wall_offset_s
        return process

    def _start_stream_store(self, lifetime: InstanceLifetime) -> None:
        process = self._process("shelf", next(self._stream_store_serials))
        node = StreamStoreNode(
            self._context,
            process,
            lifetime.supervisor,
            lambda message: self._on_message(lifetime, node.incarnation, message),
        )
        self.environment.addresses.stream_stores[node.incarnation] = node.port
        self._on_started(lifetime, ProcessRole.STREAM_STORE, 0, node, node.incarnation)

    def _start_engine(self, lifetime: InstanceLifetime) -> None:
        spec, serial = self.spec, next(self._serials)
        process = self._process("engine", serial)
        config = EngineConfig(
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_queue=spec.max_queue,
            prefix_caching=spec.prefix_caching,
            output_caching=spec.output_caching,
            role=spec.role,  # pyright: ignore[reportArgumentType]
            prefill_peers=self.environment.prefill_peers if spec.role == "decode" else (),
            local_prefill_tokens=spec.local_prefill_tokens,
            lease_s=2.0,
            handoff_timeout_s=10.0,
            log_interval_s=0.0,
            num_draft_tokens=spec.num_drafts,
        )
        address = f"apis of {process.name}"
        start = StartEngine(f"engine-{process.name}", config, address, 0 if self._serves_handoffs else -1)
        engine = EngineNode(
            self._context,
            self.environment.addresses,
            process,
            lifetime.supervisor,
            start,
            lambda message: self._on_message(lifetime, start.incarnation, message),
            self.handoff_address,
            lambda _: self.environment.after_turn(self),
            lambda plan: self._watch_plan(engine, plan),
            lambda _, num_blocks: PersistedBlockHashes(memoryview(lifetime.block_hash_rows), num_blocks),
        )
        self._on_started(lifetime, ProcessRole.ENGINE, 0, engine, address)

    def _watch_plan(self, engine: EngineNode, plan: StepPlan) -> None:
        self.environment.watch_plan(self, plan)
        if any(ENGINE_POISON_ID in assign.token_ids for assign in plan.assign):
            self._context.active_faults.trigger_counts["poison-engine"] += 1
            self._context.trace.note(f"{engine.process} does not survive step {plan.step}")
            self._context.loop.call_soon(engine.process.kill)

    def _start_worker(self, lifetime: InstanceLifetime) -> None:
        worker = self._new_worker(lifetime)
        worker.process.call_later(self.spec.restart_s, self._join_engine, lifetime, worker)
        self._announce_worker(lifetime, worker)
        self._on_started(lifetime, ProcessRole.WORKER, 0, worker)

    def _start_standby(self, lifetime: InstanceLifetime) -> None:
        worker = self._new_worker(lifetime)
        worker.is_standby = True
        ready = partial(self._on_message, lifetime, worker.incarnation, ChildReady())
        worker.process.call_later(self.spec.restart_s, lifetime.supervisor.call_soon, ready)
        self._on_started(lifetime, ProcessRole.STANDBY, 0, worker)

    def _activate_standby(self, lifetime: InstanceLifetime, child: Child) -> None:
        worker = lifetime.nodes[child.incarnation]
        assert isinstance(worker, WorkerNode), "a standby is a worker"
        worker.is_standby = False
        self._announce_worker(lifetime, worker)
        worker.process.call_later(ACTIVATION_S, self._join_engine, lifetime, worker)
        lifetime.core.on_activated(child, lifetime.supervisor.now_s())

    def _announce_worker(self, lifetime: InstanceLifetime, worker: WorkerNode) -> None:
        engine = lifetime.engine
        assert engine is not None, "a worker is started for an engine"
        worker.engine_incarnation = engine.incarnation
        address = ZmqWireAddress(worker.incarnation)
        engine.channel.send_to_child(
            WorkerStarting(worker.incarnation, address, self._kv_address(worker), lifetime.core.kv_memory)
        )

    def _kv_address(self, worker: WorkerNode) -> str:
        return f"kv of {worker.process.name}" if worker.kv_transfer is not None else ""

    def _new_worker(self, lifetime: InstanceLifetime) -> WorkerNode:
        process = self._process("worker", next(self._serials))
        incarnation = f"worker-{process.name}"
        has_kv_transfer = self.spec.role != "mixed"
        kv_transfer = SimKvTransfer(incarnation) if has_kv_transfer else None
        kv_memory = lifetime.core.kv_memory
        if not kv_memory or kv_memory != lifetime.kv_memory:
            lifetime.kv_memory, lifetime.kv_cells = kv_memory, new_memory(self.spec.num_blocks, self.spec.block_size)
            lifetime.block_hash_rows = bytearray(table_bytes(self.spec.num_blocks))
        hash_worker = HashWorker(
            self.spec.num_blocks,
            self.spec.block_size,
            vocab_size=NUM_SAMPLED_IDS,
            num_token_ids=len(token_bytes()),
            kv_transfer=kv_transfer,
            poison=POISON_ID,
            doom=DOOM_ID,
            watch_write=lambda block, request, epoch: self.environment.watch_write(self, block, request, epoch),
            grammars=LazyGrammarCompiler(grammars),
            masks=DelayedMaskMaker(self._context.random.substream(f"{process} masks")),
            drafts=HashDraftProposer(self._context.random.substream(f"{process} drafts").bits(30))
            if self.spec.num_drafts
            else None,
            memory=lifetime.kv_cells,
            kv_memory=kv_memory,
            model=self.spec.model,
        )
        if kv_transfer is not None:
            kv_transfer.memory = hash_worker.memory
        kv_network = self.environment.kv_network if has_kv_transfer else None
        return WorkerNode(self._context, process, self.spec, hash_worker, incarnation, kv_network)

    def _join_engine(self, lifetime: InstanceLifetime, worker: WorkerNode) -> None:
        """Connects a ready worker once its engine listens; the worker then sends its hello."""
        addresses, kv_address = self.environment.addresses, self._kv_address(worker)
        port, kv_port = addresses.workers.get(worker.incarnation), addresses.kv.get(kv_address)
        if port is None or (kv_address and kv_port is None):
            worker.process.call_later(0.1, self._join_engine, lifetime, worker)
        else:
            worker.join(port, kv_port)

    def _start_api(self, lifetime: InstanceLifetime, index: int) -> None:
        if lifetime.is_leaving:
            return
        process = self._process(f"api{index}", next(self._serials))
        config = ApiConfig(
            role=self.spec.role,  # pyright: ignore[reportArgumentType]
            routers=self.environment.routers,
            url=self.url,
            handoff_address=self.handoff_address if self.spec.role != "mixed" else "",
            cluster_key=self.environment.cluster_key,
            response_ttl_s=RESPONSE_TTL_S,
        )
        model = msgspec.structs.replace(
            self.environment.model, name=self.spec.model, fingerprint=self.spec.model, aliases=tuple(self.spec.aliases)
        )
        start = StartApi(f"api-{process.name}", index, config, model, -1, keys=list(self.environment.keys))
        api = ApiNode(
            self.environment.http,
            self.environment.addresses,
            process,
            lifetime.supervisor,
            start,
            self.environment.prompts,
            self._listener,
            lambda message: self._on_message(lifetime, start.incarnation, message),
        )
        self._on_started(lifetime, ProcessRole.API, index, api)

    # Messages.

    def _on_message(self, lifetime: InstanceLifetime, incarnation: str, message: FromChild) -> None:
        child = lifetime.core.children.get(incarnation)
        if child is not None:
            self._execute(lifetime, lifetime.core.on_message(child, message, lifetime.supervisor.now_s()))

    def _instance_view(self, lifetime: InstanceLifetime, query_id: int) -> InstanceView:
        supervisor_view = ProcessView("supervisor", 1, lifetime.incarnation, "ready")
        return InstanceView(
            query_id, lifetime.incarnation, [supervisor_view], {}, [], lifetime.core.snapshots.engine_stats()
        )

    # Deaths.

    def _on_death(self, lifetime: InstanceLifetime, node: SimNode) -> None:
        self._context.trace.note(f"{node.process} dies")
        if not lifetime.supervisor.is_dead:
            lifetime.supervisor.call_later(REAP_DELAY_S, self._reap, lifetime, node)

    def _reap(self, lifetime: InstanceLifetime, node: SimNode) -> None:
        child = lifetime.core.children.get(node.incarnation)
        if child is not None and not lifetime.was_killed:
            lifetime.nodes.pop(node.incarnation)
            actions = lifetime.core.on_exit(
                child,
                node.process.return_code,
                "killed",
                lifetime.supervisor.now_s(),
                peer_may_write=self._peer_may_write(node),
            )
            self._execute(lifetime, actions)

    def _peer_may_write(self, node: SimNode) -> bool:
        """Returns whether a peer may still write the KV memory of a dead worker. It replaces the writer token of
        `supervisor.peer_writer_watch`."""
        if not isinstance(node, WorkerNode) or node.kv_transfer is None:
            return False
        return self.environment.kv_network.may_be_written(node.kv_transfer.address)

    def _kill(self, process: SimProcess, cause: str) -> None:
        self._context.trace.note(f"{process} is killed: {cause}")
        self._context.active_faults.num_killed_for_silence += cause == KillReason.SILENCE.value
        process.kill()

    # From outside.

    @property
    def engine_core(self) -> EngineCore | None:
        """None while there is no engine, or while no worker has sent it a hello."""
        engine = self.lifetime.engine
        return None if engine is None else engine.core

    @property
    def is_up(self) -> bool:
        """Returns whether the instance runs, and is neither killed nor shut down."""
        return not self.lifetime.is_leaving

    def processes(self, role: str) -> list[SimProcess]:
        """Returns the living processes of a role (`worker`, `standby`, `engine`, `shelf`, `api`), or all processes for
        `instance`."""
        lifetime = self.lifetime
        by_role = {
            "worker": [lifetime.worker] if lifetime.worker else [],
            "standby": [lifetime.standby] if lifetime.standby else [],
            "engine": [lifetime.engine] if lifetime.engine else [],
            "shelf": [lifetime.stream_store] if lifetime.stream_store else [],
            "api": list(lifetime.apis.values()),
        }
        if role == "instance":
            found = [lifetime.supervisor, *(node.process for nodes in by_role.values() for node in nodes)]
        else:
            found = [node.process for node in by_role[role]]
        return [process for process in found if not process.is_dead]

    def set_clock(self, offset_s: float) -> None:
        """Sets the wall clock of all processes of the instance, including later ones."""
        self._wall_offset_s = offset_s
        for process in self.processes("instance"):
            process.wall_offset_s = offset_s

    def kill(self) -> None:
        """Kills all processes at once, without a shutdown."""
        self.lifetime.was_killed = True
        self._listener.close_socket()
        for process in self.processes("instance"):
            process.kill()

    def start_again(self) -> None:
        if self.lifetime.supervisor.is_dead:
            self._begin()

    def shut_down(self) -> None:
        """Shuts the instance down, as SIGTERM does."""
        lifetime = self.lifetime
        if not lifetime.is_leaving:
            self._execute(lifetime, lifetime.core.stop(lifetime.supervisor.now_s()))
