"""One instance of a simulation: the supervisor's rules, and the processes that it starts, watches, ends and replaces.

The rules are those of `supervisor.supervisor`, which itself is all signals, sockets and processes.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from onward.api.requests.text_processor import TextProcessor
from onward.config import ApiConfig, EngineConfig
from onward.grammar.lazy import LazyGrammarCompiler
from onward.proto.api_key_entry import ApiKeyEntry
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
    StartApi,
    StartEngine,
    StopChild,
    StreamStoreGone,
    StreamStoreUp,
    WorkerGone,
    WorkerStarting,
)
from onward.proto.model import PreparedModel
from onward.proto.stats import EngineStats
from onward.proto.step import StepPlan, WorkerHello
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
from onward.supervisor.restart_policy import RestartPolicy

REAP_DELAY_S = 0.02
"""From a child's death until its supervisor has reaped it."""
WATCHDOG_INTERVAL_S = 1.0
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


@dataclass(slots=True)
class InstanceLifetime:
    """One life of the instance: all of it can be killed, and another one started in its place."""

    incarnation: str
    supervisor: SimProcess
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    stream_store_restart_policy: RestartPolicy = field(default_factory=RestartPolicy)
    engine: EngineNode | None = None
    worker: WorkerNode | None = None
    worker_incarnation: str = ""
    worker_started_s: float = 0.0
    stream_store: StreamStoreNode | None = None
    stream_store_heard_at_s: float = 0.0
    apis: dict[int, ApiNode] = field(default_factory=dict)
    announced: EngineUp | None = None
    stats: EngineStats | None = None
    progress: int = 0
    """Goes up whenever an engine is seen to have completed further steps."""
    engine_heard_s: float = 0.0
    api_heard_s: dict[int, float] = field(default_factory=dict)
    is_draining: bool = False
    is_leaving: bool = False


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

    # Births.

    def _begin(self) -> InstanceLifetime:
        number = next(self._numbers)
        supervisor = self._process("supervisor", number)
        self.lifetime = InstanceLifetime(f"instance-{self.spec.name}-{number}", supervisor)
        self._listener = self.environment.http.listen(self.url, self.spec.name, waits=True)
        self._start_shelf(self.lifetime)
        self._start_engine(self.lifetime)
        for index in range(self.spec.num_api_processes):
            supervisor.call_later(self.spec.restart_s, self._start_api, self.lifetime, index)
        supervisor.call_later(WATCHDOG_INTERVAL_S, self._run_watchdog, self.lifetime)
        return self.lifetime

    def _process(self, role: str, number: int) -> SimProcess:
        process = SimProcess(self._ground.loop, f"{self.spec.name}/{role}.{number}", self.spec.clock_rate)
        process.wall_offset_s = self._wall_offset_s
        return process

    def _start_shelf(self, life: InstanceLifetime) -> None:
        if life.supervisor.is_dead or life.is_leaving:
            return
        process = self._process("shelf", next(self._shelf_numbers))
        shelf = life.stream_store = StreamStoreNode(
            self._ground, process, life.supervisor, lambda message: self._heard_shelf(life, message)
        )
        life.stream_store_heard_at_s = life.supervisor.now_s()
        self.environment.addresses.shelves[shelf.incarnation] = shelf.port
        process.on_death.append(lambda: self._died(life, shelf))
        for api in life.apis.values():
            api.channel.tell(StreamStoreUp(shelf.incarnation, shelf.incarnation))

    def _start_engine(self, life: InstanceLifetime) -> None:
        if life.supervisor.is_dead or life.is_leaving:
            return
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
        handoff_fd = 0 if self.handoff_address and machine.role != "mixed" else -1
        start = StartEngine(f"engine-{process.name}", config, f"apis of {process.name}", handoff_fd)
        engine = life.engine = EngineNode(
            self._ground,
            self.environment.addresses,
            process,
            life.supervisor,
            start,
            lambda message: self._heard_engine(life, engine, message),
            self.handoff_address,
            lambda _: self.environment.after_turn(self),
            lambda plan: self._watch_plan(engine, plan),
        )
        process.on_death.append(lambda: self._died(life, engine))
        self._start_worker(life, engine)

    def _watch_plan(self, engine: EngineNode, plan: StepPlan) -> None:
        self.environment.watch_plan(self, plan)
        if any(ENGINE_POISON_ID in assign.token_ids for assign in plan.assign):
            self._ground.active_faults.trigger_counts["poison-engine"] += 1
            self._ground.trace.note(f"{engine.process} does not survive step {plan.step}")
            self._ground.loop.call_soon(engine.process.kill)

    def _start_worker(self, life: InstanceLifetime, engine: EngineNode) -> None:
        if life.supervisor.is_dead or engine.process.is_dead or life.is_leaving or life.worker is not None:
            return
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
        life.worker, life.worker_incarnation = worker, incarnation
        life.worker_started_s = life.supervisor.now_s()
        process.on_death.append(lambda: self._died(life, worker))
        engine.channel.tell(WorkerStarting(incarnation, ZmqWireAddress(incarnation), kv_address))
        process.call_later(self.spec.restart_s, self._join, worker, incarnation, kv_address)

    def _join(self, worker: WorkerNode, address: str, kv_address: str) -> None:
        """Ready: it says hello, once its engine listens."""
        addresses = self.environment.addresses
        port, kv = addresses.workers.get(address), addresses.kv.get(kv_address)
        if port is None or (kv_address and kv is None):
            worker.process.call_later(0.1, self._join, worker, address, kv_address)
        else:
            worker.join(port, kv)

    def _start_api(self, life: InstanceLifetime, index: int) -> None:
        if life.supervisor.is_dead or life.is_leaving:
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
        api = life.apis[index] = ApiNode(
            self.environment.http,
            self.environment.addresses,
            process,
            life.supervisor,
            start,
            self.environment.prompts,
            self._listener,
            lambda message: self._heard_api(life, api, message),
        )
        process.on_death.append(lambda: self._died(life, api))
        life.api_heard_s[index] = life.supervisor.now_s()
        if life.stream_store is not None:
            api.channel.tell(StreamStoreUp(life.stream_store.incarnation, life.stream_store.incarnation))
        if life.announced is not None:
            api.channel.tell(life.announced)
        if life.is_draining:
            api.channel.tell(Drain())

    # Messages.

    def _heard_shelf(self, life: InstanceLifetime, _: FromChild) -> None:
        life.stream_store_heard_at_s = life.supervisor.now_s()

    def _heard_engine(self, life: InstanceLifetime, engine: EngineNode, message: FromChild) -> None:
        match message:
            case ChildReady(worker) if worker is not None and life.engine is engine:
                self._engine_ready(life, engine, worker)
            case MetricsSnapshot():
                before = life.stats.step if life.stats is not None else 0
                has_moved = message.engine is not None and message.engine.step > before
                life.progress += has_moved
                life.stats, life.engine_heard_s = message.engine, life.supervisor.now_s()
                if has_moved and life.engine is engine:
                    self._start_worker(life, engine)  # if one has died since: there were steps before that
            case IsolatedRequestRunning():
                engine.runs_alone = message.request_id
            case ReplaceWorker() if life.worker is not None and message.incarnation == life.worker_incarnation:
                self._ground.trace.note(f"{life.worker.process} is renewed: {message.cause}")
                life.worker.process.kill()

    def _engine_ready(self, life: InstanceLifetime, engine: EngineNode, worker: WorkerHello) -> None:
        life.engine_heard_s = life.supervisor.now_s()
        if life.announced is None or life.announced.incarnation != engine.incarnation:
            life.announced = EngineUp(engine.incarnation, f"apis of {engine.process}", worker)
            for api in life.apis.values():
                api.channel.tell(life.announced)

    def _heard_api(self, life: InstanceLifetime, api: ApiNode, message: FromChild) -> None:
        life.api_heard_s[api.index] = life.supervisor.now_s()
        match message:
            case QueryInstance():
                api.channel.tell(self._view(life, message.query_id))
            case RequestDrain():
                self.drain()

    def _view(self, life: InstanceLifetime, ask_id: int) -> InstanceView:
        ours = ProcessView("supervisor", 1, life.incarnation, "ready")
        stats = None
        if life.engine is not None and life.engine.core is not None and not life.engine.process.is_stopped:
            stats = life.engine.core.stats(life.engine.process.now_s())
        return InstanceView(ask_id, life.incarnation, [ours], {}, [], stats)

    # Deaths.

    def _died(self, life: InstanceLifetime, child: Any) -> None:
        self._ground.trace.note(f"{child.process} dies")
        if not life.supervisor.is_dead:
            life.supervisor.call_later(REAP_DELAY_S, self._reap, life, child)

    def _reap(self, life: InstanceLifetime, child: Any) -> None:
        if life.is_leaving:
            return
        match child:
            case WorkerNode() if child is life.worker:
                life.worker = None
                engine = life.engine
                if engine is not None and not engine.process.is_dead:
                    engine.channel.tell(WorkerGone(child.incarnation, "killed"))
                    life.supervisor.call_later(self._pause_s(life), self._start_worker, life, engine)
            case StreamStoreNode() if child is life.stream_store:
                life.stream_store = None
                for api in life.apis.values():
                    api.channel.tell(StreamStoreGone(child.incarnation))
                pause_s = life.stream_store_restart_policy.record_death(life.supervisor.now_s(), life.progress)
                life.supervisor.call_later(pause_s, self._start_shelf, life)
            case EngineNode() if child is life.engine:
                self._engine_died(life, child)
            case ApiNode() if life.apis.get(child.index) is child:
                del life.apis[child.index]
                for other in (life.engine, life.stream_store):
                    if other is not None:
                        other.channel.tell(ApiGone(child.incarnation))
                pause_s = self._pause_s(life) + self.spec.restart_s
                life.supervisor.call_later(pause_s, self._start_api, life, child.index)

    def _engine_died(self, life: InstanceLifetime, engine: EngineNode) -> None:
        life.announced = life.stats = life.engine = None
        if life.worker is not None:
            worker, life.worker = life.worker, None
            worker.process.kill()
        for api in life.apis.values():
            api.channel.tell(EngineGone(engine.incarnation, "killed", engine.runs_alone))
        life.supervisor.call_later(self._pause_s(life), self._start_engine, life)

    def _pause_s(self, life: InstanceLifetime) -> float:
        return life.policy.record_death(life.supervisor.now_s(), life.progress)

    def _run_watchdog(self, life: InstanceLifetime) -> None:
        """Each second: everybody is asked, and who has not answered for too long is killed."""
        if life.supervisor.is_dead:
            return
        now_s, stats = life.supervisor.now_s(), life.stats
        engine, worker = life.engine, life.worker
        if engine is not None and life.announced is not None:
            engine.channel.tell(QueryMetrics(1))
            if now_s - life.engine_heard_s > STALL_TIMEOUT_S:
                self._kill_for_silence(engine.process)
        is_stuck = stats is not None and stats.worker_ready and stats.stalled_s > STALL_TIMEOUT_S
        if is_stuck and worker is not None and now_s - life.worker_started_s > STALL_TIMEOUT_S:
            self._kill_for_silence(worker.process)
        if life.stream_store is not None:
            life.stream_store.channel.tell(QueryMetrics(1))
            if now_s - life.stream_store_heard_at_s > STALL_TIMEOUT_S:
                self._kill_for_silence(life.stream_store.process)
        for index, api in list(life.apis.items()):
            api.channel.tell(QueryMetrics(1))
            if now_s - life.api_heard_s[index] > STALL_TIMEOUT_S:
                self._kill_for_silence(api.process)
        life.supervisor.call_later(WATCHDOG_INTERVAL_S, self._run_watchdog, life)

    def _kill_for_silence(self, process: SimProcess) -> None:
        self._ground.trace.note(f"{process} is killed for silence")
        self._ground.active_faults.num_killed_for_silence += 1
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
        life = self.lifetime
        life.is_leaving = True
        self._listener.close_socket()
        for process in self.processes("instance"):
            process.kill()

    def start_again(self) -> None:
        if self.lifetime.supervisor.is_dead:
            self._begin()

    def drain(self) -> None:
        life = self.lifetime
        life.is_draining = True
        for api in life.apis.values():
            api.channel.tell(Drain())

    def shut_down(self) -> None:
        """As by SIGTERM: the apis first, then the rest, which has time to hand over what it has promised."""
        life = self.lifetime
        if life.is_leaving:
            return
        life.is_leaving = life.is_draining = True
        for api in life.apis.values():
            api.channel.tell(StopChild(DRAIN_S))
        life.supervisor.call_later(DRAIN_S + 1.5, self._stop_engine, life)

    def _stop_engine(self, life: InstanceLifetime) -> None:
        if life.engine is not None:
            life.engine.channel.tell(StopChild(0.0))
        life.supervisor.call_later(0.5, self.kill)
