"""The wires between engine and worker, as the stage benchmark uses them: a result goes in, a result comes out.

`zmq` and `shm` are the wires' own ends, sockets, memory and doorbell included. `zmq codec` and `shm codec` leave these
out: encoding and decoding only, with the checksum where the wire has one.
"""

import argparse
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol, TypeVar

import msgspec

from benchmarks import ROOT
from onward.config import ServeConfig
from onward.proto import SCHEMA_VERSION
from onward.proto.model import ModelConfig, PreparedModel
from onward.proto.step import StepPlan, StepResult, WorkerHello
from onward.proto.worker_wire_address import ShmWireAddress, WorkerWireAddress
from onward.supervisor.child_process import new_incarnation
from onward.supervisor.worker_wire import WorkerWireEnds, open_worker_wire
from onward.transport import shm_rows
from onward.transport.shm_wire import WorkerWireBroken
from onward.transport.worker_wire import EngineWireEnd, WorkerWireEnd, open_engine_wire_end, open_worker_wire_end
from onward.transport.zmq_sockets import SocketPoller, WorkerMessage

Message = TypeVar("Message")
HELLO = WorkerHello(SCHEMA_VERSION, "w", "e", 0, "", 1, 1, 1, 1)


class ResultWire(Protocol):
    def carry(self, result: StepResult) -> StepResult: ...


class DirectWire:
    def carry(self, result: StepResult) -> StepResult:
        return result


class ZmqCodec:
    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(WorkerMessage)

    def carry(self, result: StepResult) -> StepResult:
        message = self._decoder.decode(self._encoder.encode(WorkerMessage(result=result)))
        assert message.result is not None
        return message.result


class ShmCodec:
    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots

    def carry(self, result: StepResult) -> StepResult:
        cells, side = shm_rows.encode(result.events, self._num_slots, 1)
        body = cells.tobytes()
        checksum = zlib.crc32(side, zlib.crc32(body))
        assert zlib.crc32(side, zlib.crc32(body)) == checksum
        return StepResult(result.step, shm_rows.decode(memoryview(body).cast("q").tolist(), side, 1), result.busy_s)


class LoopbackWire:
    """A real wire with both ends in this process. An empty plan goes down first, since a result answers one."""

    def __init__(self, wires: SocketPoller, engine: EngineWireEnd, worker: WorkerWireEnd) -> None:
        self._wires, self._engine, self._worker = wires, engine, worker
        self._sent = 0
        worker.send(HELLO)
        self._wait_for(engine.receive)

    def carry(self, result: StepResult) -> StepResult:
        self._sent += 1
        self._engine.send(StepPlan(self._sent))
        self._wait_for(self._worker.receive)
        self._worker.send(StepResult(self._sent, result.events, result.busy_s))
        received = self._wait_for(self._engine.receive)
        assert isinstance(received, StepResult), "hello came before"
        return StepResult(result.step, received.events, received.busy_s)

    def _wait_for(self, receive: Callable[[], Message | None]) -> Message:
        # The wait comes first, as in the processes' loops: there zmq also learns that its peer has read.
        while True:
            self._wires.wait(1000)
            if (message := receive()) is not None:
                return message


@contextmanager
def all_wires(num_slots: int) -> Iterator[dict[str, ResultWire]]:
    with ExitStack() as stack:
        zmq, shm = (stack.enter_context(both_ends(kind, num_slots)) for kind in ("zmq", "shm"))
        yield {
            "inproc": DirectWire(),
            "zmq codec": ZmqCodec(),
            "shm codec": ShmCodec(num_slots),
            "zmq": zmq,
            "shm": shm,
        }


@contextmanager
def both_ends(kind: str, num_slots: int) -> Iterator[LoopbackWire]:
    wires = SocketPoller()
    try:
        with made_wire(kind, num_slots) as made:
            engine = open_engine_wire_end(wires, made.for_engine, [os.dup(fd) for fd in made.engine_fds])
            worker = open_worker_wire_end(wires, _with_copied_fds(made.for_worker))
            try:
                yield LoopbackWire(wires, engine, worker)
            finally:
                wires.drop(engine)
                wires.drop(worker)
    finally:
        wires.close()


def _with_copied_fds(wire: WorkerWireAddress) -> WorkerWireAddress:
    if not isinstance(wire, ShmWireAddress):
        return wire
    return msgspec.structs.replace(wire, memory_fd=os.dup(wire.memory_fd), doorbell_fd=os.dup(wire.doorbell_fd))


@contextmanager
def made_wire(kind: str, num_slots: int) -> Iterator[WorkerWireEnds]:
    """As the supervisor makes it for an instance with so many slots."""
    config = ServeConfig(transport=kind, max_num_seqs=num_slots, max_num_batched_tokens=max(512, num_slots))  # pyright: ignore[reportArgumentType]
    shape = ModelConfig("llama", 50_000, 64, 64, 1, 1, 1, 64, 8192, 1e-5, 1e4)
    model = PreparedModel("bench", "", shape, "float32", "none", "", [], None, None, None, None, [])
    with open_worker_wire(config, model, new_incarnation("engine"), new_incarnation("worker")) as made:
        yield made


@contextmanager
def echo_worker(made: WorkerWireEnds) -> "Iterator[subprocess.Popen[bytes]]":
    """A process that answers every plan with an empty result."""
    wire = msgspec.json.encode(made.for_worker).decode()
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.engine.stage_wires", "--wire", wire],
        pass_fds=made.worker_fds,
        cwd=ROOT,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def echo(wire: WorkerWireAddress) -> None:
    wires = SocketPoller()
    try:
        end = open_worker_wire_end(wires, wire)
        end.send(HELLO)
        while True:
            wires.wait()
            while (plan := end.receive()) is not None:
                end.send(StepResult(plan.step, []))
    except WorkerWireBroken:
        return
    finally:
        wires.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="benchmarks.engine.stage_wires")
    parser.add_argument("--wire", required=True)
    echo(msgspec.json.decode(parser.parse_args().wire, type=WorkerWireAddress))
