import gc
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import onward.pd.transfer.nixl_backend as nixl_backend
from onward.errors import StartupError
from onward.pd.transfer.backend import MemoryCopy, TransferFailed
from onward.pd.transfer.nixl_backend import NixlReceiverBackend, NixlSenderBackend
from tests.pd.transfer.nixl_peer import map_memory

MIB = 1 << 20
WRITERS = itertools.count()


def random_memory(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def scattered_copies(num_bytes: int, piece: int, seed: int = 0) -> list[MemoryCopy]:
    """Every piece of the memory goes to some other place."""
    rng = np.random.default_rng(seed)
    num_pieces = num_bytes // piece
    pairs = zip(rng.permutation(num_pieces).tolist(), rng.permutation(num_pieces).tolist(), strict=True)
    return [MemoryCopy(source * piece, target * piece, piece) for source, target in pairs]


def copied(source: np.ndarray, target: np.ndarray, copies: list[MemoryCopy]) -> np.ndarray:
    expected = target.copy()
    for copy in copies:
        expected[copy.target_offset :][: copy.num_bytes] = source[copy.source_offset :][: copy.num_bytes]
    return expected


def wait_for(writer: NixlSenderBackend, num_batches: int) -> None:
    """Bounded by the writer's own deadline."""
    while writer.poll() < num_batches:
        os.sched_yield()


def write_until_it_fails(writer: NixlSenderBackend, copies: list[MemoryCopy]) -> None:
    for number in itertools.count(writer.poll() + 1):
        writer.start(copies)
        wait_for(writer, number)


class Peer:
    """Another process, and a view of its KV memory."""

    def __init__(self, role: str, num_bytes: int) -> None:
        fd = os.memfd_create("kv")
        os.ftruncate(fd, num_bytes)
        self.memory = map_memory(fd, num_bytes)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.pd.transfer.nixl_peer", role, str(fd), str(num_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[fd],
            text=True,
        )
        os.close(fd)

    def ask(self, order: str) -> str:
        assert self.process.stdin
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def peer_process(role: str, num_bytes: int) -> Iterator[Peer]:
    peer = Peer(role, num_bytes)
    try:
        yield peer
    finally:
        peer.kill()


@pytest.fixture(scope="module")
def receiving_peer() -> Iterator[Peer]:
    """Takes any number of writers."""
    with peer_process("receive", 32 * MIB) as peer:
        yield peer


@pytest.fixture(scope="module")
def writing_peer() -> Iterator[Peer]:
    """Accepts one invitation after the other."""
    with peer_process("write", 16 * MIB) as peer:
        yield peer


def invitation_of(peer: Peer) -> bytes:
    return bytes.fromhex(peer.ask(str(next(WRITERS))))


@contextmanager
def pair(source: np.ndarray, target: np.ndarray) -> Iterator[tuple[NixlReceiverBackend, NixlSenderBackend]]:
    """Both ends in this process."""
    receiver = NixlReceiverBackend(target, "127.0.0.1")
    writer = NixlSenderBackend(source, receiver.register_sender(1).data)
    try:
        yield receiver, writer
    finally:
        writer.close()
        receiver.close()


@pytest.mark.parametrize("piece", [7, 6528, 65536, 300_007])
def test_scattered_bytes_arrive_where_they_were_sent_and_nowhere_else(piece: int) -> None:
    source, target = random_memory(MIB, 1), random_memory(MIB, 2)
    copies = scattered_copies(MIB, piece, seed=3)[:2000:2]
    expected = copied(source, target, copies)
    with pair(source, target) as (_, writer):
        writer.start(copies)
        wait_for(writer, 1)
        assert np.array_equal(target, expected)


def test_batches_in_flight_complete_in_order_each_with_its_bytes() -> None:
    source, target = random_memory(8 * MIB), np.zeros(8 * MIB, np.uint8)
    copies = scattered_copies(8 * MIB, 65536)
    batches = [copies[at : at + 16] for at in range(0, len(copies), 16)]
    with pair(source, target) as (_, writer):
        for batch in batches:
            writer.start(batch)
        writer.start([])
        num_seen = 0
        while num_seen < len(batches) + 1:
            num_complete = writer.poll()
            for batch in batches[num_seen:num_complete]:
                for copy in batch:
                    sent = source[copy.source_offset :][: copy.num_bytes]
                    assert np.array_equal(target[copy.target_offset :][: copy.num_bytes], sent)
            assert num_complete >= num_seen
            num_seen = num_complete


def test_a_batch_that_is_complete_lies_in_the_other_process_at_that_moment(receiving_peer: Peer) -> None:
    source = np.zeros(MIB, np.uint8)
    rng = np.random.default_rng(0)
    writer = NixlSenderBackend(source, invitation_of(receiving_peer))
    for number in range(1, 500):
        num_bytes = int(rng.integers(1, 100_000))
        at, target_at = (int(rng.integers(0, MIB - num_bytes)) for _ in range(2))
        source[at : at + num_bytes] = number % 251
        writer.start([MemoryCopy(at, target_at, num_bytes)])
        wait_for(writer, number)
        assert (receiving_peer.memory[target_at : target_at + num_bytes] == number % 251).all()
    writer.close()


def test_an_expelled_writer_that_writes_on_changes_nothing_and_learns_of_it(writing_peer: Peer) -> None:
    memory = np.zeros(16 * MIB, np.uint8)
    receiver = NixlReceiverBackend(memory)
    assert writing_peer.ask(receiver.register_sender(1).data.hex()) == "wrote"
    receiver.unregister_sender(1)
    left = memory.copy()
    assert "nixl" in writing_peer.hear()
    assert np.array_equal(memory, left)


def test_an_expelled_writer_that_was_stuck_changes_nothing_when_it_wakes_up(writing_peer: Peer) -> None:
    memory = np.zeros(16 * MIB, np.uint8)
    receiver = NixlReceiverBackend(memory)
    assert writing_peer.ask(receiver.register_sender(1).data.hex()) == "wrote"
    os.kill(writing_peer.process.pid, signal.SIGSTOP)
    receiver.unregister_sender(1)
    left = memory.copy()
    os.kill(writing_peer.process.pid, signal.SIGCONT)
    assert "nixl" in writing_peer.hear()
    assert np.array_equal(memory, left)


def test_a_writer_that_is_killed_can_be_expelled_and_the_others_go_on() -> None:
    source, memory = random_memory(MIB), np.zeros(MIB, np.uint8)
    receiver = NixlReceiverBackend(memory)
    healthy = NixlSenderBackend(source, receiver.register_sender(2).data)
    with peer_process("write", MIB) as peer:
        assert peer.ask(receiver.register_sender(1).data.hex()) == "wrote"
        peer.kill()
        receiver.unregister_sender(1)
    healthy.start([MemoryCopy(0, 0, MIB)])
    wait_for(healthy, 1)
    assert np.array_equal(memory, source)
    healthy.close()
    receiver.close()


def test_a_receiver_that_is_killed_in_mid_transfer_fails_the_writer() -> None:
    source = random_memory(32 * MIB)
    with peer_process("receive", 32 * MIB) as peer:
        writer = NixlSenderBackend(source, invitation_of(peer))
        copies = scattered_copies(32 * MIB, 6528)
        writer.start(copies)
        peer.kill()
        with pytest.raises(TransferFailed):
            write_until_it_fails(writer, copies)
        with pytest.raises(TransferFailed):
            writer.start([MemoryCopy(0, 0, 1)])
        writer.close()


def test_a_receiver_that_hangs_fails_the_writer_at_its_deadline(
    receiving_peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(receiving_peer) as writer:
        monkeypatch.setattr(nixl_backend, "STALL_TIMEOUT_S", 0.1)
        monkeypatch.setattr(nixl_backend, "MIN_BYTES_PER_S", 1e12)
        start_a_batch_that_hangs(writer, receiving_peer)
        with pytest.raises(TransferFailed, match="does not take the bytes"):
            wait_for(writer, 2)


@contextmanager
def connected(peer: Peer) -> Iterator[NixlSenderBackend]:
    """A writer that has one complete batch. The peer goes on afterwards if it was stopped."""
    writer = NixlSenderBackend(random_memory(32 * MIB), invitation_of(peer))
    writer.start([MemoryCopy(0, 0, 1)])
    wait_for(writer, 1)
    try:
        yield writer
    finally:
        writer.close()
        os.kill(peer.process.pid, signal.SIGCONT)


def start_a_batch_that_hangs(writer: NixlSenderBackend, peer: Peer) -> None:
    os.kill(peer.process.pid, signal.SIGSTOP)
    writer.start(scattered_copies(32 * MIB, 6528))


@pytest.mark.parametrize(
    "copy", [MemoryCopy(MIB - 1, 0, 2), MemoryCopy(0, MIB - 1, 2), MemoryCopy(0, -1, 2), MemoryCopy(0, 0, 0)]
)
def test_a_copy_outside_of_either_memory_fails_before_it_moves_anything(copy: MemoryCopy) -> None:
    source, target = random_memory(MIB), np.zeros(MIB, np.uint8)
    with pair(source, target) as (_, writer), pytest.raises(TransferFailed, match="outside"):
        writer.start([MemoryCopy(0, 0, 10), copy])
    assert not target.any()


def test_an_invitation_that_makes_no_sense_is_refused() -> None:
    memory = np.zeros(MIB, np.uint8)
    with pytest.raises(TransferFailed, match="invitation"):
        NixlSenderBackend(memory, b"nonsense")
    receiver = NixlReceiverBackend(memory)
    invitation = receiver.register_sender(1).data
    receiver.close()
    with pytest.raises(TransferFailed):
        wait_for(started(NixlSenderBackend(memory, invitation)), 1)


def started(writer: NixlSenderBackend) -> NixlSenderBackend:
    writer.start([MemoryCopy(0, 0, 1)])
    return writer


@pytest.mark.parametrize("transports", ["all", "tcp,cma", "^cma", "^shm", "\\shm,tcp"])
def test_transports_that_go_past_the_receiver_are_refused(transports: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    with pytest.raises(StartupError, match="UCX_TLS"):
        NixlReceiverBackend(np.zeros(MIB, np.uint8))


def test_a_person_may_choose_among_the_other_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, target = random_memory(MIB), np.zeros(MIB, np.uint8)
    with pair(source, target) as (_, writer):
        writer.start([MemoryCopy(0, 0, MIB)])
        wait_for(writer, 1)
        assert np.array_equal(target, source)


def test_nothing_is_left_behind_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    source, target = random_memory(8 * MIB), np.zeros(8 * MIB, np.uint8)
    with pair(source, target):
        pass  # What UCX sets up once in a process is there after this.
    before = left_behind()
    with pair(source, target) as (receiver, writer):
        copies = scattered_copies(8 * MIB, 6528)
        writer.start(copies)
        receiver.unregister_sender(1)
        with pytest.raises(TransferFailed):
            write_until_it_fails(writer, copies)
    assert not left_behind() - before
    assert capfd.readouterr() == ("", "")


def left_behind() -> set[str]:
    """Threads, open files and shared memory. Those of others in this process may end meanwhile, but none begins."""
    gc.collect()
    threads = {f"thread {path.name}" for path in Path("/proc/self/task").iterdir()}
    files = {f"file {path.name}" for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    return threads | files | {path.name for path in Path("/dev/shm").glob("ucx*")}
