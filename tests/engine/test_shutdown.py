"""The last turn of an engine process, over real sockets: its farewell is the last that peers hear of it."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from onward.clock import SystemClock
from onward.config import EngineConfig
from onward.engine.main import EngineProcess
from onward.proto.control import StartEngine, StopChild, WorkerStarting
from onward.proto.handoff import PeerGone, PrefillRequest, ToDecode
from onward.proto.sampling_params import SamplingParams
from onward.proto.worker_wire_address import ZmqWireAddress
from onward.sim.hash_worker import HashWorker
from onward.sim.kv_transfer import SimKvTransfer
from onward.transport.control_channel import ControlChannel, control_pair
from onward.transport.curve import make_private_address
from onward.transport.zmq_sockets import SocketPoller

MAX_TURNS = 1000
WAIT_MS = 20_000


class PrefillEngine:
    """A prefill instance's engine, its worker's hello, and a decode instance that has a prompt for it."""

    def __init__(self, ours: SocketPoller, theirs: SocketPoller, listening: socket.socket) -> None:
        self.supervisor, child = control_pair()
        self.wires, self.peer_wires = ours, theirs
        name = f"leaving-{os.getpid()}"
        start = StartEngine(
            "engine-1", EngineConfig(role="prefill"), make_private_address(name)[0], os.dup(listening.fileno())
        )
        self.channel = ControlChannel(child)
        self.process = EngineProcess(start, self.channel, ours, SystemClock(), before_ready=lambda: None)
        wire = ZmqWireAddress(f"ipc://@onward-{name}-worker")
        self.supervisor.send(WorkerStarting("worker-1", wire))
        self.process.run_once()
        hello = HashWorker(32, 4, kv_transfer=SimKvTransfer("worker-1")).hello("worker-1", "engine-1")
        assert hello.kv_layout is not None
        theirs.worker_wire_end(wire.address).send(hello)
        self.peer = theirs.handoff_client(f"tcp://127.0.0.1:{listening.getsockname()[1]}", "", "decode-1")
        self.prefill = PrefillRequest(1, hello.kv_layout, "request-1", [1, 2, 3], 3, SamplingParams(seed=0))

    def begin(self) -> None:
        """The decode instance asks once, and is answered. Nothing that it has sent is unread then."""
        self._turn_until(lambda: self.process.core is not None)
        self._turn_until(lambda: self.peer.send(self.prefill))
        self._turn_until(lambda: self.peer.receive() is not None)

    def last_heard(self) -> ToDecode:
        """Returns the last message of the engine before it left."""
        heard: list[ToDecode] = []
        for _ in range(MAX_TURNS):
            self.peer_wires.wait(WAIT_MS // MAX_TURNS)
            while (message := self.peer.receive()) is not None:
                heard.append(message)
            if any(isinstance(message, PeerGone) for message in heard):
                return heard[-1]
        raise AssertionError(f"no farewell among {heard}")

    def close(self) -> None:
        self.process.close()
        self.supervisor.close()
        self.channel.close()

    def _turn_until(self, is_so: Callable[[], bool]) -> None:
        for _ in range(MAX_TURNS):
            if is_so():
                return
            self.wires.wait(WAIT_MS // MAX_TURNS)
            self.process.run_once()
        raise AssertionError(f"not so within {MAX_TURNS} turns")


@pytest.fixture
def engine() -> Iterator[PrefillEngine]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        closing(SocketPoller()) as ours,
        closing(SocketPoller()) as theirs,
        closing(PrefillEngine(ours, theirs, listening)) as engine,
    ):
        yield engine


def test_a_prompt_that_is_repeated_while_the_engine_is_told_to_stop_begins_nothing_anew(engine: PrefillEngine) -> None:
    engine.begin()
    assert engine.peer.send(engine.prefill)
    engine.wires.wait(WAIT_MS)  # it is there, and the next turn reads it together with the stop
    engine.supervisor.send(StopChild(0.0))
    engine.process.run_once()
    assert engine.process.is_stopped
    assert engine.last_heard() == PeerGone("engine-1.0")
    assert engine.process.core is not None
    assert sum(engine.process.core.stats(0.0).requests.values()) == 1
