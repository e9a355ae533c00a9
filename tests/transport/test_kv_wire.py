"""What engine and worker say of KV transfers arrives whole and in order, from the first word on."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from onward.proto.kv_transfer import (
    EndLease,
    ExpectingWrites,
    ExpectWrites,
    KvCommand,
    KvReport,
    LeaseQuiesced,
    PushComplete,
    PushFailed,
    PushQuiesced,
    RevokeLease,
    StopPush,
    WriterLost,
    WritesComplete,
)
from onward.transport.curve import make_private_address
from onward.transport.kv_wire import KV_QUEUE_LENGTH, KvWireFull
from onward.transport.zmq_sockets import SocketPoller

COMMANDS: list[KvCommand] = [ExpectWrites("a", [5, 0, 49151], True), EndLease("a"), RevokeLease("b"), StopPush("c")]
REPORTS: list[KvReport] = [
    ExpectingWrites("a"),
    WritesComplete("a", [2**64 - 1], 4096, 0.5),
    WriterLost("b", "it hung up"),
    LeaseQuiesced("b"),
    PushComplete("c", [0], 4096, 0.25),
    PushFailed("d", "no such lease"),
    PushQuiesced("c"),
]
T = TypeVar("T")


@pytest.fixture
def processes() -> Iterator[tuple[SocketPoller, SocketPoller]]:
    engine, worker = SocketPoller(), SocketPoller()
    yield engine, worker
    engine.close()
    worker.close()


def until(wires: SocketPoller, attempt: Callable[[], T | None]) -> T:
    for _ in range(500):
        if found := attempt():
            return found
        wires.wait(20)
    raise AssertionError("it never came to that")


def test_commands_and_reports_cross_unchanged_and_in_order(processes: tuple[SocketPoller, SocketPoller]) -> None:
    engine, worker = processes
    ours, theirs = make_private_address("test-kv")
    port, socket = engine.engine_kv_wire_end(ours), worker.worker_kv_wire_end(theirs)
    for report in REPORTS:
        socket.send(report)
    assert [until(engine, port.receive) for _ in REPORTS] == REPORTS
    for command in COMMANDS:
        port.send(command)
    assert [until(worker, socket.receive) for _ in COMMANDS] == COMMANDS


def test_commands_given_before_the_worker_is_there_reach_it_first(processes: tuple[SocketPoller, SocketPoller]) -> None:
    engine, worker = processes
    ours, theirs = make_private_address("test-kv-early")
    port = engine.engine_kv_wire_end(ours)
    for command in COMMANDS:
        port.send(command)
    socket = worker.worker_kv_wire_end(theirs)
    socket.send(REPORTS[0])
    assert until(engine, port.receive) == REPORTS[0]
    port.send(RevokeLease("later"))
    assert [until(worker, socket.receive) for _ in range(5)] == [*COMMANDS, RevokeLease("later")]


def test_an_end_that_does_not_read_is_an_error_and_not_a_silent_loss(
    processes: tuple[SocketPoller, SocketPoller],
) -> None:
    port = processes[0].engine_kv_wire_end(make_private_address("test-kv-full")[0])
    for _ in range(KV_QUEUE_LENGTH):
        port.send(EndLease("a"))
    with pytest.raises(KvWireFull):
        port.send(EndLease("a"))
