"""Workers of several ranks: processes as the supervisor starts them, or threads with weights that no file has."""

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from onward.proto.rank import RankReady, StartRank
from onward.supervisor.rank_process import spawn_ranks
from onward.transport.control_channel import ControlChannel
from onward.worker.tensor_parallel.rank_group import RankGroup
from onward.worker.tensor_parallel.rank_model import RankModel


@contextmanager
def ranks_in_processes(num_ranks: int) -> Iterator[RankGroup | None]:
    with spawn_ranks(num_ranks) as (processes, fds):
        ranks = RankGroup([os.dup(fd) for fd in fds]) if fds else None
    try:
        yield ranks
    finally:
        for process in processes:
            process.discard()


def ranks_in_threads(num_ranks: int, weights: Mapping[str, Any]) -> RankGroup:
    """They end with the device that uses them."""
    fds = []
    for _ in range(1, num_ranks):
        leader_end, rank_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds.append(leader_end.detach())
        threading.Thread(target=_run_rank, args=(rank_end.detach(), weights), daemon=True).start()
    return RankGroup(fds)


def _run_rank(fd: int, weights: Mapping[str, Any]) -> None:
    channel = ControlChannel(fd, StartRank)
    model = RankModel(channel.wait_receive(), weights, *channel.take_fds())
    channel.send(RankReady())
    model.follow()
    channel.close()
