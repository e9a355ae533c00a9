"""A receiver and writers that say what a good one never would, or stop in the middle of it."""

import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from onward.errors import StartupError
from onward.pd.transfer.authenticated_link import KvListenSocket, SenderLink
from onward.pd.transfer.framed_channel import LinkClosed
from onward.pd.transfer.handshake import ClusterSecret
from onward.pd.transfer.transfer_messages import (
    AllPagesAccepted,
    AllPagesWritten,
    OpenPush,
    PagesWritten,
    PayloadHeader,
    PushOpened,
    StopWriting,
    WritingStopped,
)
from onward.proto.kv_transfer import KvEndpoint, LeaseQuiesced, RevokeLease, WriterLost, WritesComplete
from tests.pd.transfer.instance import LAYOUT, PAGE_BYTES, TIMEOUT_S, Instance

Start = Callable[..., Instance]
Visit = Callable[[KvEndpoint], "Visitor"]


class Visitor:
    """A writer's link, driven by hand."""

    def __init__(self, endpoint: KvEndpoint) -> None:
        self.link = SenderLink(endpoint, LAYOUT, ClusterSecret(""), False)
        self._heard: Iterator[Any] = iter(())

    def enter(self) -> None:
        while not self.link.is_connected:
            self.link.connect()
        while self.link.remote_memory is None:
            self._wait()
            assert list(self.link.messages()) == []

    def say(self, message: Any, data: bytes = b"") -> None:
        self.link.channel.send(message)
        self.say_bytes(data)

    def say_bytes(self, data: bytes) -> None:
        self.link.channel.send_payload([memoryview(data)] if data else [])
        while self.link.channel.wants_to_write:
            self.link.channel.flush()

    def hear(self) -> Any:
        while True:
            for message in self._heard:
                return message
            self._wait()
            self._heard = self.link.messages()

    def _wait(self) -> None:
        assert select.select([self.link.channel], [], [], TIMEOUT_S)[0], "the receiver says nothing"


@pytest.fixture
def visit() -> Iterator[Visit]:
    visitors: list[Visitor] = []

    def make(endpoint: KvEndpoint) -> Visitor:
        visitors.append(Visitor(endpoint))
        visitors[-1].enter()
        return visitors[-1]

    yield make
    for visitor in visitors:
        visitor.link.close()


def joined(theirs: Instance, visit: Visit, blocks: list[int]) -> Visitor:
    theirs.expect(blocks)
    visitor = visit(theirs.endpoint)
    visitor.say(OpenPush("lease", blocks))
    assert visitor.hear() == PushOpened("lease")
    return visitor


def test_bytes_of_a_lease_that_is_revoked_while_they_come_stay_outside(start: Start, visit: Visit) -> None:
    theirs = start("tcp", seed=2)
    visitor = joined(theirs, visit, [4])
    at = theirs.geometry.page_offset(0, 4)
    visitor.say(PayloadHeader("lease", [(at, PAGE_BYTES)]), b"x" * 100)
    deadline_s = time.monotonic() + TIMEOUT_S
    while theirs.bytes[at + 99] != ord("x"):
        assert time.monotonic() < deadline_s
    theirs.tell(RevokeLease("lease"))
    theirs.hear(LeaseQuiesced)
    before = theirs.bytes.copy()
    assert before[at : at + 100].tobytes() == b"x" * 100
    visitor.say_bytes(b"y" * (PAGE_BYTES - 100))
    assert visitor.hear() == StopWriting("lease", "it was revoked")
    visitor.say(PayloadHeader("lease", [(at, PAGE_BYTES)]), b"z" * PAGE_BYTES)
    assert visitor.hear() == StopWriting("lease", "it was revoked")
    np.testing.assert_array_equal(theirs.bytes, before)
    visitor.say(WritingStopped("lease"))
    theirs.expect([4], "next")
    visitor.say(OpenPush("next", [4]))
    assert visitor.hear() == PushOpened("next"), "the connection is still good for another lease"


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ((lambda g: (g.page_offset(0, 5), PAGE_BYTES)), "block 5 is not part of the lease"),
        ((lambda g: (g.page_offset(0, 4) + 1, PAGE_BYTES)), "not whole pages"),
        ((lambda g: (g.page_offset(0, 4), PAGE_BYTES + 1)), "not whole pages"),
        ((lambda g: (g.page_offset(0, 4), 2 * PAGE_BYTES)), "block 5 is not part of the lease"),
        ((lambda g: (g.num_bytes, PAGE_BYTES)), "not whole pages"),
        ((lambda g: (0, g.num_bytes)), "more bytes than the lease is for"),
    ],
)
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_pages_that_are_not_the_lease_s_are_refused(
    start: Start, visit: Visit, backend: str, place: Any, why: str
) -> None:
    theirs = start(backend, seed=2)
    before = theirs.bytes.copy()
    visitor = joined(theirs, visit, [4])
    at, count = place(theirs.geometry)
    if backend == "tcp":
        visitor.say(PayloadHeader("lease", [(at, count)]), b"x" * count)
    else:
        visitor.say(PagesWritten("lease", [(at, count)]))
    stop = visitor.hear()
    assert isinstance(stop, StopWriting) and why in stop.message
    assert why in theirs.hear(WriterLost).message
    np.testing.assert_array_equal(theirs.bytes, before)


@pytest.mark.parametrize("length", [513, (1 << 20) - 14])
def test_a_lease_id_too_long_to_be_repeated_in_a_reply_ends_that_connection_only(
    start: Start, visit: Visit, length: int
) -> None:
    theirs = start("tcp", seed=2)
    visitor = visit(theirs.endpoint)
    visitor.say(OpenPush("x" * length, []))
    with pytest.raises(LinkClosed):
        visitor.hear()
    joined(theirs, visit, [4])


def test_a_place_that_no_memory_has_ends_the_connection_without_a_page_written(start: Start, visit: Visit) -> None:
    theirs = start("shm", seed=2)
    visitor = joined(theirs, visit, [4])
    visitor.say(PagesWritten("lease", [((1 << 64) - 1, PAGE_BYTES)]))
    assert "not whole pages" in theirs.hear(WriterLost).message
    theirs.expect([5], "second")
    visitor.say(OpenPush("second", [5]))
    assert isinstance(visitor.hear(), StopWriting) and visitor.hear() == PushOpened("second")
    page = (theirs.geometry.page_offset(0, 5), PAGE_BYTES)
    visitor.say(PagesWritten("second", [page, page]))
    assert "named twice" in theirs.hear(WriterLost, "second").message


def test_a_page_is_written_once(start: Start, visit: Visit) -> None:
    theirs = start("tcp", seed=2)
    visitor = joined(theirs, visit, [4])
    place = (theirs.geometry.page_offset(1, 4), PAGE_BYTES)
    visitor.say(PayloadHeader("lease", [place]), b"x" * PAGE_BYTES)
    visitor.say(PayloadHeader("lease", [place]), b"y" * PAGE_BYTES)
    assert "was written before" in theirs.hear(WriterLost).message
    assert theirs.block(4)[1].tobytes() == b"x" * PAGE_BYTES


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_writer_that_is_done_too_early_is_lost(start: Start, visit: Visit, backend: str) -> None:
    theirs = start(backend)
    visitor = joined(theirs, visit, [4])
    visitor.say(AllPagesWritten("lease"))
    assert "0 of 3 pages" in theirs.hear(WriterLost).message
    assert isinstance(visitor.hear(), StopWriting)
    theirs.tell(RevokeLease("lease"))
    visitor.say(WritingStopped("lease"))
    theirs.hear(LeaseQuiesced)


def test_a_lease_has_one_writer(start: Start, visit: Visit) -> None:
    theirs = start("shm")
    first = joined(theirs, visit, [4])
    second = visit(theirs.endpoint)
    second.say(OpenPush("lease", [4]))
    assert second.hear() == StopWriting("lease", "it has, or had, another writer")
    second.say(WritingStopped("lease"))
    first.say(PagesWritten("lease", [(theirs.geometry.page_offset(layer, 4), PAGE_BYTES) for layer in range(3)]))
    first.say(AllPagesWritten("lease"))
    assert first.hear() == AllPagesAccepted("lease")
    theirs.hear(WritesComplete)
    second.say(OpenPush("lease", [4]))
    assert isinstance(second.hear(), StopWriting)


@pytest.mark.parametrize("nonsense", [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\3\0\0\0abc"])
def test_after_nonsense_a_shm_lease_is_quiet_only_when_its_writer_is_gone(
    start: Start, visit: Visit, nonsense: bytes
) -> None:
    theirs = start("shm")
    visitor = joined(theirs, visit, [4])
    visitor.say_bytes(nonsense)
    theirs.hear(WriterLost)
    theirs.tell(RevokeLease("lease"))
    with pytest.raises(LinkClosed, match="closed the connection"):
        while True:
            visitor.hear()
    theirs.expect([5], "other")
    assert theirs.reports == []
    visitor.link.close()
    theirs.hear(LeaseQuiesced)


def test_strangers_that_say_nothing_are_shown_out(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.pd.transfer.kv_server.HANDSHAKE_TIMEOUT_S", 0.1)
    theirs = start("tcp")
    host, _, port = theirs.endpoint.address.removeprefix("tcp:").rpartition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as stranger:
        assert stranger.recv(1) == b""


def test_there_are_only_so_many_connections(start: Start, visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.pd.transfer.kv_server.MAX_CONNECTIONS", 2)
    theirs = start("tcp")
    visitors = [visit(theirs.endpoint) for _ in range(2)]
    with pytest.raises(LinkClosed):
        visit(theirs.endpoint)
    assert len(visitors) == theirs.plane.num_connections


def test_without_a_cluster_key_nothing_listens_beyond_this_machine() -> None:
    with pytest.raises(StartupError, match="cluster-key-file"):
        KvListenSocket("tcp", "192.0.2.1", "")
    with pytest.raises(StartupError, match="reaches this machine"):
        KvListenSocket("tcp", "0.0.0.0", "ab" * 32)
