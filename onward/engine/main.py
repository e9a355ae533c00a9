"""The engine process: sockets and the clock around `EngineCore`. Started by the supervisor; imports no torch.

drain the inbox; commit a result; plan a step
"""

import gc
import logging
import mmap
import os
from collections.abc import Callable

import msgspec

from onward import log
from onward.clock import Clock, SystemClock
from onward.engine.core import EngineCore
from onward.engine.handoff.peer_links import PeerLinks
from onward.engine.recording.recorder import RecordingEngineCore
from onward.engine.recording.recording_file import open_recording
from onward.engine.scheduling import scheduling_policy
from onward.engine.scheduling.persisted_block_hashes import PersistedBlockHashes, table_bytes
from onward.errors import OnwardError, StartupError
from onward.obs.step_log import StepLogFile
from onward.proto import SCHEMA_VERSION
from onward.proto.control import (
    ApiGone,
    ChildReady,
    IsolatedRequestRunning,
    MetricsSnapshot,
    QueryMetrics,
    ReplaceWorker,
    StartEngine,
    StartFailed,
    StartListening,
    StopChild,
    ToChild,
    WorkerGone,
    WorkerStarting,
)
from onward.proto.engine import Submit, ToEngine
from onward.proto.kv_transfer import KvCommand, KvReport
from onward.proto.live import LiveSnapshot, QueryLive
from onward.proto.step import StepPlan, StepResult, WorkerHello
from onward.transport.control_channel import ChannelClosed, ControlChannel, join_supervisor_as
from onward.transport.worker_wire import open_engine_wire_end
from onward.transport.zmq_sockets import SocketPoller


class WorkerLink:
    """The engine's end of the wire to its worker. Results arrive in order and none is missing. An unexpected sequence
    number, or a worker of another version, ends the process, and both processes are restarted."""

    def __init__(self, wires: SocketPoller, starting: WorkerStarting, fds: list[int], engine_incarnation: str) -> None:
        self.incarnation = starting.incarnation
        self._engine_incarnation = engine_incarnation
        self._wires = wires
        self._port = open_engine_wire_end(wires, starting.wire, fds)
        self._kv = wires.engine_kv_wire_end(starting.kv_address) if starting.kv_address else None
        self.replacement_requested = False
        """The supervisor was asked to end this worker."""

    def send(self, plan: StepPlan) -> None:
        self._port.send(plan)

    def receive(self) -> WorkerHello | StepResult | None:
        message = self._port.receive()
        if isinstance(message, WorkerHello):
            self._check(message)
        return message

    def send_kv(self, commands: list[KvCommand]) -> None:
        for command in commands:
            assert self._kv is not None, "only a worker with a data plane is spoken to about it"
            self._kv.send(command)

    def receive_kv(self) -> KvReport | None:
        return self._kv.receive() if self._kv is not None else None

    def close(self) -> None:
        self._wires.drop(self._port)
        if self._kv is not None:
            self._wires.drop(self._kv)

    def _check(self, hello: WorkerHello) -> None:
        if hello.schema_version != SCHEMA_VERSION:
            raise StartupError(f"the worker speaks schema {hello.schema_version}, the engine {SCHEMA_VERSION}")
        assert hello.worker_incarnation == self.incarnation, "the wire is known to one worker only"
        assert hello.engine_incarnation == self._engine_incarnation, "a worker serves one engine"


logger = logging.getLogger(__name__)

TICK_MS = 50
MAX_INBOX_PER_TURN = 1000
"""So that a flood of submissions cannot keep results waiting."""


def freeze_heap() -> None:
    """Objects that exist now stay: searching them for garbage again and again would cost as much as planning."""
    gc.collect()
    gc.freeze()


def map_persisted_hashes(fds: list[int], num_blocks: int) -> PersistedBlockHashes:
    """Maps the table in the memory of this one file descriptor, and gives it its size if it has none. Closes it."""
    (fd,) = fds
    num_bytes = table_bytes(num_blocks)
    try:
        if not os.fstat(fd).st_size:
            os.ftruncate(fd, num_bytes)
        assert os.fstat(fd).st_size == num_bytes, "the table has a row for each block"
        return PersistedBlockHashes(memoryview(mmap.mmap(fd, num_bytes)), num_blocks)
    finally:
        os.close(fd)


class EngineProcess:
    """The simulator brings wires, a channel and a clock of its own, and calls `turn` when something has arrived."""

    def __init__(
        self,
        start: StartEngine,
        channel: ControlChannel,
        wires: SocketPoller,
        clock: Clock,
        *,
        before_ready: Callable[[], None],
        open_persisted_hashes: Callable[[list[int], int], PersistedBlockHashes] = map_persisted_hashes,
    ) -> None:
        self._start = start
        self._open_persisted_hashes = open_persisted_hashes
        """Opens the table of block hashes in the memory of these file descriptors, for this number of blocks."""
        self._hashes_fds: list[int] = []
        """File descriptors of the memory that the worker attaches. It is mapped when the worker has reported its number
        of blocks."""
        self._before_ready = before_ready
        """Called when a worker is ready, before the supervisor is told."""
        self._channel = channel
        self._clock = clock
        self._wires = wires
        self._wires.watch_fd(channel.fileno())
        self._apis = self._wires.engine_server(start.address)
        self._peers = PeerLinks(self._wires, start)
        self._link: WorkerLink | None = None
        self._core: EngineCore | None = None
        self._step_log = StepLogFile(start.config.step_log) if start.config.step_log else None
        self._recording = open_recording(start.config.record) if start.config.record else None
        self.is_stopped = False
        """It has taken its last turn."""
        self._stop_requested = False
        self._announced_isolated_id: str | None = None
        """The suspect that the supervisor knows of."""

    @property
    def core(self) -> EngineCore | None:
        """None before the first worker has said hello."""
        return self._core

    def run(self) -> None:
        while not self.is_stopped:
            self._wires.wait(TICK_MS)
            self.run_once()

    def run_once(self) -> None:
        """Runs one turn of the engine: reads the messages that have arrived, then plans steps and sends all that
        follows from them. A turn that reads a stop request is the last one; it sets `is_stopped`."""
        now_s = self._clock.now_s()
        self._read_control(now_s)
        self._read_apis(now_s)
        self._read_worker(now_s)
        self._read_peers(now_s)
        if self._core is not None:
            self._plan_and_send(self._core, now_s)
        if self._stop_requested:
            self._announce_shutdown()
            self.is_stopped = True

    def close(self) -> None:
        self._close_hashes_fds()
        self._wires.close()
        if self._recording is not None:
            self._recording.close()

    def _plan_and_send(self, core: EngineCore, now_s: float) -> None:
        while self._link is not None:
            self._announce_isolated_request(core.next_isolated_id())
            if (plan := core.plan(now_s)) is None:
                break
            self._link.send(plan)
        core.tick(now_s)
        for api_id, message in core.take_api_messages():
            self._apis.send(api_id, message)
        self._send_handoffs(core, now_s)
        self._replace_worker_if_due(core, now_s)
        if self._step_log is not None:
            self._step_log.write(core.step_log.take_finished())

    def _announce_isolated_request(self, request_id: str | None) -> None:
        """Sends the supervisor the id of the suspect that the engine handles from now on, or None, unless the
        supervisor knows it already. This must precede any work for the request: the supervisor outlives the engine, and
        charges the engine's death to that request."""
        if request_id != self._announced_isolated_id and self._channel.send(IsolatedRequestRunning(request_id)):
            self._announced_isolated_id = request_id

    def _send_handoffs(self, core: EngineCore, now_s: float) -> None:
        outgoing = core.take_handoff_messages()
        for peer, ok in self._peers.send(outgoing):
            core.on_peer_send(peer, ok, now_s)
        if self._link is not None:
            self._link.send_kv(outgoing.kv_commands)

    def _replace_worker_if_due(self, core: EngineCore, now_s: float) -> None:
        if (
            self._link is None
            or self._link.replacement_requested
            or (cause := core.worker_replacement_reason(now_s)) is None
        ):
            return
        self._link.replacement_requested = True
        logger.warning(log.event("worker is given up", incarnation=self._link.incarnation, cause=cause))
        self._channel.send(ReplaceWorker(self._link.incarnation, cause))

    def _read_peers(self, now_s: float) -> None:
        core = self._core
        if core is None:
            return
        for peer, message in self._peers.receive_from_prefill(MAX_INBOX_PER_TURN):
            core.receive_from_prefill(peer, message, now_s)
        for decode, message in self._peers.receive_from_decode(MAX_INBOX_PER_TURN):
            core.receive_from_decode(decode, message, now_s)

    def _read_apis(self, now_s: float) -> None:
        if self._core is not None and self._core.runs_alone:
            return  # what dies now dies of the suspect: its step is short, and the others' messages wait for its end
        for _ in range(MAX_INBOX_PER_TURN):
            try:
                received = self._apis.receive()
            except msgspec.DecodeError as fault:
                logger.warning(log.event("message dropped", fault=str(fault)))
                continue
            if received is None:
                break
            assert self._core is not None, "peers get this address after the worker's hello"
            api_id, message = received
            self._announce_isolated_request(_isolated_id_of(message))
            self._core.receive_from_api(api_id, message, now_s)
        self._announce_isolated_request(None)

    def _read_worker(self, now_s: float) -> None:
        while self._link is not None and (message := self._link.receive()) is not None:
            match message:
                case StepResult():
                    assert self._core is not None, "a result answers a plan"
                    self._core.commit(message, now_s)
                case WorkerHello():
                    self._on_hello(message, now_s)
        while self._link is not None and self._core is not None and (report := self._link.receive_kv()) is not None:
            self._core.receive_kv_report(report, now_s)

    def _on_hello(self, hello: WorkerHello, now_s: float) -> None:
        persisted_hashes = self._persisted_hashes_of(hello)
        if self._core is None:
            self._core = self._new_core(hello, persisted_hashes)
        else:
            self._core.on_worker_ready(hello, now_s, persisted_hashes)
        logger.info(log.event("worker ready", incarnation=hello.worker_incarnation, pid=hello.pid))
        self._before_ready()
        self._channel.send(ChildReady(hello))

    def _persisted_hashes_of(self, hello: WorkerHello) -> PersistedBlockHashes | None:
        if not hello.kv_memory or self._start.config.record:
            # A replay starts without blocks, so a recorded engine adopts none. The flag decides, not whether the file
            # could be opened: an engine that hands out blocks without breaking their seals must have no successor that
            # adopts them.
            return None
        fds, self._hashes_fds = self._hashes_fds, []
        return self._open_persisted_hashes(fds, hello.num_blocks)

    def _close_hashes_fds(self) -> None:
        for fd in self._hashes_fds:
            os.close(fd)
        self._hashes_fds = []

    def _new_core(self, hello: WorkerHello, persisted_hashes: PersistedBlockHashes | None = None) -> EngineCore:
        config, incarnation = self._start.config, self._start.incarnation
        recording = self._recording
        if recording is None:
            core = EngineCore(config, incarnation, hello, persisted_hashes)
            if num_adopted := len(core.scheduler.pool.cached_hashes):
                logger.info(log.event("cached blocks adopted", blocks=num_adopted, memory=hello.kv_memory))
        else:
            logger.info(log.event("recording", file=recording.path))
            core = RecordingEngineCore(config, incarnation, hello, recording, self._clock.wall_s())
        if config.record:
            core.registry.gauge(
                "onward_recording",
                "With --record: 1 while the recording is written, 0 after writing has failed.",
                [],
                lambda: {(): float(recording is not None and recording.is_writing)},
            )
        return core

    def _read_control(self, now_s: float) -> None:
        while (message := self._channel.receive()) is not None:
            self._on_control(message, now_s)

    def _on_control(self, message: ToChild, now_s: float) -> None:
        match message:
            case WorkerStarting():
                assert self._link is None, "the old worker is gone before a new one starts"
                fds = self._channel.take_fds()
                num_wire_fds = len(fds) - 1 if message.kv_memory else len(fds)
                self._close_hashes_fds()
                self._hashes_fds = fds[num_wire_fds:]
                self._link = WorkerLink(self._wires, message, fds[:num_wire_fds], self._start.incarnation)
            case WorkerGone():
                self._on_worker_lost(message, now_s)
            case ApiGone() if self._core is not None:
                self._core.on_api_lost(message.incarnation, now_s)
            case QueryMetrics():
                self._answer_snapshot(message, now_s)
            case QueryLive():
                live = self._core.live_engine(now_s) if self._core is not None else None
                self._channel.send(LiveSnapshot(message.query_id, live))
            case StartListening():
                self._peers.listen()
            case StopChild():
                self._stop_requested = True
            case _:
                logger.warning(log.event("unexpected message", kind=type(message).__name__))

    def _announce_shutdown(self) -> None:
        """Peers that wait for us learn it now, not from our silence. It is our last word: handoffs are forgotten with it,
        so a repeated message that was read afterwards would begin one anew."""
        if self._core is not None:
            self._core.close()
            self._peers.send(self._core.take_handoff_messages())

    def _on_worker_lost(self, message: WorkerGone, now_s: float) -> None:
        if self._link is None or self._link.incarnation != message.incarnation:
            return
        logger.warning(
            log.event(
                "worker lost", incarnation=message.incarnation, cause=message.cause, keeps_memory=message.keeps_memory
            )
        )
        self._link.close()
        self._link = None
        if self._core is not None and self._core.worker is not None:
            self._core.on_worker_lost(now_s, keeps_memory=message.keeps_memory)

    def _answer_snapshot(self, message: QueryMetrics, now_s: float) -> None:
        core = self._core
        families = core.registry.snapshot() if core else []
        self._channel.send(MetricsSnapshot(message.query_id, families, core.stats(now_s) if core else None))


def _isolated_id_of(message: ToEngine) -> str | None:
    if isinstance(message, Submit) and scheduling_policy.is_suspect(message.worker_crashes, message.engine_crashes):
        return message.request_id
    return None


def main() -> None:
    channel, start = join_supervisor_as(StartEngine)
    log.configure("engine", start.config.log_level, start.config.log_format)
    try:
        process = EngineProcess(start, channel, SocketPoller(), SystemClock(), before_ready=freeze_heap)
    except OnwardError as error:
        channel.send(StartFailed(error.message))
        return
    try:
        process.run()
    except ChannelClosed:
        logger.warning("the supervisor is gone")
    except OnwardError as error:
        channel.send(StartFailed(error.message))
    finally:
        process.close()


if __name__ == "__main__":
    main()
