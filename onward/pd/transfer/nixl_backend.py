"""KV over nixl, which moves bytes with UCX: RDMA where there is a NIC for it, else TCP.

A receiver makes one nixl agent for each writer, so that destroying the agent ends that writer and no other. This holds
only for transports where bytes arrive through the receiver's own sockets or queue pairs, which end with its agent. Over
shared memory, CMA or CUDA IPC a writer reaches the pages directly, even without the agent, so these are refused.

A batch is complete when UCX has flushed it, which is when the peer (its NIC, for RDMA) has confirmed that the bytes are
in its memory. Releasing a nixl handle in flight stops nothing. To make sure that a writer has stopped, wait for its
batches, or shut it out.

UCX has no authentication of its own: a host that reaches an agent's TCP port can write anywhere in the agent's process.
So agents for peers on this host listen on the loopback device only. For other peers, this backend needs a network that
only the cluster uses.

This module knows bytes and offsets, and nothing of blocks, requests or leases.
"""

import contextlib
import importlib
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np

from onward.config import set_ucx_environment
from onward.errors import StartupError
from onward.pd.transfer.backend import MemoryCopy, RemoteMemoryInfo, TransferFailed

# UCX reports the death of a peer at once, because its connections are reset. These bounds are for a peer that falls
# silent.
STALL_TIMEOUT_S = 10.0
MIN_BYTES_PER_S = 10e6

# The agent's thread wakes up for bytes, and also polls at this interval. With nixl's own default, 0, it spins and takes
# a core for itself.
_PROGRESS_INTERVAL_US = 10_000

# Names in `UCX_TLS` of transports by which a writer could reach our pages directly.
_DIRECT_TRANSPORTS = frozenset({"all", "shm", "sm", "mm", "posix", "sysv", "xpmem", "knem", "cma", "cuda", "cuda_ipc"})


class _NixlRemoteMemory(msgspec.Struct, frozen=True):
    """The contents of an invitation."""

    metadata: bytes
    base: int
    num_bytes: int
    loopback: bool


class _NixlTransfer(NamedTuple):
    handle: int | None
    """None: there was nothing to move."""
    num_bytes: int


class NixlReceiverBackend:
    """`host` is the address for writers: if it is a loopback address, writers on other hosts cannot connect."""

    def __init__(self, memory: np.ndarray, host: str = "") -> None:
        _bindings()  # A fault of the installation shows when the worker starts, not when a writer connects.
        self._memory = memory
        self._loopback = host == "localhost" or host.startswith("127.")
        self._agents: dict[int, _NixlAgent] = {}

    def register_sender(self, sender_id: int) -> RemoteMemoryInfo:
        assert sender_id not in self._agents, "a writer has one agent"
        agent = self._agents[sender_id] = _NixlAgent(self._memory, self._loopback)
        pool = _NixlRemoteMemory(agent.metadata, agent.base, agent.num_bytes, self._loopback)
        return RemoteMemoryInfo(msgspec.msgpack.encode(pool))

    def unregister_sender(self, sender_id: int) -> None:
        if agent := self._agents.pop(sender_id, None):
            agent.destroy()

    def close(self) -> None:
        for sender_id in list(self._agents):
            self.unregister_sender(sender_id)


class NixlSenderBackend:
    """Has an agent of its own, so that destroying it when a peer is stuck ends no batches to other peers.

    After a failure the agent is destroyed. Our memory is no longer read, but bytes in flight may still arrive until the
    peer shuts this writer out. So the owner must end the connection then, and must not report the push as quiesced.
    """

    def __init__(self, memory: np.ndarray, invitation: bytes) -> None:
        try:
            self._peer = msgspec.msgpack.decode(invitation, type=_NixlRemoteMemory)
        except msgspec.MsgspecError as error:
            raise TransferFailed(f"the nixl invitation cannot be read: {error}") from error
        self._in_flight: deque[_NixlTransfer] = deque()
        self._num_complete = 0
        self._due_s = 0.0
        self._failure: str | None = None
        self._agent = _NixlAgent(memory, self._peer.loopback)
        try:
            self._peer_name = self._agent.connect(self._peer.metadata)
        except TransferFailed:
            self._agent.destroy()
            raise

    def start(self, copies: Sequence[MemoryCopy]) -> None:
        """Sends for as long as the peer takes the bytes without delay; the rest is sent between calls. Other Python
        threads run in the meantime."""
        self._check_failure()
        batch = self._post(copies) if copies else _NixlTransfer(None, 0)
        self._in_flight.append(batch)
        if len(self._in_flight) == 1:
            self._due_s = _due_s(batch)

    def poll(self) -> int:
        self._check_failure()
        while self._in_flight and self._is_complete(self._in_flight[0]):
            self._in_flight.popleft()
            self._num_complete += 1
            if self._in_flight:
                self._due_s = _due_s(self._in_flight[0])
        if self._in_flight and time.monotonic() > self._due_s:
            self._fail("the peer does not take the bytes")
        return self._num_complete

    def close(self) -> None:
        if self._failure is None:
            self._end("this writer is closed")

    def _post(self, copies: Sequence[MemoryCopy]) -> _NixlTransfer:
        sources, targets, sizes = np.array(copies, dtype=np.int64).T
        if not (_fit(sources, sizes, self._agent.num_bytes) and _fit(targets, sizes, self._peer.num_bytes)):
            self._fail("a copy lies outside of the KV memory")
        try:
            handle = self._agent.write(
                self._peer_name,
                _descriptors(self._agent.base + sources, sizes),
                _descriptors(self._peer.base + targets, sizes),
            )
        except TransferFailed as failure:
            self._fail(str(failure))
        return _NixlTransfer(handle, int(sizes.sum()))

    def _is_complete(self, batch: _NixlTransfer) -> bool:
        try:
            return batch.handle is None or self._agent.finish(batch.handle)
        except TransferFailed as failure:
            self._fail(str(failure))

    def _check_failure(self) -> None:
        if self._failure is not None:
            raise TransferFailed(self._failure)

    def _fail(self, reason: str) -> NoReturn:
        self._end(reason)
        raise TransferFailed(reason)

    def _end(self, reason: str) -> None:
        self._failure = reason
        self._in_flight.clear()
        self._agent.destroy()


class _NixlAgent:
    """A nixl agent for one connection, with the KV memory registered.

    Uses nixl's bindings instead of its Python classes, which let the agent's thread spin, write to stdout, and return
    objects that keep the agent alive. All of nixl's exceptions become `TransferFailed`, without the original exception,
    whose traceback would keep the agent alive too.
    """

    def __init__(self, memory: np.ndarray, loopback: bool) -> None:
        assert memory.flags.c_contiguous, "the pool is one range of memory"
        assert memory.dtype == np.uint8, "the pool is an array of bytes"
        self.base: int = memory.ctypes.data
        self.num_bytes = memory.nbytes
        self._memory = memory
        self._handles: set[int] = set()
        self._nixl = _bindings()
        self._agent: Any = None
        self._backends: list[Any] = []
        try:
            self._open({"engine_config": "NET_DEVICES=lo"} if loopback else {})
        except Exception as error:
            failure = _error_text(error)
        else:
            return
        self._agent = None
        raise TransferFailed(f"nixl cannot be set up: {failure}")

    def _open(self, ucx_options: dict[str, str]) -> None:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True  # TCP bytes arrive when the receiver's UCX reads them; no other code polls there.
        config.pthrDelay = _PROGRESS_INTERVAL_US
        config.useListenThread = False
        config.captureTelemetry = False
        self._agent = self._nixl.nixlAgent(uuid.uuid4().hex, config)
        self._backends = [self._agent.createBackend("UCX", ucx_options)]
        memory = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(self.base, self.num_bytes, 0, "")])
        self._agent.registerMem(memory, self._backends)
        self.metadata: bytes = self._agent.getLocalMD()

    def connect(self, metadata: bytes) -> str:
        """Returns the peer's name."""
        try:
            name = self._agent.loadRemoteMD(metadata)
        except Exception as error:
            failure = _error_text(error)
        else:
            return name.decode() if isinstance(name, bytes) else name
        raise TransferFailed(f"nixl cannot use the peer's invitation: {failure}")

    def write(self, peer: str, local: np.ndarray, remote: np.ndarray) -> int:
        """Starts to write, and returns the handle for `finish`."""
        dram = self._nixl.DRAM_SEG
        try:
            handle = self._agent.createXferReq(
                self._nixl.NIXL_WRITE,
                self._nixl.nixlXferDList(dram, local),
                self._nixl.nixlXferDList(dram, remote),
                peer,
                b"",
                self._backends,
            )
            self._handles.add(handle)
            self._agent.postXferReq(handle, b"")
        except Exception as error:
            failure = _error_text(error)
        else:
            return handle
        raise TransferFailed(f"nixl cannot write to the peer: {failure}")

    def finish(self, handle: int) -> bool:
        """Returns whether the transfer is complete. If so, `handle` is released."""
        assert handle in self._handles, "a transfer that is polled was posted and not released"
        try:
            status = self._agent.getXferStatus(handle)
            if status == self._nixl.NIXL_SUCCESS:
                self._agent.releaseXferReq(handle)
        except Exception as error:
            failure = _error_text(error)
        else:
            if status == self._nixl.NIXL_SUCCESS:
                self._handles.remove(handle)
            return status == self._nixl.NIXL_SUCCESS
        raise TransferFailed(f"nixl has lost the peer: {failure}")

    def destroy(self) -> None:
        """Ends the agent's thread, connections and registrations before it returns, because nothing else refers to the
        agent."""
        for handle in self._handles:
            with contextlib.suppress(Exception):
                self._agent.releaseXferReq(handle)
        self._handles.clear()
        self._agent = None


def _bindings() -> Any:
    transports = set_ucx_environment()
    if _reaches_past_receiver(transports):
        raise StartupError(
            f"UCX_TLS={transports} lets a peer write KV after it was shut out; leave shared memory and CUDA IPC out of it"
        )
    try:
        return importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise StartupError(f"kv_backend nixl needs the nixl package (pip install 'nixl>=1.0'): {error}") from error


def _reaches_past_receiver(transports: str) -> bool:
    """Returns whether `UCX_TLS` allows a transport that bypasses the receiver. Its value is a list of allowed
    transports, or `^` and a list of forbidden ones."""
    names = set(transports.removeprefix("^").replace("\\", "").split(","))
    if transports.startswith("^"):
        return not (names & {"shm", "sm"} and "cuda_ipc" in names)
    return bool(names & _DIRECT_TRANSPORTS)


def _due_s(batch: _NixlTransfer) -> float:
    """Returns when this batch, now the oldest in flight, must be complete."""
    return time.monotonic() + STALL_TIMEOUT_S + batch.num_bytes / MIN_BYTES_PER_S


def _fit(offsets: np.ndarray, sizes: np.ndarray, num_bytes: int) -> bool:
    return bool(offsets.min() >= 0 and sizes.min() > 0 and (offsets + sizes).max() <= num_bytes)


def _descriptors(addresses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns rows of address, length and device."""
    return np.stack([addresses, sizes, np.zeros_like(sizes)], axis=1).astype(np.uint64)


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__
