"""One instance of a simulation: the shipping `SupervisorCore`, and the simulated processes that it starts and kills."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from onward.api.requests.text_processor import TextProcessor
from onward.config import ApiConfig, EngineConfig
from onward.grammar.lazy import LazyGrammarCompiler
from onward.proto.api_key_entry import ApiKeyEntry
from onward.proto.control import (
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
from onward.sim.api_node import ApiNode
from onward.sim.delayed_masks import DelayedMaskMaker
from onward.sim.engine_node import EngineNode
from onward.sim.engine_wires import SimAddresses
from onward.sim.hash_drafts import HashDraftProposer
from onward.sim.hash_worker import HashWorker
from onward.sim.http import SimHttpNetwork, SimListener, url_of
from onward.sim.kv_transfer import SimKvNetwork, SimKvTransfer
from onward.sim.process import SimProcess
from onward.sim.scenario import SimInstanceSpec
from onward.sim.stream_store_node import StreamStoreNode
from onward.sim.vocabulary import DOOM_ID, ENGINE_POISON_ID, NUM_SAMPLED_IDS, POISON_ID, grammars, token_bytes
from onward.sim.worker_node import WorkerNode
from onward.supervisor.children import ProcessRole
from onward.supervisor.core import (
    SILENCE,
    AnswerQuery,
    KillProcess,
    RemoveProcess,
    SendMessage,
    StartProcess,
    SupervisorAction,
    SupervisorCore,
    SupervisorSettings,
)

REAP_DELAY_S = 0.02
"""From a child's death until its supervisor has reaped it."""
RESPONSE_TTL_S = 20.0
"""So short that a run can wait for it."""
STALL_TIMEOUT_S = 4.0
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
    """Looks at the instance's engine after each of its turns."""
    watch_write: Callable[["SimInstance", int, str, int], None]
    """Told of each block that a worker writes, for whom and under which epoch."""
    watch_plan: Callable[["SimInstance", StepPlan], None]


SimNode = EngineNode | WorkerNode | StreamStoreNode | ApiNode


@dataclass(slots=True)
class InstanceLifetime:
    """One life of the instance: all of it can be killed, and another one started in its place."""

    incarnation: str
    supervisor: SimProcess
    core: SupervisorCore
    nodes: dict[str, SimNode] = field(default_factory=dict)
    """By incarnation: processes that the supervisor has started and not reaped."""
    next_tick: asyncio.TimerHandle | None = None
    was_killed: bool = False

    @property
    def is_leaving(self) -> bool:
        return self.was_killed or not self.core.is_running

    @property
    def engine(self) -> EngineNode | None:
        return next((node for node in self.nodes.values() if isinstance(node, EngineNode)), None)

    @property
    def worker(self) -> WorkerNode | None:
        return next((node for node in self.nodes.values() if isinstance(node, WorkerNode)), None)

    @property
    def stream_store(self) -> StreamStoreNode | None:
        return next((node for node in self.nodes.values() if isinstance(node, StreamStoreNode)), None)

    @property
    def apis(self) -> dict[int, ApiNode]:
        return {node.index: node for node in self.nodes.values() if isinstance(node, ApiNode)}


class SimInstance:
    def __init__(self, place: SimEnvironment, machine: SimInstanceSpec) -> None:
        self.environment, self.spec = place, machine
        self.url = url_of(machine.name)
        self.handoff_address = f"tcp://{machine.name}:7000" if machine.role != "decode" else ""
        self._ground = place.http.ground
        self._wall_offset_s = 0.0
        self._numbers = itertools.count(1)
        self._shelf_numbers = itertools.count(1)
        """Apart, so that the names of all others, and so what befalls them, do not depend on it."""
        self._listener: SimListener = place.http.listen(self.url, machine.name, waits=True)
        self.lifetime = self._begin()

    # Starts.

    def _begin(self) -> InstanceLifetime:
        number = next(self._numbers)
        supervisor = self._process("supervisor", number)
        settings = SupervisorSettings(
            self.spec.num_api_processes, STALL_TIMEOUT_S, DRAIN_S, serves_handoffs=self._serves_handoffs
        )
        core = SupervisorCore(settings, supervisor.now_s())
        self.lifetime = InstanceLifetime(f"instance-{self.spec.name}-{number}", supervisor, core)
        self._listener = self.environment.http.listen(self.url, self.spec.name, waits=True)
        self._execute(self.lifetime, core.start())
        return self.lifetime

    @property
    def _serves_handoffs(self) -> bool:
        return bool(self.handoff_address) and self.spec.role != "mixed"

    def _execute(self, life: InstanceLifetime, actions: Iterable[SupervisorAction]) -> None:
        for action in actions:
            match action:
                case StartProcess(ProcessRole.API, index):
                    life.supervisor.call_later(self.spec.restart_s, self._start_api, life, index)
                case StartProcess(role):
                    start = {
                        ProcessRole.STREAM_STORE: self._start_stream_store,
                        ProcessRole.ENGINE: self._start_engine,
                        ProcessRole.WORKER: self._start_worker,
                    }
                    start[role](life)
                case KillProcess(child, cause):
                    self._kill(life.nodes[child.incarnation].process, cause)
                case RemoveProcess(child):
                    life.nodes.pop(child.incarnation).process.kill()
                case SendMessage(child, message):
                    self._send(life.nodes[child.incarnation], message)
                case AnswerQuery(child, query_id):
                    self._send(life.nodes[child.incarnation], self._instance_view(life, query_id))
        self._schedule_tick(life)

    def _send(self, node: SimNode, message: ToChild) -> None:
        if not isinstance(node, WorkerNode):
            node.channel.tell(message)
        elif isinstance(message, StopChild):
            node.process.kill()  # it has no wire to its supervisor, and nothing to complete

    def _schedule_tick(self, life: InstanceLifetime) -> None:
        if life.next_tick is not None:
            life.next_tick.cancel()
        if life.core.is_stopped:
            self.kill()
            return
        wait_s = max(0.0, life.core.next_tick_s() - life.supervisor.now_s())
        life.next_tick = life.supervisor.call_later(wait_s, self._tick, life)

    def _tick(self, life: InstanceLifetime) -> None:
        self._execute(life, life.core.tick(life.supervisor.now_s()))

    def _on_started(
        self, life: InstanceLifetime, role: ProcessRole, index: int, node: SimNode, address: str = ""
    ) -> None:
        life.nodes[node.incarnation] = node
        node.process.on_death.append(lambda: self._died(life, node))
        self._execute(life, life.core.on_started(role, index, node.incarnation, address, life.supervisor.now_s()))

    def _process(self, role: str, number: int) -> SimProcess:
        process = SimProcess(self._ground.loop, f"{self.spec.name}/{role}.{number}", self.spec.clock_rate)
        process.wall_offset_s = self._wall_offset_s
        return process

    def _start_stream_store(self, life: InstanceLifetime) -> None:
        process = self._process("shelf", next(self._shelf_numbers))
        node = StreamStoreNode(
            self._ground, process, life.supervisor, lambda message: self._received(life, node.incarnation, message)
        )
        self.environment.addresses.shelves[node.incarnation] = node.port
        self._on_started(life, ProcessRole.STREAM_STORE, 0, node, node.incarnation)

    def _start_engine(self, life: InstanceLifetime) -> None:
        machine, number = self.spec, next(self._numbers)
        process = self._process("engine", number)
        config = EngineConfig(
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=machine.max_num_batched_tokens,
            max_queue=machine.max_queue,
            prefix_caching=machine.prefix_caching,
            output_caching=machine.output_caching,
            role=machine.role,  # pyright: ignore[reportArgumentType]
            prefill_peers=self.environment.prefill_peers if machine.role == "decode" else (),
            local_prefill_tokens=machine.local_prefill_tokens,
            lease_s=2.0,
            handoff_timeout_s=10.0,
            log_interval_s=0.0,
            num_draft_tokens=machine.num_drafts,
        )
        address = f"apis of {process.name}"
        start = StartEngine(f"engine-{process.name}", config, address, 0 if self._serves_handoffs else -1)
        engine = EngineNode(
            self._ground,
            self.environment.addresses,
            process,
            life.supervisor,
            start,
            lambda message: self._received(life, start.incarnation, message),
            self.handoff_address,
            lambda _: self.environment.after_turn(self),
            lambda plan: self._watch_plan(engine, plan),
        )
        self._on_started(life, ProcessRole.ENGINE, 0, engine, address)

    def _watch_plan(self, engine: EngineNode, plan: StepPlan) -> None:
        self.environment.watch_plan(self, plan)
        if any(ENGINE_POISON_ID in assign.token_ids for assign in plan.assign):
            self._ground.active_faults.trigger_counts["poison-engine"] += 1
            self._ground.trace.note(f"{engine.process} does not survive step {plan.step}")
            self._ground.loop.call_soon(engine.process.kill)

    def _start_worker(self, life: InstanceLifetime) -> None:
        engine = life.engine
        assert engine is not None, "a worker is started for an engine"
        process = self._process("worker", next(self._numbers))
        incarnation = f"worker-{process.name}"
        has_plane = self.spec.role != "mixed"
        kv_address = f"kv of {process.name}" if has_plane else ""
        plane = SimKvTransfer(incarnation) if has_plane else None
        hash_worker = HashWorker(
            self.spec.num_blocks,
            self.spec.block_size,
            vocab_size=NUM_SAMPLED_IDS,
            num_token_ids=len(token_bytes()),
            plane=plane,
            poison=POISON_ID,
            doom=DOOM_ID,
            watch_write=lambda block, request, epoch: self.environment.watch_write(self, block, request, epoch),
            grammars=LazyGrammarCompiler(grammars),
            masks=DelayedMaskMaker(self._ground.random.substream(f"{process} masks")),
            drafts=HashDraftProposer(self._ground.random.substream(f"{process} drafts").bits(30))
            if self.spec.num_drafts
            else None,
        )
        if plane is not None:
            plane.memory = hash_worker.memory
        planes = self.environment.kv_network if has_plane else None
        worker = WorkerNode(self._ground, process, self.spec, hash_worker, (incarnation, engine.incarnation), planes)
        engine.channel.tell(WorkerStarting(incarnation, ZmqWireAddress(incarnation), kv_address))
        process.call_later(self.spec.restart_s, self._join, worker, incarnation, kv_address)
        self._on_started(life, ProcessRole.WORKER, 0, worker)

    def _join(self, worker: WorkerNode, address: str, kv_address: str) -> None:
        """Ready: it says hello, once its engine listens."""
        addresses = self.environment.addresses
        port, kv = addresses.workers.get(address), addresses.kv.get(kv_address)
        if port is None or (kv_address and kv is None):
            worker.process.call_later(0.1, self._join, worker, address, kv_address)
        else:
            worker.join(port, kv)

    def _start_api(self, life: InstanceLifetime, index: int) -> None:
        if life.is_leaving:
            return
        process = self._process(f"api{index}", next(self._numbers))
        config = ApiConfig(
            role=self.spec.role,  # pyright: ignore[reportArgumentType]
            routers=self.environment.routers,
            url=self.url,
            handoff_address=self.handoff_address if self.spec.role != "mixed" else "",
            cluster_key=self.environment.cluster_key,
            response_ttl_s=RESPONSE_TTL_S,
        )
        start = StartApi(
            f"api-{process.name}", index, config, self.environment.model, -1, keys=list(self.environment.keys)
        )
        api = ApiNode(
            self.environment.http,
            self.environment.addresses,
            process,
            life.supervisor,
            start,
            self.environment.prompts,
            self._listener,
            lambda message: self._received(life, start.incarnation, message),
        )
        self._on_started(life, ProcessRole.API, index, api)

    # Messages.

    def _received(self, life: InstanceLifetime, incarnation: str, message: FromChild) -> None:
        child = life.core.children.get(incarnation)
        if child is not None:
            self._execute(life, life.core.on_message(child, message, life.supervisor.now_s()))

    def _instance_view(self, life: InstanceLifetime, query_id: int) -> InstanceView:
        ours = ProcessView("supervisor", 1, life.incarnation, "ready")
        return InstanceView(query_id, life.incarnation, [ours], {}, [], life.core.snapshots.engine_stats())

    # Deaths.

    def _died(self, life: InstanceLifetime, node: SimNode) -> None:
        self._ground.trace.note(f"{node.process} dies")
        if not life.supervisor.is_dead:
            life.supervisor.call_later(REAP_DELAY_S, self._reap, life, node)

    def _reap(self, life: InstanceLifetime, node: SimNode) -> None:
        child = life.core.children.get(node.incarnation)
        if child is not None and not life.was_killed:
            life.nodes.pop(node.incarnation)
            self._execute(life, life.core.on_exit(child, "killed", life.supervisor.now_s()))

    def _kill(self, process: SimProcess, cause: str) -> None:
        self._ground.trace.note(f"{process} is killed: {cause}")
        self._ground.active_faults.num_killed_for_silence += cause == SILENCE
        process.kill()

    # From outside.

    def processes(self, role: str) -> list[SimProcess]:
        """Those of its present life: `worker`, `engine`, `shelf`, `api`, or all for `instance`."""
        life = self.lifetime
        found = {
            "worker": [life.worker.process] if life.worker else [],
            "engine": [life.engine.process] if life.engine else [],
            "shelf": [life.stream_store.process] if life.stream_store else [],
            "api": [api.process for api in life.apis.values()],
        }
        found["instance"] = [life.supervisor, *found["worker"], *found["engine"], *found["shelf"], *found["api"]]
        return [process for process in found[role] if not process.is_dead]

    def set_clock(self, offset_s: float) -> None:
        """The machine's wall clock: of all its processes, and of those to come."""
        self._wall_offset_s = offset_s
        for process in self.processes("instance"):
            process.wall_offset_s = offset_s

    def kill(self) -> None:
        """All of it, without a word."""
        self.lifetime.was_killed = True
        self._listener.close_socket()
        for process in self.processes("instance"):
            process.kill()

    def start_again(self) -> None:
        if self.lifetime.supervisor.is_dead:
            self._begin()

    def shut_down(self) -> None:
        """As by SIGTERM."""
        life = self.lifetime
        if not life.is_leaving:
            self._execute(life, life.core.stop(life.supervisor.now_s()))
