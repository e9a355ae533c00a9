"""The processes of a simulation: the shipping code of each role, with simulated sockets, servers and supervisors."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, cast

from onward.api.process import ApiProcess, Runtime
from onward.api.requests.text_processor import TextProcessor
from onward.config import RouterConfig
from onward.engine.core import EngineCore
from onward.engine.main import TICK_MS as ENGINE_TICK_MS
from onward.engine.main import EngineProcess
from onward.engine.scheduling.persisted_block_hashes import PersistedBlockHashes
from onward.proto.control import FromChild, StartApi, StartEngine
from onward.proto.kv_transfer import KvCommand, KvReport
from onward.proto.step import StepPlan, StepResult, WorkerHello
from onward.proto.stream_store import FromStreamStore, ToStreamStore
from onward.router.router import Router
from onward.sim.engine_wires import SimAddresses, SimEngineWires
from onward.sim.hash_worker import HashWorker, WorkerPoisoned
from onward.sim.http import SimHttpNetwork, SimHttpSession, SimListener, url_of
from onward.sim.kv_transfer import SimKvNetwork, SimKvTransfer
from onward.sim.ports import SimControlChannel, SimServerPort, SimWorkerPort
from onward.sim.process import SimProcess
from onward.sim.scenario import SimInstanceSpec
from onward.sim.wire import SimContext
from onward.stream_store.core import StreamStoreCore
from onward.stream_store.main import TICK_MS as STREAM_STORE_TICK_MS
from onward.stream_store.main import StreamStoreProcess
from onward.web.auth.api_key_table import ApiKeyTable

IDLE_ENGINE_TICK_S = 0.5
IDLE_STREAM_STORE_TICK_S = 1.0
"""Messages wake an idle process, so it needs fewer ticks of its own."""
PLANE_STEP_S = 0.004
DAMAGED_BLOCK_RATE = 0.25


class InlineExecutor(Executor):
    """Runs each call at once, because threads would not be repeatable."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as fault:
            future.set_exception(fault)
        return future


class SimSocket:
    """Replaces `transport.zmq_sockets.EngineClientSocket` and `transport.stream_store_sockets.StreamStoreClientSocket`,
    over simulated wires."""

    def __init__(self, server: SimServerPort | None, api: SimProcess, incarnation: str) -> None:
        self._inbox: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._wire = server.connect(incarnation, api, self._on_message) if server is not None else None

    def _on_message(self, message: Any) -> None:
        self._inbox.append(message)
        self._arrived.set()

    def send(self, message: Any) -> bool:
        if self._wire is not None:
            self._wire.send(message)
        return True

    async def receive(self) -> Any:
        while not self._inbox:
            self._arrived.clear()
            await self._arrived.wait()
        return self._inbox.popleft()

    def close(self) -> None:
        self._wire = None


class ApiNode:
    def __init__(
        self,
        network: SimHttpNetwork,
        addresses: SimAddresses,
        process: SimProcess,
        supervisor: SimProcess,
        start: StartApi,
        prompts: TextProcessor,
        listener: SimListener,
        on_message: Callable[[FromChild], None],
    ) -> None:
        self.process, self.incarnation, self.index = process, start.incarnation, start.index
        self._listener = listener
        read_control = process.coalesced(lambda: self.api.read_control())
        self.channel = SimControlChannel(network.context, supervisor, process, on_message, read_control)
        runtime = Runtime(
            clock=process,
            random=network.context.random.substream(process.name),
            connect_engine=lambda address: SimSocket(addresses.apis.get(address), process, start.incarnation),
            connect_stream_store=lambda address: SimSocket(
                addresses.stream_stores.get(address), process, start.incarnation
            ),
            new_session=lambda: cast(Any, SimHttpSession(network, process)),
            new_executor=lambda num_threads, name: InlineExecutor(),
            stop_server=self._stop,
            exit_now=process.kill,
        )
        self.api = process.run(ApiProcess, start, cast(Any, self.channel), prompts, runtime)
        listener.serve(process, self.api.app)
        process.run(self.api.on_listening)

    def _stop(self, grace_s: float, on_end: Callable[[], object]) -> None:
        """Stops as a server does: it takes no new connections, and ends after the grace period."""
        self._listener.close(self.process)
        self.process.call_later(grace_s, on_end)
        self.process.call_later(grace_s + 1.0, self.process.kill)


class EngineNode:
    """One simulated engine process: the shipping `EngineProcess`, which a timer and its messages wake."""

    def __init__(
        self,
        context: SimContext,
        addresses: SimAddresses,
        process: SimProcess,
        supervisor: SimProcess,
        start: StartEngine,
        on_message: Callable[[FromChild], None],
        handoff_address: str,
        after_turn: Callable[["EngineNode"], None],
        watch_plan: Callable[[StepPlan], None],
        open_persisted_hashes: Callable[[list[int], int], PersistedBlockHashes],
    ) -> None:
        self.process, self.incarnation = process, start.incarnation
        self._after_turn = after_turn
        self._wake = process.coalesced(self._turn)
        self.channel = SimControlChannel(context, supervisor, process, on_message, self._wake)
        wires = SimEngineWires(context, addresses, process, self._wake, watch_plan, handoff_address)
        # The heap is not frozen: it has all engines of this run and garbage of earlier runs, which would stay forever.
        self._engine = EngineProcess(
            start,
            cast(Any, self.channel),
            cast(Any, wires),
            process,
            before_ready=lambda: None,
            open_persisted_hashes=open_persisted_hashes,
        )
        self._tick()

    @property
    def core(self) -> EngineCore | None:
        return self._engine.core

    def _tick(self) -> None:
        self._wake()
        is_idle = self.core is None or self.core.idle
        self.process.call_later(IDLE_ENGINE_TICK_S if is_idle else ENGINE_TICK_MS / 1000, self._tick)

    def _turn(self) -> None:
        if self._engine.is_stopped:
            self.process.kill()  # as the real process exits
            return
        self._engine.run_once()
        self._after_turn(self)


class StreamStoreNode:
    def __init__(
        self, context: SimContext, process: SimProcess, supervisor: SimProcess, on_message: Callable[[FromChild], None]
    ) -> None:
        self.process = process
        self.incarnation = f"shelf-{process.name}"
        self._wake = process.coalesced(self._turn)
        self.channel = SimControlChannel(context, supervisor, process, on_message, self._wake)
        self.port = SimServerPort(context, process, self._wake, received=ToStreamStore, sent=FromStreamStore)
        self._stream_store = StreamStoreProcess(self.channel, self.port, process)
        self._tick()

    @property
    def core(self) -> StreamStoreCore:
        return self._stream_store.core

    def _tick(self) -> None:
        self._wake()
        is_idle = not self.core.num_pending_queries
        self.process.call_later(IDLE_STREAM_STORE_TICK_S if is_idle else STREAM_STORE_TICK_MS / 1000, self._tick)

    def _turn(self) -> None:
        self._stream_store.run_once()
        if self._stream_store.is_stopped:
            self.process.kill()


class WorkerNode:
    def __init__(
        self,
        context: SimContext,
        process: SimProcess,
        spec: SimInstanceSpec,
        worker: HashWorker,
        incarnation: str,
        kv_network: SimKvNetwork | None,
    ) -> None:
        self.process, self.worker = process, worker
        self._context, self._spec, self._kv_network = context, spec, kv_network
        self.incarnation, self.engine_incarnation = incarnation, ""
        self.is_standby = False
        self._random = context.random.substream(f"{process} steps")
        self._plans: deque[StepPlan] = deque()
        self._is_busy = False
        self._move_kv_later = process.coalesced(self._move_kv, lambda: self._random.jittered(PLANE_STEP_S))
        if kv_network is not None:
            assert worker.kv_transfer is not None
            kv_network.add(worker.kv_transfer)
            worker.kv_transfer.notify = process.coalesced(self._report)
            worker.kv_transfer.notices_deaths = self._notices_deaths
            process.on_death.append(self._leave_kv_network)
            process.on_stop.append(self._stall)
        process.on_death.append(self._write_last_step)

    def join(self, port: SimWorkerPort, kv_port: SimWorkerPort | None) -> None:
        hello, self._results = port.connect(self.process, self._on_plan, StepPlan, WorkerHello, StepResult)
        if kv_port is not None:
            [self._reports] = kv_port.connect(self.process, self._on_kv_command, KvCommand, KvReport, name_suffix=" kv")
        hello.send(self.worker.hello(self.incarnation, self.engine_incarnation))

    def _on_plan(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        if not self._is_busy:
            self._start_step()

    def _start_step(self) -> None:
        self._is_busy = True
        num_tokens = sum(run.num_tokens for run in self._plans[0].run)
        step_s = self._random.jittered(self._spec.step_s) * (1 + num_tokens / 64)
        self.process.call_later(step_s, self._end_step)

    def _end_step(self) -> None:
        try:
            result = self.worker.step(self._plans.popleft())
        except WorkerPoisoned:
            self._context.active_faults.trigger_counts["poison"] += 1
            self.process.kill(return_code=1)
            return
        self._results.send(result)
        self._is_busy = False
        if self._plans:
            self._start_step()
        if self._kv_network is not None:
            self._move_kv_later()

    def _write_last_step(self) -> None:
        """Writes the KV of the step in flight before the process dies; its result is lost. Does nothing at the end of a
        run: a plan that violates an invariant cannot be executed."""
        if self._plans and not self._context.is_over:
            with contextlib.suppress(WorkerPoisoned):
                self.worker.step(self._plans.popleft())

    def damage_memory(self) -> None:
        """Overwrites cells in a random quarter of all blocks, as a stray pointer would."""
        for block in self.worker.memory:
            if self._random.happens(DAMAGED_BLOCK_RATE):
                block[self._random.below(len(block))] += 1

    # KV transfer.

    @property
    def kv_transfer(self) -> SimKvTransfer | None:
        return self.worker.kv_transfer

    def _on_kv_command(self, command: KvCommand) -> None:
        assert self.worker.kv_transfer is not None
        self.worker.kv_transfer.command(command)
        self._move_kv_later()

    def _move_kv(self) -> None:
        """Lands the next write. It does not run in a stopped process, so the writes of such a process stay pending."""
        kv_network, kv_transfer, active_faults = self._kv_network, self.worker.kv_transfer, self._context.active_faults
        assert kv_network is not None and kv_transfer is not None
        if kv_transfer.late_pushes:
            if self._notices_deaths():
                kv_network.move_one_write(kv_transfer)
        elif kv_transfer.outgoing and active_faults.hits("break-kv", self.process.name):
            kv_network.break_transfer(kv_transfer)
        elif not (kv_transfer.outgoing and active_faults.hits("slow-kv", self.process.name)):
            kv_network.move_one_write(kv_transfer)
        kv_network.settle_revoked_leases(kv_transfer)
        if kv_transfer.is_busy:
            self._move_kv_later()

    def _notices_deaths(self) -> bool:
        return not self._context.active_faults.hits("late-kv", self.process.name)

    def _report(self) -> None:
        assert self.worker.kv_transfer is not None
        reports, self.worker.kv_transfer.reports = self.worker.kv_transfer.reports, []
        for report in reports:
            self._reports.send(report)

    def _stall(self, is_stopped: bool) -> None:
        assert self.worker.kv_transfer is not None
        self.worker.kv_transfer.stalled = is_stopped

    def _leave_kv_network(self) -> None:
        assert self._kv_network is not None and self.worker.kv_transfer is not None
        self._kv_network.remove(self.worker.kv_transfer.address)


class RouterNode:
    """A router with a fixed address. The process behind it may die and start again."""

    def __init__(
        self, network: SimHttpNetwork, name: str, config: RouterConfig, keys: ApiKeyTable, cluster_key: str
    ) -> None:
        self.url = url_of(name)
        self._network, self._name, self._config = network, name, config
        self._keys, self._cluster_key = keys, cluster_key
        self._num_starts = 0
        self._wall_offset_s = 0.0
        self._listener = network.listen(self.url, name, waits=False)
        self.start()

    def start(self) -> None:
        self._num_starts += 1
        process = self.process = SimProcess(self._network.context.loop, f"{self._name}.{self._num_starts}")
        process.wall_offset_s = self._wall_offset_s
        random = self._network.context.random.substream(process.name)
        session = SimHttpSession(self._network, process)
        router = partial(Router, self._config, self._cluster_key, keys=self._keys)
        self.router = process.run(router, process, random, cast(Any, session), session.post_attempt)
        process.start(self.router.stream_runner.run_maintenance())
        self._listener.serve(process, self.router.app)

    def set_clock(self, offset_s: float) -> None:
        """Sets the router's wall clock, also for later starts."""
        self._wall_offset_s = self.process.wall_offset_s = offset_s

    def kill(self) -> None:
        self._network.context.trace.note(f"{self.process} dies")
        self.process.kill()

    @property
    def is_up(self) -> bool:
        return not self.process.is_dead

    def processes(self, role: str) -> list[SimProcess]:
        return [self.process] if role == "router" and self.is_up else []

    def start_again(self) -> None:
        if self.process.is_dead:
            self.start()
