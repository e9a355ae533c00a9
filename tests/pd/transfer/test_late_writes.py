"""A peer that writes late, to memory of a worker that is dead and whose memory is kept: real processes, for each backend.

The memory and the writer token are the test's, as they are the supervisor's.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP

import numpy as np
import pytest

from onward.pd.transfer.backend import RemoteMemoryInfo, TransferFailed
from onward.pd.transfer.shm_backend import ShmReceiverBackend, ShmSenderBackend
from onward.proto.kv_transfer import PushFailed
from onward.supervisor.peer_writer_watch import PeerWriterWatch
from onward.worker.kv_pool import allocate_kv_pool
from tests.pd.transfer.instance import CONFIG, Instance, wait_until
from tests.pd.transfer.instance_process import NUM_BLOCKS, InstanceProcess

A_MOMENT_S = 0.3
LONG_S = 60.0

Start = Callable[..., Instance]


@dataclass
class Kept:
    """Memory that outlives the workers that attach it."""

    fd: int = field(default_factory=lambda: os.memfd_create("onward-kv-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    watches: list[PeerWriterWatch] = field(default_factory=list)
    workers: list[InstanceProcess] = field(default_factory=list)

    def start_worker(self, backend: str) -> tuple[InstanceProcess, PeerWriterWatch]:
        """Peers may write to it."""
        watch = PeerWriterWatch()
        self.watches.append(watch)
        worker = InstanceProcess(backend, (self.fd, watch.token_fd))
        watch.close_token()
        self.workers.append(worker)
        return worker, watch

    def start_writer(self) -> InstanceProcess:
        self.workers.append(InstanceProcess())
        return self.workers[-1]

    def content(self) -> bytes:
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for watch in self.watches:
            watch.close()
        os.close(self.fd)


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.close()


def begin_push(kept: Kept, worker: InstanceProcess, writer: InstanceProcess) -> None:
    """A lease of blocks 0 and 1, of which the first has arrived."""
    before = kept.content()
    worker.expect([0, 1])
    writer.push(worker.endpoint, [0, 1])
    writer.feed([8])
    wait_until(lambda: kept.content() != before)


def num_mappings(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:onward-kv-test")


def test_over_shm_a_writer_that_is_stopped_may_write_until_it_has_noticed_the_death(kept: Kept) -> None:
    (worker, watch), writer = kept.start_worker("shm"), kept.start_writer()
    begin_push(kept, worker, writer)
    writer.signal(SIGSTOP)
    worker.signal(SIGKILL)
    assert not watch.wait_until_quiet(A_MOMENT_S)
    assert num_mappings(writer.pid) == 1
    writer.signal(SIGCONT)
    assert watch.wait_until_quiet(LONG_S)
    assert num_mappings(writer.pid) == 0
    before = kept.content()
    writer.feed([9], first=1)
    assert kept.content() == before


def test_over_shm_a_writer_that_is_dead_writes_no_more(kept: Kept) -> None:
    (worker, watch), writer = kept.start_worker("shm"), kept.start_writer()
    begin_push(kept, worker, writer)
    writer.signal(SIGSTOP)
    worker.signal(SIGKILL)
    assert not watch.wait_until_quiet(0.0)
    writer.signal(SIGKILL)
    assert watch.wait_until_quiet(LONG_S)


def test_over_shm_a_writer_that_runs_is_quiet_within_a_moment(kept: Kept) -> None:
    """So the death of a worker hardly ever costs its memory."""
    (worker, watch), writer = kept.start_worker("shm"), kept.start_writer()
    begin_push(kept, worker, writer)
    worker.signal(SIGKILL)
    assert watch.wait_until_quiet(LONG_S)


def test_over_shm_each_worker_has_a_token_of_its_own(kept: Kept) -> None:
    """The next worker, which has the same memory, is written to while the writers of the last one are watched."""
    (first, first_watch), writer = kept.start_worker("shm"), kept.start_writer()
    begin_push(kept, first, writer)
    first.signal(SIGKILL)
    assert first_watch.wait_until_quiet(LONG_S)
    second, second_watch = kept.start_worker("shm")
    other = kept.start_writer()
    begin_push(kept, second, other)
    assert first_watch.wait_until_quiet(0.0)
    assert not second_watch.wait_until_quiet(0.0)


@pytest.mark.parametrize("backend", ["tcp", "nixl"])
def test_without_a_mapping_nothing_is_written_any_more_when_the_worker_is_dead(
    start: Start, kept: Kept, backend: str
) -> None:
    (worker, watch), writer = kept.start_worker(backend), start(num_blocks=NUM_BLOCKS, seed=2)
    before = kept.content()
    worker.expect(list(range(NUM_BLOCKS)))
    writer.push(worker.endpoint, range(NUM_BLOCKS))
    writer.feed(list(range(10)))
    wait_until(lambda: kept.content() != before)
    worker.signal(SIGKILL)  # it is reaped
    assert watch.wait_until_quiet(0.0), "no peer has been given a token"
    dead = kept.content()
    writer.feed(list(range(10, NUM_BLOCKS)), first=10)
    writer.hear(PushFailed)
    assert kept.content() == dead


# What a writer does with the token.


def invitation_of(token_fd: int) -> RemoteMemoryInfo:
    """To sealed memory. Its file descriptors become the writer's."""
    pool = allocate_kv_pool(CONFIG, np.dtype(np.int8), 4, 16, is_shared=True)
    assert pool.fd is not None
    invitation = ShmReceiverBackend(pool.fd, pool.data.nbytes, token_fd).register_sender(1)
    return invitation._replace(fds=(os.dup(pool.fd), token_fd))


def test_a_writer_that_got_the_memory_without_the_token_does_not_map_it() -> None:
    """As when it has too many open files."""
    watch = PeerWriterWatch()
    invitation = invitation_of(watch.token_fd)
    with pytest.raises(TransferFailed, match="has not come whole"):
        ShmSenderBackend(np.zeros(8, np.uint8), invitation._replace(fds=invitation.fds[:1]))
    watch.close()


def test_a_writer_that_cannot_map_the_memory_gives_its_token_back() -> None:
    watch = PeerWriterWatch()
    invitation = invitation_of(os.dup(watch.token_fd))
    watch.close_token()
    with pytest.raises(TransferFailed):
        ShmSenderBackend(np.zeros(8, np.uint8), invitation._replace(data=b"?"))
    assert watch.wait_until_quiet(0.0)
    watch.close()


def test_a_writer_keeps_its_token_until_it_has_unmapped_the_memory() -> None:
    watch = PeerWriterWatch()
    backend = ShmSenderBackend(np.zeros(8, np.uint8), invitation_of(os.dup(watch.token_fd)))
    watch.close_token()
    assert not watch.wait_until_quiet(0.0)
    backend.close()
    assert watch.wait_until_quiet(0.0)
    watch.close()
