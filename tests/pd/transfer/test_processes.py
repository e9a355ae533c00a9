"""Planes in processes that are killed and stopped: when a lease is quiet, and whom a silent peer holds up."""

import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from onward.proto.kv_transfer import (
    LeaseQuiesced,
    PushComplete,
    PushFailed,
    PushQuiesced,
    RevokeLease,
    StopPush,
    WriterLost,
    WritesComplete,
)
from tests.pd.transfer.instance import Instance, wait_until
from tests.pd.transfer.instance_process import InstanceProcess

MANY = 1500
"""Blocks whose bytes no socket buffers."""

Start = Callable[..., Instance]
Spawn = Callable[..., InstanceProcess]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    spawned: list[InstanceProcess] = []

    def make(backend: str = "") -> InstanceProcess:
        spawned.append(InstanceProcess(backend))
        return spawned[-1]

    yield make
    for process in spawned:
        process.close()


def begun(writer: InstanceProcess, theirs: Instance) -> np.ndarray:
    """A lease of blocks 0 and 1, of which the first has arrived."""
    before = theirs.block(0)
    theirs.expect([0, 1])
    writer.push(theirs.endpoint, [0, 1])
    writer.feed([8])
    source = Instance(num_blocks=1500, seed=7)
    try:
        expected = source.block(8)
    finally:
        source.close()
    assert (before != expected).any()
    wait_until(lambda: bool((theirs.block(0) == expected).all()))
    return expected


def whole_transfer(start: Start, theirs: Instance) -> None:
    """Makes a transfer from another instance. At its end, all earlier commands have been carried out."""
    other = start(seed=3)
    theirs.expect([30], "other")
    other.push(theirs.endpoint, [30], "other")
    other.feed([2], "other")
    assert other.hear(PushComplete, "other").checksums == theirs.hear(WritesComplete, "other").checksums


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_killed_writer_is_lost_and_its_lease_can_be_quiet(start: Start, spawn: Spawn, backend: str) -> None:
    theirs, writer = start(backend, seed=2), spawn()
    begun(writer, theirs)
    writer.signal(signal.SIGKILL)
    theirs.hear(WriterLost)
    before = theirs.block(1)
    theirs.tell(RevokeLease("lease"))
    theirs.hear(LeaseQuiesced)
    np.testing.assert_array_equal(theirs.block(1), before)
    whole_transfer(start, theirs)


def test_over_shm_a_stopped_writer_s_lease_is_not_quiet_until_it_is_dead(start: Start, spawn: Spawn) -> None:
    theirs, writer = start("shm", seed=2), spawn()
    begun(writer, theirs)
    writer.signal(signal.SIGSTOP)
    theirs.tell(RevokeLease("lease"))
    whole_transfer(start, theirs)
    assert theirs.reports == []
    writer.signal(signal.SIGKILL)
    theirs.hear(LeaseQuiesced)


def test_over_shm_a_stopped_writer_that_goes_on_stops_writing_before_its_lease_is_quiet(
    start: Start, spawn: Spawn
) -> None:
    theirs, writer = start("shm", seed=2), spawn()
    begun(writer, theirs)
    writer.signal(signal.SIGSTOP)
    theirs.tell(RevokeLease("lease"))
    whole_transfer(start, theirs)
    writer.signal(signal.SIGCONT)
    theirs.hear(LeaseQuiesced)
    before = theirs.block(1)
    writer.feed([9], first=1)
    whole = start(seed=4)
    theirs.expect([31], "last")
    whole.push(theirs.endpoint, [31], "last")
    whole.feed([1], "last")
    whole.hear(PushComplete, "last")
    np.testing.assert_array_equal(theirs.block(1), before)


def test_over_nixl_a_stopped_writer_is_shut_out(start: Start, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.pd.transfer.kv_receiver.STOP_TIMEOUT_S", 0.3)
    theirs, writer = start("nixl", seed=2), spawn()
    begun(writer, theirs)
    writer.signal(signal.SIGSTOP)
    theirs.tell(RevokeLease("lease"))
    theirs.hear(LeaseQuiesced)
    before = theirs.bytes.copy()
    writer.signal(signal.SIGCONT)
    writer.feed([9], first=1)
    whole_transfer(start, theirs)
    before.reshape(3, 40, -1)[:, 30] = theirs.block(30)
    np.testing.assert_array_equal(theirs.bytes, before)


def test_over_tcp_a_stopped_writer_s_lease_is_quiet_at_once(start: Start, spawn: Spawn) -> None:
    theirs, writer = start("tcp", seed=2), spawn()
    begun(writer, theirs)
    writer.signal(signal.SIGSTOP)
    theirs.tell(RevokeLease("lease"))
    theirs.hear(LeaseQuiesced)


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_stopped_receiver_holds_up_nobody_else_and_its_pushes_end(
    start: Start, spawn: Spawn, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.pd.transfer.push_session.PROGRESS_TIMEOUT_S", 0.5)
    ours, theirs, stuck = start(num_blocks=MANY, seed=1), start(backend, seed=2), spawn(backend)
    stuck.expect([0], "first")
    stuck.expect(list(range(1, MANY)))
    ours.push(stuck.endpoint, range(1, MANY))
    ours.push(stuck.endpoint, [0], "first")
    ours.feed([0], "first")
    ours.hear(PushComplete, "first")  # and so the other lease was joined, too
    stuck.signal(signal.SIGSTOP)
    ours.feed(list(range(1, MANY)))
    theirs.expect([3], "other")
    ours.push(theirs.endpoint, [3], "other")
    ours.feed([3], "other")
    assert ours.hear(PushComplete, "other").checksums == theirs.hear(WritesComplete, "other").checksums
    ours.push(stuck.endpoint, [5], "late")
    ours.tell(StopPush("late"))
    ours.hear(PushQuiesced, "late")
    assert "the peer has not moved" in ours.hear(PushFailed).message
    assert ours.plane.num_connections == 1


def test_a_receiver_that_is_stopped_before_it_lets_anybody_in_is_given_up(
    start: Start, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.pd.transfer.push_session.HANDSHAKE_TIMEOUT_S", 0.3)
    ours, stuck = start(), spawn("tcp")
    stuck.signal(signal.SIGSTOP)
    ours.push(stuck.endpoint, [0])
    assert "has not let us in" in ours.hear(PushFailed).message
