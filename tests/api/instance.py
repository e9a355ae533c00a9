"""Real api processes and a real stream store; threads of the test play the supervisor and a stand-in engine."""

import contextlib
import itertools
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from onward.config import ApiConfig
from onward.obs.metrics import merge
from onward.proto.control import (
    ApiGone,
    ChildReady,
    Drain,
    EngineGone,
    EngineUp,
    FromChild,
    InstanceView,
    LiveView,
    MetricsSnapshot,
    ProcessView,
    QueryInstance,
    QueryMetrics,
    RequestDrain,
    RequestUndrain,
    StartApi,
    StartStreamStore,
    StopChild,
    StreamStoreGone,
    StreamStoreUp,
    Undrain,
)
from onward.proto.demo import RequestKill
from onward.proto.engine import AbortByName, ErrorInfo, FromEngine, HeldRequestsReport, QueryKvEvents, TokenDeltas
from onward.proto.live import QueryLive
from onward.proto.model import PreparedModel
from onward.proto.stats import EngineStats, MetricFamily
from onward.proto.step import WorkerHello
from onward.transport.control_channel import ChannelClosed, ControlChannel
from onward.transport.curve import make_private_address
from onward.transport.zmq_sockets import SocketPoller
from tests.api.stand_in_engine import StandInEngine

HOLDING_EVERY_S = 0.1
NUM_BLOCKS, BLOCK_SIZE = 64, 16
PATIENCE_S = 120.0


class News:
    """Wakes threads that wait for something that another thread will see."""

    def __init__(self) -> None:
        self.changed = threading.Condition()

    def tell(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S), "it did not happen in time"


class EngineThread:
    """Runs a stand-in engine on a real socket. `copies(message)` says how often a message is sent: 0 loses it."""

    def __init__(self, folder: Path, news: News) -> None:
        self.engine = StandInEngine(f"engine-{secrets.token_hex(4)}")
        self.address = f"ipc://{folder}/{self.engine.incarnation}"
        self.copies: Callable[[FromEngine], int] = lambda _: 1
        self._news = news
        self._next_holding_s = 0.0
        self._senders: dict[str, str] = {}
        self._seqs: dict[str, int] = {}
        self._ending = False
        self._wires = SocketPoller()
        self._port = self._wires.engine_server(self.address)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        self._ending = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._ending:
            self._wires.wait(1 if self.engine.running or self.engine.last_words else 10)
            with self._news.changed:
                self._work()
                self._news.changed.notify_all()
        self._wires.close()

    def _work(self) -> None:
        while (received := self._port.receive()) is not None:
            sender, message = received
            if not isinstance(message, AbortByName | QueryKvEvents):
                self._senders[message.request_id] = sender
            self._seqs[sender] = message.seq
            for answer in self.engine.handle(message):
                self._send(sender, answer)
        for _ in range(self.engine.steps_at_once):
            if (deltas := self.engine.step()) is None:
                break
            self._send_deltas(deltas)
        if time.monotonic() >= self._next_holding_s:
            self._next_holding_s = time.monotonic() + HOLDING_EVERY_S
            self._send_holding()

    def _send_deltas(self, deltas: TokenDeltas) -> None:
        for sender in self._seqs:
            own = [one for one in deltas.deltas if self._senders[one.request_id] == sender]
            if own:
                self._send(sender, TokenDeltas(deltas.step, own))

    def _send_holding(self) -> None:
        holding = self.engine.holding()
        for sender, seq in self._seqs.items():
            held = [one for one in holding.held if self._senders[one.request_id] == sender]
            self._send(sender, HeldRequestsReport(holding.engine_incarnation, seq, holding.step, held))

    def _send(self, receiver: str, message: FromEngine) -> None:
        for _ in range(self.copies(message)):
            self._port.send(receiver, message)


class ShelfChild:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = ControlChannel(ours, FromChild)
        command = [
            sys.executable,
            "-W",
            "error",
            "-m",
            "onward.stream_store.main",
            "--control-fd",
            str(theirs.fileno()),
        ]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.incarnation = f"shelf-{secrets.token_hex(4)}"
        to_bind, self.address = make_private_address(self.incarnation)
        self.channel.send(StartStreamStore(self.incarnation, to_bind))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.channel.close()


class ApiChild:
    def __init__(self, index: int, config: ApiConfig, model: PreparedModel, listening: socket.socket) -> None:
        self.incarnation = f"api-{secrets.token_hex(4)}"
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = ControlChannel(ours, FromChild)
        self.index = index
        self.ready = threading.Event()
        self.snapshots: dict[int, list[MetricFamily]] = {}
        fds = (theirs.fileno(), listening.fileno())
        command = [sys.executable, "-W", "error", "-m", "onward.api.main", "--control-fd", str(fds[0])]
        self.process = subprocess.Popen(command, pass_fds=fds)
        theirs.close()
        self.channel.send(StartApi(self.incarnation, index, config, model, fds[1]))


class Instance:
    def __init__(
        self,
        model: PreparedModel,
        config: ApiConfig,
        num_api: int = 1,
        *,
        has_own_ports: bool = False,
        name: str = "instance-1",
    ) -> None:
        self._name = name
        self._folder = Path(tempfile.mkdtemp(prefix="onward-"))
        self.model = model
        self.stalled_s = 0.0
        self.worker_ready = True
        self.engine_thread: EngineThread | None = None
        self.news = News()
        self._ask_ids = itertools.count(1)
        self._listening = [
            socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(num_api if has_own_ports else 1)
        ]
        self.children = [ApiChild(i, config, model, self._listening[i if has_own_ports else 0]) for i in range(num_api)]
        self.url = self.children[0].url
        self._dead: list[ApiChild] = []
        self.kills: list[str] = []
        self.shelf = self.start_shelf()
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        for child in self.children:
            assert child.ready.wait(PATIENCE_S), "the api process did not become ready"

    def wait_until(self, condition: Callable[[], bool]) -> None:
        self.news.wait_until(condition)

    @property
    def engine(self) -> StandInEngine:
        assert self.engine_thread is not None
        return self.engine_thread.engine

    def lose_requests(self, count: int, refusal: ErrorInfo) -> None:
        """The engine forgets some requests and refuses them from now on."""
        with self.news.changed:
            self.engine.refusal = refusal
            for request_id in list(self.engine.running)[:count]:
                del self.engine.running[request_id]

    def start_engine(self, prepare: Callable[[StandInEngine], None] = lambda _: None) -> None:
        thread = self.engine_thread = EngineThread(self._folder, self.news)
        prepare(thread.engine)
        max_model_len = self._max_model_len()
        num_blocks = max(NUM_BLOCKS, max_model_len // BLOCK_SIZE)
        hello = WorkerHello(1, "w", thread.engine.incarnation, 0, "fp", num_blocks, BLOCK_SIZE, max_model_len, 320)
        self._tell_all(EngineUp(thread.engine.incarnation, thread.address, hello))

    def kill_engine(self) -> None:
        assert self.engine_thread is not None
        self.engine_thread.kill()
        self._tell_all(EngineGone(self.engine.incarnation, "killed by a test"))
        self.engine_thread = None

    def restart_engine(self, prepare: Callable[[StandInEngine], None] = lambda _: None) -> None:
        self.kill_engine()
        self.start_engine(prepare)

    def start_shelf(self) -> ShelfChild:
        shelf = ShelfChild()
        self._tell_all(StreamStoreUp(shelf.incarnation, shelf.address))
        return shelf

    def kill_shelf(self) -> None:
        self.shelf.kill()
        self._tell_all(StreamStoreGone(self.shelf.incarnation))

    def restart_shelf(self) -> None:
        self.kill_shelf()
        self.shelf = self.start_shelf()

    def kill_api(self, child: ApiChild) -> None:
        """Kills it without a replacement."""
        child.process.kill()
        child.process.wait(PATIENCE_S)
        self.children.remove(child)
        self._dead.append(child)
        assert self.shelf.channel.send(ApiGone(child.incarnation))

    def stop(self, grace_s: float) -> None:
        self._tell_all(StopChild(grace_s))

    def close(self) -> None:
        with contextlib.suppress(ChannelClosed):  # a test may have stopped it before
            self.stop(0.0)
        for child in self.children:
            assert child.process.wait(PATIENCE_S) == 0
        self.die()

    def die(self) -> None:
        """As a supervisor that is killed: its ends of all channels close."""
        self._ending = True
        self._thread.join(PATIENCE_S)
        if self.engine_thread is not None:
            self.engine_thread.kill()
        for child in self.children:
            child.channel.close()
        for child in self._dead:
            child.channel.close()
        self.shelf.kill()
        for listening in self._listening:
            listening.close()
        shutil.rmtree(self._folder)

    def _max_model_len(self) -> int:
        return self.model.config.max_position_embeddings

    def _tell_all(self, message: object) -> None:
        for child in self.children:
            assert child.channel.send(message)

    def _run(self) -> None:
        open_children = {child.channel.fileno(): child for child in self.children}
        while open_children and not self._ending:
            for fd in select.select(list(open_children), [], [], 0.05)[0]:
                try:
                    while (message := open_children[fd].channel.receive()) is not None:
                        self._handle(open_children[fd], message)
                except ChannelClosed:
                    del open_children[fd]

    def _handle(self, child: ApiChild, message: object) -> None:
        match message:
            case ChildReady():
                child.ready.set()
            case RequestDrain():
                self._tell_all(Drain())
            case RequestUndrain():
                self._tell_all(Undrain())
            case QueryInstance():
                threading.Thread(target=self._answer, args=(child, message.query_id), daemon=True).start()
            case RequestKill():
                self.kills.append(message.target)
            case QueryLive():
                processes = [ProcessView("supervisor", os.getpid(), "s", "ready")]
                child.channel.send(LiveView(message.query_id, self._name, processes, {"api": 0}, None))
            case MetricsSnapshot():
                child.snapshots[message.query_id] = message.families
                self.news.tell()

    def _answer(self, child: ApiChild, ask_id: int) -> None:
        own_id = next(self._ask_ids)
        self._tell_all(QueryMetrics(own_id))
        self.news.wait_until(lambda: all(own_id in one.snapshots for one in self.children))
        families = merge(one.snapshots.pop(own_id) for one in self.children)
        stats = None
        if self.engine_thread is not None:
            stats = EngineStats(1, self.worker_ready, self.stalled_s, {"running": 0}, {"free": NUM_BLOCKS}, 4)
        processes = [ProcessView("api", one.process.pid, "i", "ready") for one in self.children]
        processes.append(ProcessView("stream_store", self.shelf.process.pid, self.shelf.incarnation, "ready"))
        processes.append(ProcessView("supervisor", os.getpid(), "s", "ready"))
        child.channel.send(InstanceView(ask_id, self._name, processes, {}, families, stats))


@contextlib.contextmanager
def running(
    model: PreparedModel,
    config: ApiConfig | None = None,
    num_api: int = 1,
    *,
    has_own_ports: bool = False,
    has_engine: bool = True,
    name: str = "instance-1",
) -> Iterator[Instance]:
    """`has_own_ports`: each api process has its own, so that a test can choose one. `name`: for a router, which takes two
    of the same name for one that has moved."""
    instance = Instance(model, config or ApiConfig(), num_api, has_own_ports=has_own_ports, name=name)
    try:
        if has_engine:
            instance.start_engine()
        yield instance
    finally:
        instance.close()
