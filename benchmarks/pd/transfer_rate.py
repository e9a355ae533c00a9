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

from benchmarks import ROOT
from onward.errors import ServerError
from onward.pd.transfer.kv_transfer_thread import KvMemoryRegion, KvTransferThread
from onward.pd.transfer.push_job import ComputedBlocks
from onward.proto.kv_transfer import (
    EndLease,
    ExpectingWrites,
    ExpectWrites,
    KvEndpoint,
    KvLayout,
    KvPush,
    PushComplete,
    WritesComplete,
)
from onward.proto.model import ModelConfig
from onward.transport.curve import make_private_address
from onward.transport.zmq_sockets import SocketPoller
from onward.worker.kv_pool import allocate_kv_pool, block_bytes

BACKENDS = ("shm", "tcp", "nixl")
BLOCK_SIZE = 16
TIMEOUT_S = 30.0
_INT8 = np.dtype(np.int8)

Report = TypeVar("Report", ExpectingWrites, WritesComplete, PushComplete)


class TransferRate(msgspec.Struct, frozen=True):
    """Medians, in the order of blocks and with the checksums that it names."""

    backend: str
    order: str
    """`in order`: neighbours stay neighbours, and go as one. `random`: every page goes by itself."""
    checksums: bool
    mb_per_s: float
    copy_mb_per_s: float
    ratio: float
    """To the plain copy, the median of the repetitions."""


class _TransferCommand(msgspec.Struct, frozen=True):
    """What the writer is to do."""

    lease_id: str
    endpoint: KvEndpoint
    source_ids: list[int]
    target_ids: list[int]
    checksums: bool


class TransferTiming(msgspec.Struct, frozen=True):
    """Durations of one transfer, and of the plain copy right after it."""

    seconds: float
    copy_s: float


class _TransferEndpoint:
    """A plane with its memory, and its engine's end of the wire."""

    def __init__(self, shape: ModelConfig, num_blocks: int, backend: str | None) -> None:
        pool = allocate_kv_pool(shape, _INT8, num_blocks, BLOCK_SIZE, is_shared=backend is not None)
        self.bytes, self.num_blocks = pool.data, num_blocks
        self.bytes[:] = 1  # every page has its memory before anything is timed
        layout = KvLayout("bench", "int8", BLOCK_SIZE, shape.num_layers, shape.num_kv_heads, shape.head_dim)
        self.plane = KvTransferThread(
            KvMemoryRegion(self.bytes, pool.fd, pool.geometry, layout),
            backend=backend,
            host="127.0.0.1",
            incarnation=f"bench-{os.getpid()}",
            cluster_key="",
            layers_done=lambda: 0,
        )
        engine_address, worker_address = make_private_address(f"bench-{os.getpid()}-{time.monotonic_ns()}")
        self._wires, plane_wires = SocketPoller(), SocketPoller()
        self.port = self._wires.engine_kv_wire_end(engine_address)
        self.plane.start(plane_wires, plane_wires.worker_kv_wire_end(worker_address))

    def wait_for_report(self, kind: type[Report], lease_id: str) -> Report:
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


class _WriterProcess:
    """This process's end of the child."""

    def __init__(self, shape: ModelConfig, num_blocks: int) -> None:
        command = [sys.executable, "-m", "benchmarks.pd.transfer_rate", str(num_blocks)]
        self._child = subprocess.Popen(
            [*command, msgspec.json.encode(shape).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )

    def begin(self, order: _TransferCommand) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(msgspec.json.encode(order) + b"\n")
        self._child.stdin.flush()

    def end(self) -> TransferTiming:
        assert self._child.stdout is not None
        if not (line := self._child.stdout.readline()):
            raise ServerError(f"the writer ended with status {self._child.wait(TIMEOUT_S)}")
        return msgspec.json.decode(line, type=TransferTiming)

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()


def num_blocks_of(shape: ModelConfig, num_bytes: int) -> int:
    """How many blocks come closest to so many bytes, one at least."""
    return max(1, round(num_bytes / block_bytes(shape, _INT8, BLOCK_SIZE)))


def measure(backend: str, shape: ModelConfig, num_bytes: int, repetitions: int) -> list[TransferRate]:
    """Raises `StartupError` for a backend that does not work here."""
    num_blocks = num_blocks_of(shape, num_bytes)
    moved = num_blocks * block_bytes(shape, _INT8, BLOCK_SIZE)
    with _both_sides(backend, shape, num_blocks) as (reader, writer):
        return [
            rate_of(backend, order, checksums, moved, _transfers(reader, writer, order, checksums, repetitions))
            for order, checksums in itertools.product(("in order", "random"), (False, True))
        ]


def rate_of(
    backend: str, order: str, checksums: bool, num_bytes: int, timings: Sequence[TransferTiming]
) -> TransferRate:
    return TransferRate(
        backend,
        order,
        checksums,
        num_bytes / 1e6 / statistics.median(timing.seconds for timing in timings),
        num_bytes / 1e6 / statistics.median(timing.copy_s for timing in timings),
        statistics.median(timing.copy_s / timing.seconds for timing in timings),
    )


@contextmanager
def _both_sides(
    backend: str, shape: ModelConfig, num_blocks: int
) -> Iterator[tuple[_TransferEndpoint, _WriterProcess]]:
    reader = _TransferEndpoint(shape, num_blocks, backend)
    writer = _WriterProcess(shape, num_blocks)
    try:
        yield reader, writer
    finally:
        writer.close()
        reader.close()


def _transfers(
    reader: _TransferEndpoint, writer: _WriterProcess, order: str, checksums: bool, repetitions: int
) -> list[TransferTiming]:
    """One more than is counted: the first may have to connect."""
    return [_transfer(reader, writer, order, checksums, number) for number in range(repetitions + 1)][1:]


def _transfer(
    reader: _TransferEndpoint, writer: _WriterProcess, order: str, checksums: bool, number: int
) -> TransferTiming:
    lease_id = f"{order} {checksums} {number}"
    source_ids, target_ids = block_ids(order, reader.num_blocks, lease_id)
    reader.port.send(ExpectWrites(lease_id, target_ids, checksums))
    reader.wait_for_report(ExpectingWrites, lease_id)
    assert reader.plane.endpoint is not None, "it has a backend"
    writer.begin(_TransferCommand(lease_id, reader.plane.endpoint, source_ids, target_ids, checksums))
    reader.wait_for_report(WritesComplete, lease_id)
    reader.port.send(EndLease(lease_id))
    return writer.end()


def block_ids(order: str, num_blocks: int, seed: str) -> tuple[list[int], list[int]]:
    """All blocks of the writer's pool, and where each goes."""
    ids = list(range(num_blocks))
    if order == "in order":
        return ids, ids
    shuffled = random.Random(seed)
    return shuffled.sample(ids, num_blocks), shuffled.sample(ids, num_blocks)


def _write(worker: _TransferEndpoint, order: _TransferCommand) -> float:
    started_s = time.perf_counter()
    worker.plane.open_push(KvPush(order.lease_id, order.endpoint, 0, order.target_ids, order.checksums))
    worker.plane.send_computed(ComputedBlocks(order.lease_id, 0, order.source_ids, None))
    worker.plane.wake()
    worker.wait_for_report(PushComplete, order.lease_id)
    return time.perf_counter() - started_s


def _copy(source: np.ndarray, target: np.ndarray) -> float:
    started_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started_s


def main() -> None:
    """The child: an order on each line of its input, a timing on each of its output."""
    shape = msgspec.json.decode(sys.argv[2], type=ModelConfig)
    worker = _TransferEndpoint(shape, int(sys.argv[1]), None)
    copied = np.ones_like(worker.bytes)
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=_TransferCommand)
        timing = TransferTiming(_write(worker, order), _copy(worker.bytes, copied))
        print(msgspec.json.encode(timing).decode(), flush=True)


if __name__ == "__main__":
    main()
