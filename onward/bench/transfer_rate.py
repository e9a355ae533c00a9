"""How fast KV goes from one process to another over the real data plane, beside a plain copy of as many bytes.

This process takes the blocks in, as a decode worker does; a child writes them, as a prefill worker does that has computed
everything already. The writer's clock counts, from handing the push over to hearing that all of it has arrived. No model
runs, so nothing is hidden behind computing.
"""

import itertools
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import numpy as np

from onward.errors import ServerError
from onward.proto.kv_transfer import Counted, EndLease, Endpoint, Expect, Expecting, Layout, Push, Sent
from onward.proto.model import ModelConfig
from onward.transport.curve import private_addresses
from onward.transport.zmq import Wires
from onward.worker.kv_store import allocate, block_bytes
from onward.worker.transfer.plane import KvMemory, Plane
from onward.worker.transfer.push_job import Fed

BACKENDS = ("shm", "tcp", "nixl")
BLOCK_SIZE = 16
TIMEOUT_S = 30.0
_INT8 = np.dtype(np.int8)

Report = TypeVar("Report", Expecting, Counted, Sent)


class Rate(msgspec.Struct, frozen=True):
    """Medians, in the order of blocks and with the checksums that it names."""

    backend: str
    order: str
    """`in order`: neighbours stay neighbours, and go as one. `random`: every page goes by itself."""
    checksums: bool
    mb_per_s: float
    copy_mb_per_s: float
    ratio: float
    """To the plain copy, the median of the repetitions."""


class _Order(msgspec.Struct, frozen=True):
    """What the writer is to do."""

    lease_id: str
    endpoint: Endpoint
    source_ids: list[int]
    target_ids: list[int]
    checksums: bool


class Timing(msgspec.Struct, frozen=True):
    """Of one transfer, and of the plain copy right after it."""

    seconds: float
    copy_s: float


class _Worker:
    """A plane with its memory, and its engine's end of the wire."""

    def __init__(self, shape: ModelConfig, num_blocks: int, backend: str | None) -> None:
        pool = allocate(shape, _INT8, num_blocks, BLOCK_SIZE, is_shared=backend is not None)
        self.bytes, self.num_blocks = pool.data, num_blocks
        self.bytes[:] = 1  # every page has its memory before anything is timed
        layout = Layout("bench", "int8", BLOCK_SIZE, shape.num_layers, shape.num_kv_heads, shape.head_dim)
        self.plane = Plane(
            KvMemory(self.bytes, pool.fd, pool.geometry, layout),
            backend=backend,
            host="127.0.0.1",
            incarnation=f"bench-{os.getpid()}",
            cluster_key="",
            layers_done=lambda: 0,
        )
        engine_address, worker_address = private_addresses(f"bench-{os.getpid()}-{time.monotonic_ns()}")
        self._wires, plane_wires = Wires(), Wires()
        self.port = self._wires.kv_port(engine_address)
        self.plane.start(plane_wires, plane_wires.kv_socket(worker_address))

    def hear(self, kind: type[Report], lease_id: str) -> Report:
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            if (report := self.port.receive()) is not None:
                if not isinstance(report, kind) or report.lease_id != lease_id:
                    raise ServerError(f"the transfer went wrong: {report}")
                return report
            self._wires.wait(100)
        raise ServerError(f"no {kind.__name__} within {TIMEOUT_S:.0f} s")

    def close(self) -> None:
        self.plane.close()
        self._wires.close()


class _Writer:
    """This process's end of the child."""

    def __init__(self, shape: ModelConfig, num_blocks: int) -> None:
        command = [sys.executable, "-m", "onward.bench.transfer_rate", str(num_blocks)]
        self._child = subprocess.Popen(
            [*command, msgspec.json.encode(shape).decode()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def begin(self, order: _Order) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(msgspec.json.encode(order) + b"\n")
        self._child.stdin.flush()

    def end(self) -> Timing:
        assert self._child.stdout is not None
        if not (line := self._child.stdout.readline()):
            raise ServerError(f"the writer ended with status {self._child.wait(TIMEOUT_S)}")
        return msgspec.json.decode(line, type=Timing)

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()


def num_blocks_of(shape: ModelConfig, num_bytes: int) -> int:
    """How many blocks come closest to so many bytes, one at least."""
    return max(1, round(num_bytes / block_bytes(shape, _INT8, BLOCK_SIZE)))


def measure(backend: str, shape: ModelConfig, num_bytes: int, repetitions: int) -> list[Rate]:
    """Raises `StartupError` for a backend that does not work here."""
    num_blocks = num_blocks_of(shape, num_bytes)
    moved = num_blocks * block_bytes(shape, _INT8, BLOCK_SIZE)
    with _both_sides(backend, shape, num_blocks) as (reader, writer):
        return [
            rate_of(backend, order, checksums, moved, _transfers(reader, writer, order, checksums, repetitions))
            for order, checksums in itertools.product(("in order", "random"), (False, True))
        ]


def rate_of(backend: str, order: str, checksums: bool, num_bytes: int, timings: Sequence[Timing]) -> Rate:
    return Rate(
        backend,
        order,
        checksums,
        num_bytes / 1e6 / statistics.median(timing.seconds for timing in timings),
        num_bytes / 1e6 / statistics.median(timing.copy_s for timing in timings),
        statistics.median(timing.copy_s / timing.seconds for timing in timings),
    )


@contextmanager
def _both_sides(backend: str, shape: ModelConfig, num_blocks: int) -> Iterator[tuple[_Worker, _Writer]]:
    reader = _Worker(shape, num_blocks, backend)
    writer = _Writer(shape, num_blocks)
    try:
        yield reader, writer
    finally:
        writer.close()
        reader.close()


def _transfers(reader: _Worker, writer: _Writer, order: str, checksums: bool, repetitions: int) -> list[Timing]:
    """One more than is counted: the first may have to connect."""
    return [_transfer(reader, writer, order, checksums, number) for number in range(repetitions + 1)][1:]


def _transfer(reader: _Worker, writer: _Writer, order: str, checksums: bool, number: int) -> Timing:
    lease_id = f"{order} {checksums} {number}"
    source_ids, target_ids = block_ids(order, reader.num_blocks, lease_id)
    reader.port.send(Expect(lease_id, target_ids, checksums))
    reader.hear(Expecting, lease_id)
    assert reader.plane.endpoint is not None, "it has a backend"
    writer.begin(_Order(lease_id, reader.plane.endpoint, source_ids, target_ids, checksums))
    reader.hear(Counted, lease_id)
    reader.port.send(EndLease(lease_id))
    return writer.end()


def block_ids(order: str, num_blocks: int, seed: str) -> tuple[list[int], list[int]]:
    """All blocks of the writer's pool, and where each goes."""
    ids = list(range(num_blocks))
    if order == "in order":
        return ids, ids
    shuffled = random.Random(seed)
    return shuffled.sample(ids, num_blocks), shuffled.sample(ids, num_blocks)


def _write(worker: _Worker, order: _Order) -> float:
    started_s = time.perf_counter()
    worker.plane.open_push(Push(order.lease_id, order.endpoint, 0, order.target_ids, order.checksums))
    worker.plane.feed(Fed(order.lease_id, 0, order.source_ids, None))
    worker.plane.wake()
    worker.hear(Sent, order.lease_id)
    return time.perf_counter() - started_s


def _copy(source: np.ndarray, target: np.ndarray) -> float:
    started_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started_s


def main() -> None:
    """The child: an order on each line of its input, a timing on each of its output."""
    shape = msgspec.json.decode(sys.argv[2], type=ModelConfig)
    worker = _Worker(shape, int(sys.argv[1]), None)
    copied = np.ones_like(worker.bytes)
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=_Order)
        timing = Timing(_write(worker, order), _copy(worker.bytes, copied))
        print(msgspec.json.encode(timing).decode(), flush=True)


if __name__ == "__main__":
    main()
