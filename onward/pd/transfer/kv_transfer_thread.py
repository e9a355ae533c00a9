"""The thread of a worker process that moves KV: to peers, while the main thread computes it, and from peers.

Only this thread uses the sockets, the leases and the pushes. The main thread passes it work through a queue and never
waits for it; the engine sends it commands over the KV wire. A fault here that does not concern a single peer ends the
process, because a worker that computes but cannot move KV would hold blocks for ever.
"""

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onward import log
from onward.pd.transfer.authenticated_link import KvListenSocket
from onward.pd.transfer.backend_registry import CAN_SHUT_OUT_SENDERS, IN_BAND, open_receiver_backend
from onward.pd.transfer.handshake import ClusterSecret
from onward.pd.transfer.kv_receiver import KvReceiver
from onward.pd.transfer.kv_sender import KvSender
from onward.pd.transfer.kv_server import KvServer
from onward.pd.transfer.page_geometry import PageGeometry
from onward.pd.transfer.push_job import ComputedBlocks
from onward.pd.transfer.socket_reactor import SocketReactor
from onward.proto.kv_transfer import (
    EndLease,
    ExpectWrites,
    KvCommand,
    KvEndpoint,
    KvLayout,
    KvPush,
    KvReport,
    LeaseQuiesced,
    RevokeLease,
    StopPush,
)
from onward.transport.kv_wire import WorkerKvWireEnd
from onward.transport.zmq_sockets import SocketPoller

_TICK_MS = 200
"""How often deadlines are checked."""
_POLL_MS = 1
"""How often the layers of a running step are checked, and transfers whose progress no socket signals."""
_EXIT_CODE = 70
_CLOSE_TIMEOUT_S = 5.0
_COMMANDS_PER_TURN = 256

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvMemoryRegion:
    """A worker's pool, as the transfer thread sees it."""

    pool: np.ndarray
    """The whole pool, as bytes."""
    fd: int | None
    """The file that it is mapped from, if peers can map it too."""
    geometry: PageGeometry
    layout: KvLayout
    writer_token_fd: int | None = None
    """Given to each peer that maps the pool, which keeps it open for as long as it can write."""

    def __post_init__(self) -> None:
        assert self.pool.dtype == np.uint8, "the pool is an array of bytes"
        assert self.pool.ndim == 1, "the pool is one range of bytes"
        assert self.pool.nbytes == self.geometry.num_bytes, "the geometry covers the whole pool"
        assert self.geometry.num_layers == self.layout.num_layers, "the geometry and the layout have the same layers"


class _ReceiveSide:
    """The parts of a worker that let peers write into its memory."""

    def __init__(
        self, backend: str, host: str, port: int, incarnation: str, cluster_key: str, memory: KvMemoryRegion,
        reactor: SocketReactor, report: Callable[[KvReport], None],
    ) -> None:  # fmt: skip
        self._receiver = open_receiver_backend(backend, memory.pool, memory.fd, host, memory.writer_token_fd)
        listen_socket = KvListenSocket(backend, host, cluster_key, port)
        self.endpoint = KvEndpoint(backend, listen_socket.address, incarnation)
        self.receiver = KvReceiver(
            memory.pool.data, memory.geometry, self._receiver, is_in_band=backend in IN_BAND, report=report
        )
        self.server = KvServer(
            listen_socket,
            reactor,
            self.receiver,
            self._receiver,
            secret=ClusterSecret(cluster_key),
            incarnation=incarnation,
            layout=memory.layout,
            num_blocks=memory.geometry.num_blocks,
            can_expel=backend in CAN_SHUT_OUT_SENDERS,
            now_s=time.monotonic,
        )

    def close(self) -> None:
        self.server.close()
        self._receiver.close()


class KvTransferThread:
    """Moves KV in a thread that begins with `start`. `backend` is how peers write into this worker, None if they do
    not. `layers_done` returns how many layers the model has finished since its beginning; it is called while the
    model computes."""

    def __init__(
        self,
        memory: KvMemoryRegion,
        *,
        backend: str | None,
        host: str,
        port: int = 0,
        incarnation: str,
        cluster_key: str,
        layers_done: Callable[[], int],
    ) -> None:
        self._reactor = SocketReactor()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._reactor.watch(self._wake_read, self._drain_wakes)
        self._inbox: deque[KvPush | ComputedBlocks] = deque()
        self._is_leaving = False
        self._engine: WorkerKvWireEnd | None = None
        self._thread: threading.Thread | None = None
        self._sender = KvSender(
            memory.pool,
            memory.geometry,
            memory.layout,
            self._reactor,
            secret=ClusterSecret(cluster_key),
            has_key=bool(cluster_key),
            layers_done=layers_done,
            report=self._report,
            now_s=time.monotonic,
        )
        self._receive_side: _ReceiveSide | None = None
        if backend is not None:
            try:
                self._receive_side = _ReceiveSide(
                    backend, host, port, incarnation, cluster_key, memory, self._reactor, self._report
                )
            except BaseException:
                self._close_sockets()
                self._wake_write.close()
                raise

    @property
    def endpoint(self) -> KvEndpoint | None:
        """Where peers connect to write; None if they cannot."""
        return None if self._receive_side is None else self._receive_side.endpoint

    @property
    def num_connections(self) -> int:
        num_incoming = 0 if self._receive_side is None else self._receive_side.server.num_connections
        return self._sender.num_connections + num_incoming

    def open_push(self, push: KvPush) -> None:
        """Queues a push for this thread. The main thread calls it, like `send_computed` and `wake`."""
        self._inbox.append(push)

    def send_computed(self, computed: ComputedBlocks) -> None:
        self._inbox.append(computed)

    def wake(self) -> None:
        try:
            self._wake_write.send(b"!")
        except OSError:
            return  # the pipe is full, so the thread will wake up; or it has ended

    def start(self, wires: SocketPoller, engine: WorkerKvWireEnd) -> None:
        """Starts the thread. From now on both arguments belong to it."""
        assert self._thread is None, "the transfer thread is started once"
        wires.watch_fd(self._reactor.fileno())
        self._engine = engine
        self._thread = threading.Thread(target=self._run, args=(wires, engine), name="kv-plane", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all transfers and the thread, within a time limit."""
        self._is_leaving = True
        self.wake()
        if self._thread is not None:
            self._thread.join(timeout=_CLOSE_TIMEOUT_S)
        self._wake_write.close()

    def _run(self, wires: SocketPoller, engine: WorkerKvWireEnd) -> None:
        try:
            while not self._is_leaving:
                wires.wait(self._wait_ms())
                self._run_once(engine)
            self._close_transfers()
            wires.close()
        except BaseException:
            logger.critical(log.event("kv plane failed, the worker leaves"), exc_info=True)
            os._exit(_EXIT_CODE)

    def _close_transfers(self) -> None:
        self._sender.close()
        if self._receive_side is not None:
            self._receive_side.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._reactor.close()
        self._wake_read.close()

    def _run_once(self, engine: WorkerKvWireEnd) -> None:
        # Sockets come first, so that pages that have arrived are counted before any timeout is checked.
        self._reactor.dispatch()
        while self._inbox:
            match self._inbox.popleft():
                case KvPush() as push:
                    self._sender.open_push(push)
                case ComputedBlocks() as computed:
                    self._sender.send_computed(computed)
        for _ in range(_COMMANDS_PER_TURN):
            command = engine.receive()
            if command is None:
                break
            self._execute(command)
        self._sender.run_once()
        if self._receive_side is not None:
            self._receive_side.server.run_once()

    def _execute(self, command: KvCommand) -> None:
        match command:
            case StopPush(lease_id):
                self._sender.stop_push(lease_id)
            case ExpectWrites() | EndLease() | RevokeLease() if self._receive_side is not None:
                self._receive_side.receiver.execute(command)
            case RevokeLease(lease_id):
                self._report(LeaseQuiesced(lease_id))
            case _:
                raise AssertionError("a worker that receives no KV has no leases")

    def _wait_ms(self) -> int:
        if self._inbox or self._sender.can_start:
            return 0
        return _POLL_MS if self._sender.must_be_polled else _TICK_MS

    def _report(self, report: KvReport) -> None:
        if self._engine is not None:
            self._engine.send(report)

    def _drain_wakes(self) -> None:
        try:
            while self._wake_read.recv(4096):
                pass
        except BlockingIOError:
            return
