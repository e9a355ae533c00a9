"""The backends by name. nixl is an optional package, and imported only when it is used."""

import importlib.util
import os

import numpy as np

from onward.errors import StartupError
from onward.pd.transfer.backend import ReceiverBackend, RemoteMemoryInfo, SenderBackend, TransferFailed
from onward.pd.transfer.framed_channel import FramedChannel
from onward.pd.transfer.shm_backend import ShmReceiverBackend, ShmSenderBackend
from onward.pd.transfer.tcp_backend import TcpReceiverBackend, TcpSenderBackend

IN_BAND = frozenset({"tcp"})
"""Backends whose bytes travel on the link: the receiver itself writes its memory, and can stop at once."""
CAN_SHUT_OUT_SENDERS = frozenset({"nixl"})
"""Backends that can shut a writer out without its cooperation. `shm` cannot, because the writer keeps its mapping."""
_TRIAL_SENDER = 0
"""Id for a test at the start; writers are numbered from 1."""
_NEEDS_NIXL = "--kv-backend nixl needs the nixl package: pip install 'nixl>=1.0'"


def open_receiver_backend(
    backend: str, memory: np.ndarray, memory_fd: int | None, host: str, writer_token_fd: int | None = None
) -> ReceiverBackend:
    """Opens the backend of a decode worker. `memory` is the whole pool, as bytes. `host` is the address at which peers
    reach this worker. For `shm`, `memory_fd` is the file that the pool is mapped from, and `writer_token_fd` is the
    file that peers keep open while they have it mapped."""
    match backend:
        case "shm":
            assert memory_fd is not None, "a worker that takes KV in through shm has a pool that can be shared"
            return ShmReceiverBackend(memory_fd, memory.nbytes, writer_token_fd)
        case "tcp":
            return TcpReceiverBackend()
        case "nixl":
            return _open_nixl_receiver(memory, host)
        case _:
            raise StartupError(f"--kv-backend {backend} is not one of shm, tcp and nixl")


def open_sender_backend(
    backend: str, memory: np.ndarray, invitation: RemoteMemoryInfo, channel: FramedChannel
) -> SenderBackend:
    """Opens the backend of a prefill worker. Takes over the invitation's file descriptors. Raises `TransferFailed`."""
    if backend != "shm":
        for fd in invitation.fds:
            os.close(fd)
    match backend:
        case "shm":
            return ShmSenderBackend(memory, invitation)
        case "tcp":
            return TcpSenderBackend(memory, channel)
        case "nixl":
            if not _has_nixl():
                raise TransferFailed(_NEEDS_NIXL)
            from onward.pd.transfer.nixl_backend import NixlSenderBackend

            try:
                return NixlSenderBackend(memory, invitation.data)
            except StartupError as error:
                raise TransferFailed(error.message) from error
        case _:
            raise TransferFailed(f"the peer's backend {backend!r} is not one of shm, tcp and nixl")


def _open_nixl_receiver(memory: np.ndarray, host: str) -> ReceiverBackend:
    if not _has_nixl():
        raise StartupError(_NEEDS_NIXL)
    from onward.pd.transfer.nixl_backend import NixlReceiverBackend

    receiver = NixlReceiverBackend(memory, host)
    try:
        receiver.register_sender(_TRIAL_SENDER)  # a fault shows now, not with the first peer
    except TransferFailed as fault:
        raise StartupError(f"--kv-backend nixl does not work here: {fault}") from fault
    receiver.unregister_sender(_TRIAL_SENDER)
    return receiver


def _has_nixl() -> bool:
    return importlib.util.find_spec("nixl") is not None
