"""Starts a worker: its process, those of its other ranks, and a writer token for peers that map its KV memory."""

import msgspec

from onward.proto.control import StartWorker
from onward.supervisor.child_process import ChildProcess, spawn
from onward.supervisor.children import ProcessRole
from onward.supervisor.pd_config import PdConfig
from onward.supervisor.peer_writer_watch import PeerWriterWatch
from onward.supervisor.rank_process import spawn_ranks


def spawn_worker(role: ProcessRole, start: StartWorker, inherit_fds: tuple[int, ...], pd: PdConfig) -> ChildProcess:
    """Starts all processes of a worker and sends `start` to it. Raises `OSError` if the system refuses; nothing is left
    running then."""
    with spawn_ranks(start.config.tensor_parallel) as (ranks, rank_fds):
        start = msgspec.structs.replace(start, rank_fds=rank_fds)
        process = _spawn_leader(role, start, (*inherit_fds, *rank_fds), pd)
    process.ranks = ranks
    return process


def _spawn_leader(role: ProcessRole, start: StartWorker, inherit_fds: tuple[int, ...], pd: PdConfig) -> ChildProcess:
    if pd.kv_backend != "shm" or not start.kv_memory:
        process = spawn(role, inherit_fds)
        _send_start(process, start)
        return process
    watch = PeerWriterWatch()
    try:
        process = spawn(role, (*inherit_fds, watch.token_fd))
    except OSError:
        watch.close()
        raise
    process.peer_writers = watch
    _send_start(process, msgspec.structs.replace(start, writer_token_fd=watch.token_fd))
    watch.close_token()
    return process


def _send_start(process: ChildProcess, start: StartWorker) -> None:
    try:
        process.send(start)
    except OSError:
        process.discard()
        raise
