"""The backends by name. nixl is an extra, and imported only when it is asked for."""

import importlib.util
import os

import numpy as np

from onward.errors import StartupError
from onward.worker.transfer.backend import Invitation, Receiver, TransferFailed, Writer
from onward.worker.transfer.channel import Channel
from onward.worker.transfer.shm import ShmReceiver, ShmWriter
from onward.worker.transfer.tcp import TcpReceiver, TcpWriter

IN_BAND = frozenset({"tcp"})
"""Those whose bytes travel on the link: the receiver itself writes its memory, and can stop at once."""
EXPELLING = frozenset({"nixl"})
"""Those that can shut a writer out without its help. `shm` cannot: what is mapped stays mapped."""
_NOBODY = 0
"""Writers are numbered from 1."""
_NEEDS_NIXL = "--kv-backend nixl needs the nixl package: pip install 'nixl>=1.0'"


def open_receiver(backend: str, memory: np.ndarray, memory_fd: int | None, host: str) -> Receiver:
    """`memory` is the whole pool, as bytes; `memory_fd` is what it is mapped from, for `shm`; `host` is where peers
    reach us."""
    match backend:
        case "shm":
            assert memory_fd is not None, "a worker that takes KV in through shm has a pool that can be shared"
            return ShmReceiver(memory_fd, memory.nbytes)
        case "tcp":
            return TcpReceiver()
        case "nixl":
            return _open_nixl_receiver(memory, host)
        case _:
            raise StartupError(f"--kv-backend {backend} is none of shm, tcp and nixl")


def open_writer(backend: str, memory: np.ndarray, invitation: Invitation, channel: Channel) -> Writer:
    """Takes over the invitation's file descriptors. Raises `TransferFailed`."""
    if backend != "shm":
        for fd in invitation.fds:
            os.close(fd)
    match backend:
        case "shm":
            return ShmWriter(memory, invitation)
        case "tcp":
            return TcpWriter(memory, channel)
        case "nixl":
            if not _has_nixl():
                raise TransferFailed(_NEEDS_NIXL)
            from onward.worker.transfer.nixl import NixlWriter

            try:
                return NixlWriter(memory, invitation.data)
            except StartupError as error:
                raise TransferFailed(error.message) from error
        case _:
            raise TransferFailed(f"the peer's backend {backend!r} is none of shm, tcp and nixl")


def _open_nixl_receiver(memory: np.ndarray, host: str) -> Receiver:
    if not _has_nixl():
        raise StartupError(_NEEDS_NIXL)
    from onward.worker.transfer.nixl import NixlReceiver

    receiver = NixlReceiver(memory, host)
    try:
        receiver.invite(_NOBODY)  # what cannot work shall show now, not with the first peer
    except TransferFailed as fault:
        raise StartupError(f"--kv-backend nixl does not work here: {fault}") from fault
    receiver.expel(_NOBODY)
    return receiver


def _has_nixl() -> bool:
    return importlib.util.find_spec("nixl") is not None
