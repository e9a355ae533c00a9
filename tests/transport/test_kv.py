"""What engine and worker say of KV transfers arrives whole and in order, from the first word on."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from onward.proto.kv_transfer import (
    Counted,
    EndLease,
    Expect,
    Expecting,
    KvCommand,
    KvReport,
    LeaseQuiet,
    PushFailed,
    PushQuiet,
    Revoke,
    Sent,
    StopPush,
    WriterLost,
)
from onward.transport.curve import private_addresses
from onward.transport.kv import KV_QUEUE_LENGTH, KvWireFull
from onward.transport.zmq import Wires

COMMANDS: list[KvCommand] = [Expect("a", [5, 0, 49151], True), EndLease("a"), Revoke("b"), StopPush("c")]
REPORTS: list[KvReport] = [
    Expecting("a"),
    Counted("a", [2**64 - 1], 4096, 0.5),
    WriterLost("b", "it hung up"),
    LeaseQuiet("b"),
    Sent("c", [0], 4096, 0.25),
    PushFailed("d", "no such lease"),
    PushQuiet("c"),
]
T = TypeVar("T")


@pytest.fixture
def processes() -> Iterator[tuple[Wires, Wires]]:
    engine, worker = Wires(), Wires()
    yield engine, worker
    engine.close()
    worker.close()


def until(wires: Wires, attempt: Callable[[], T | None]) -> T:
    for _ in range(500):
        if found := attempt():
            return found
        wires.wait(20)
    raise AssertionError("it never came to that")


def test_commands_and_reports_cross_unchanged_and_in_order(processes: tuple[Wires, Wires]) -> None:
    engine, worker = processes
    ours, theirs = private_addresses("test-kv")
    port, socket = engine.kv_port(ours), worker.kv_socket(theirs)
    for report in REPORTS:
        socket.send(report)
    assert [until(engine, port.receive) for _ in REPORTS] == REPORTS
    for command in COMMANDS:
        port.send(command)
    assert [until(worker, socket.receive) for _ in COMMANDS] == COMMANDS


def test_commands_given_before_the_worker_is_there_reach_it_first(processes: tuple[Wires, Wires]) -> None:
    engine, worker = processes
    ours, theirs = private_addresses("test-kv-early")
    port = engine.kv_port(ours)
    for command in COMMANDS:
        port.send(command)
    socket = worker.kv_socket(theirs)
    socket.send(REPORTS[0])
    assert until(engine, port.receive) == REPORTS[0]
    port.send(Revoke("later"))
    assert [until(worker, socket.receive) for _ in range(5)] == [*COMMANDS, Revoke("later")]


def test_an_end_that_does_not_read_is_an_error_and_not_a_silent_loss(processes: tuple[Wires, Wires]) -> None:
    port = processes[0].kv_port(private_addresses("test-kv-full")[0])
    for _ in range(KV_QUEUE_LENGTH):
        port.send(EndLease("a"))
    with pytest.raises(KvWireFull):
        port.send(EndLease("a"))
