"""The local sockets by which servers find each other: for processes of one user only, and without a trace."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from onward.errors import StartupError
from onward.proto.adoption import (
    ADOPTION_PROTOCOL,
    AdoptionRequest,
    AdoptRefused,
    FromPredecessor,
    FromSuccessor,
    MemoryOffer,
    MemoryReleased,
)
from onward.supervisor import adoption_socket
from onward.supervisor.adoption_socket import accept_peer, adoption_address, connect_to, listen_at
from onward.supervisor.memory_format import memory_format
from onward.supervisor.predecessor import RELEASE_TIMEOUT_S, Predecessor, Release, find_predecessor, receive_offers
from onward.supervisor.successor import Offer, SuccessorEvent, SuccessorListener
from tests.supervisor.test_memory_format import CONFIG, MODEL

HOST = "127.0.0.1"


@pytest.fixture
def port() -> Iterator[int]:
    """One that no other process gets meanwhile."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        yield sock.getsockname()[1]


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as sock:
        yield sock


def run_as_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on: what the kernel says of the other end is this process, and not the user that it runs as."""
    uid = os.geteuid()
    monkeypatch.setattr(adoption_socket.os, "geteuid", lambda: uid + 1)


def test_a_connection_of_another_user_is_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    address = adoption_address(HOST, port)
    with listen_at(address) as listener:
        client = connect_to(address, FromPredecessor)
        assert client is not None
        run_as_another_user(monkeypatch)
        accepted = accept_peer(listener, FromSuccessor)
        client.close()
        if accepted is not None:
            accepted.close()
        assert accepted is None


def test_a_server_of_another_user_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    address = adoption_address(HOST, port)
    with listen_at(address):
        run_as_another_user(monkeypatch)
        with pytest.raises(StartupError, match="belongs to another user"):
            peer = connect_to(address, FromPredecessor)
            assert peer is not None
            peer.close()


def test_without_a_server_there_is_nobody_to_connect_to(port: int) -> None:
    assert connect_to(adoption_address(HOST, port), FromPredecessor) is None
    assert find_predecessor(HOST, port) is None


def open_server(port: int, listening: socket.socket, *, with_memory: bool) -> SuccessorListener:
    def offer() -> Offer:
        if not with_memory:
            return Offer((listening.fileno(),), None)
        memory = MemoryOffer("memory-1", memory_format(CONFIG, MODEL, 8), 0)
        return Offer((listening.fileno(),), memory, (listening.fileno(), listening.fileno()))

    server = SuccessorListener(HOST, port, offer)
    server.open()
    return server


def connected(port: int, server: SuccessorListener) -> Predecessor:
    """As `find_predecessor`, with the old server in the same thread."""
    client = connect_to(adoption_address(HOST, port), FromPredecessor)
    assert client is not None
    client.channel.send(AdoptionRequest(ADOPTION_PROTOCOL))
    assert server.poll() is None
    return receive_offers(client)


@pytest.mark.parametrize(("released", "expected"), [("memory-1", Release.WITH_MEMORY), ("", Release.WITHOUT_MEMORY)])
def test_the_memory_is_the_new_servers_if_the_old_one_releases_what_it_has_offered(
    port: int, listening: socket.socket, released: str, expected: Release
) -> None:
    server = open_server(port, listening, with_memory=True)
    predecessor = connected(port, server)
    with predecessor.listening:
        memory = predecessor.take_memory()
        assert predecessor.released(0.0) is None
        predecessor.take_over(0.0)
        assert server.poll() is SuccessorEvent.TAKE_OVER
        assert server.release(released)
        assert predecessor.released(1.0) is expected
        predecessor.send_serving()
        assert server.await_serving()
        memory.close()
        predecessor.close()
    server.close()


def test_memory_of_another_name_than_the_offered_one_is_not_used(port: int, listening: socket.socket) -> None:
    """The old server has given the offered memory up meanwhile."""
    server = open_server(port, listening, with_memory=True)
    predecessor = connected(port, server)
    with predecessor.listening:
        predecessor.take_memory().close()
        predecessor.take_over(0.0)
        assert server.poll() is SuccessorEvent.TAKE_OVER
        assert server.release("memory-2")
        assert predecessor.released(1.0) is Release.WITHOUT_MEMORY
        predecessor.close()
    server.close()


@pytest.mark.parametrize("is_suspect", [True, False])
def test_an_old_server_learns_whether_its_memory_may_be_damaged(
    port: int, listening: socket.socket, is_suspect: bool
) -> None:
    server = open_server(port, listening, with_memory=False)
    predecessor = connected(port, server)
    with predecessor.listening:
        predecessor.abort(is_memory_suspect=is_suspect)
        predecessor.close()
        assert server.poll() is (SuccessorEvent.GONE_MEMORY_SUSPECT if is_suspect else SuccessorEvent.GONE)
    server.close()


def test_a_second_new_server_is_refused_and_the_first_one_goes_on(port: int, listening: socket.socket) -> None:
    server = open_server(port, listening, with_memory=False)
    first = connected(port, server)
    second = connect_to(adoption_address(HOST, port), FromPredecessor)
    assert second is not None
    assert server.poll() is None
    assert second.channel.receive() == AdoptRefused("another server is taking over already")
    second.close()
    first.take_over(0.0)
    assert server.poll() is SuccessorEvent.TAKE_OVER
    first.listening.close()
    first.close()
    server.close()


def test_a_server_that_speaks_another_protocol_is_refused(port: int, listening: socket.socket) -> None:
    server = open_server(port, listening, with_memory=False)
    client = connect_to(adoption_address(HOST, port), FromPredecessor)
    assert client is not None
    client.channel.send(AdoptionRequest(ADOPTION_PROTOCOL + 1))
    server.poll()
    assert isinstance(client.channel.receive(), AdoptRefused)
    client.close()
    server.close()


def test_a_new_server_that_is_gone_gets_no_memory(port: int, listening: socket.socket) -> None:
    server = open_server(port, listening, with_memory=False)
    predecessor = connected(port, server)
    with predecessor.listening:
        predecessor.take_over(0.0)
        assert server.poll() is SuccessorEvent.TAKE_OVER
        predecessor.close()
        assert server.poll() is SuccessorEvent.GONE
        assert not server.release("memory-1")
    server.close()


def test_memory_is_released_only_to_the_server_that_has_asked_for_it(port: int, listening: socket.socket) -> None:
    """The one that asked is gone, and another one has connected since. It goes on, and may ask later."""
    server = open_server(port, listening, with_memory=False)
    first = connected(port, server)
    first.take_over(0.0)
    assert server.poll() is SuccessorEvent.TAKE_OVER
    first.listening.close()
    first.close()
    assert server.poll() is SuccessorEvent.GONE
    second = connected(port, server)
    assert not server.release("memory-1")
    with second.listening:
        assert second.released(1.0) is None
        second.take_over(1.0)
        assert server.poll() is SuccessorEvent.TAKE_OVER
        assert server.release("memory-1")
        second.close()
    server.close()


NEW_SERVER = """
import sys
from onward.proto.adoption import ADOPTION_PROTOCOL, AdoptionAborted, AdoptionRequest, FromPredecessor, TakeOver
from onward.supervisor.adoption_socket import adoption_address, connect_to
peer = connect_to(adoption_address(sys.argv[1], int(sys.argv[2])), FromPredecessor)
peer.channel.send(AdoptionRequest(ADOPTION_PROTOCOL))
peer.channel.send(TakeOver())
print("asked", flush=True)
sys.stdin.read()
peer.channel.send(AdoptionAborted(is_memory_suspect=True))
"""


def test_memory_is_not_kept_if_its_damage_is_reported_while_it_is_released(port: int, listening: socket.socket) -> None:
    """The new server reports it and ends after the old one has looked for messages, before it sends `MemoryReleased`."""
    server = open_server(port, listening, with_memory=False)
    command = [sys.executable, "-c", NEW_SERVER, HOST, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as new_server:
        assert new_server.stdout is not None
        assert new_server.stdout.readline() == b"asked\n"
        assert server.poll() is None
        assert server.poll() is SuccessorEvent.TAKE_OVER
        new_server.communicate()
    assert server.release("memory-1"), "released memory is not kept"
    assert not server.await_serving()
    server.close()


def test_a_server_that_can_be_adopted_already_is_not_reported_as_one_that_cannot(
    port: int, listening: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    server = open_server(port, listening, with_memory=False)
    server.open()
    assert caplog.records == []
    server.close()


def test_only_a_release_ends_the_wait_before_its_bound(port: int, listening: socket.socket) -> None:
    server = open_server(port, listening, with_memory=False)
    predecessor = connected(port, server)
    with predecessor.listening:
        assert predecessor.released(RELEASE_TIMEOUT_S) is None, "nothing is bounded before the takeover"
        predecessor.take_over(0.0)
        assert predecessor.released(RELEASE_TIMEOUT_S - 1) is None
        server.poll()
        server.release("")
        assert isinstance(predecessor._peer.channel.receive(), MemoryReleased)
        predecessor.close()
    server.close()
