"""The processes of a worker's ranks with `--tensor-parallel`, beside rank 0, which is the worker's own process."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

_MODULE = "onward.worker.tensor_parallel.rank_main"


@dataclass(frozen=True, slots=True)
class RankProcess:
    rank: int
    process: "subprocess.Popen[bytes]"
    pidfd: int

    def discard(self) -> None:
        """Ends the process, waits until it is gone, and forgets it."""
        self.process.kill()
        self.process.wait()
        os.close(self.pidfd)


@contextmanager
def spawn_ranks(num_ranks: int) -> Iterator[tuple[list[RankProcess], list[int]]]:
    """Starts the ranks from 1 on. Yields them, and for each the socket that rank 0 inherits, which is closed afterwards.
    If the block fails, nothing is left running."""
    ranks: list[RankProcess] = []
    with ExitStack() as sockets:
        try:
            leader_fds: list[int] = []
            for rank in range(1, num_ranks):
                leader_end, rank_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sockets.enter_context(leader_end)
                with rank_end:
                    ranks.append(_spawn_rank(rank, rank_end.fileno()))
                leader_fds.append(leader_end.fileno())
            yield ranks, leader_fds
        except BaseException:
            for rank_process in ranks:
                rank_process.discard()
            raise


def _spawn_rank(rank: int, control_fd: int) -> RankProcess:
    process = subprocess.Popen(
        [sys.executable, "-m", _MODULE, "--control-fd", str(control_fd), "--supervisor-pid", str(os.getpid())],
        pass_fds=(control_fd,),
        stdin=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        return RankProcess(rank, process, os.pidfd_open(process.pid))
    except OSError:  # a process that cannot be watched is not kept
        process.kill()
        process.wait()
        raise
