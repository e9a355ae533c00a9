"""A worker's data plane with its memory and its engine's end of the wire, without a model."""

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from onward.kernels.cpu.kv_layout import record_size
from onward.pd.transfer.kv_transfer_thread import KvMemoryRegion, KvTransferThread
from onward.pd.transfer.page_geometry import block_checksum
from onward.pd.transfer.push_job import ComputedBlocks
from onward.proto.kv_transfer import ExpectingWrites, ExpectWrites, KvCommand, KvEndpoint, KvLayout, KvPush, KvReport
from onward.proto.model import ModelConfig
from onward.transport.curve import make_private_address
from onward.transport.zmq_sockets import SocketPoller
from onward.worker.kv_pool import allocate_kv_pool

CONFIG = ModelConfig(
    architecture="llama", vocab_size=9, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=2, num_kv_heads=2,
    head_dim=32, max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=10_000.0,
)  # fmt: skip
LAYOUT = KvLayout(fingerprint="same", dtype="int8", block_size=16, num_layers=3, num_kv_heads=2, head_dim=32)
PAGE_BYTES = 2 * record_size(32, 1)
TIMEOUT_S = 120.0

Report = TypeVar("Report")
_numbers = itertools.count()


class Instance:
    """Blocks are filled from a seed, so that any byte out of place shows."""

    def __init__(
        self,
        backend: str | None = None,
        *,
        num_blocks: int = 40,
        key: str = "",
        layout: KvLayout = LAYOUT,
        seed: int = 0,
        memory_fd: int | None = None,
        writer_token_fd: int | None = None,
    ) -> None:
        """`memory_fd`: of memory that outlives this process; `writer_token_fd`: what its writers keep open."""
        pool = allocate_kv_pool(
            CONFIG, np.dtype(np.int8), num_blocks, 16, is_shared=backend is not None, memory_fd=memory_fd
        )
        self.bytes, self.geometry = pool.data, pool.geometry
        assert self.geometry.page_bytes == PAGE_BYTES
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.bytes.size, np.uint8)
        self.num_layers_done = 0
        number = next(_numbers)
        engines, workers = make_private_address(f"test-{number}-{time.monotonic_ns()}")
        self._wires, plane_wires = SocketPoller(), SocketPoller()
        self._port = self._wires.engine_kv_wire_end(engines)
        self.plane = KvTransferThread(
            KvMemoryRegion(self.bytes, pool.fd, self.geometry, layout, writer_token_fd),
            backend=backend,
            host="127.0.0.1",
            incarnation=f"worker-{number}",
            cluster_key=key,
            layers_done=lambda: self.num_layers_done,
        )
        self.plane.start(plane_wires, plane_wires.worker_kv_wire_end(workers))
        self.reports: list[KvReport] = []

    @property
    def endpoint(self) -> KvEndpoint:
        assert self.plane.endpoint is not None
        return self.plane.endpoint

    def tell(self, command: KvCommand) -> None:
        self._port.send(command)

    def hear(self, kind: type[Report], lease_id: str = "lease") -> Report:
        """Waits for a report; others that come before it are kept."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            for report in self.reports:
                if isinstance(report, kind) and report.lease_id == lease_id:
                    self.reports.remove(report)
                    return report
            self._wires.wait(100)
            while (report := self._port.receive()) is not None:
                self.reports.append(report)
        raise AssertionError(f"no {kind.__name__} of {lease_id}, but {self.reports}")

    def expect(self, block_ids: list[int], lease_id: str = "lease", *, checksums: bool = True) -> None:
        self.tell(ExpectWrites(lease_id, block_ids, checksums))
        self.hear(ExpectingWrites, lease_id)

    def push(self, to: KvEndpoint, block_ids: Iterable[int], lease_id: str = "lease", **more: Any) -> None:
        fields = {"first_block": 0, "checksums": True} | more
        self.plane.open_push(KvPush(lease_id, to, block_ids=list(block_ids), **fields))
        self.plane.wake()

    def feed(
        self, source_ids: list[int], lease_id: str = "lease", *, first: int = 0, before: int | None = None
    ) -> None:
        self.plane.send_computed(ComputedBlocks(lease_id, first, source_ids, before))
        self.plane.wake()

    def block(self, block: int) -> np.ndarray:
        """Its pages, layer by layer."""
        return self.bytes.reshape(self.geometry.num_layers, self.geometry.num_blocks, -1)[:, block].copy()

    def checksums(self, blocks: Iterable[int]) -> list[int]:
        return [block_checksum(self.bytes.data, self.geometry, block) for block in blocks]

    def close(self) -> None:
        self.plane.close()
        self._wires.close()


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread or process does to memory without a message."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it does not happen"
        time.sleep(0.001)
