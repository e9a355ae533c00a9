"""The port on which a decode worker listens for prefill workers."""

import socket
from collections.abc import Iterator

import pytest

from onward.errors import StartupError
from onward.pd.transfer.authenticated_link import MAX_BIND_TRIES, KvListenSocket

HOST = "127.0.0.1"


@pytest.fixture
def held() -> Iterator[socket.socket]:
    """A listening socket of a worker that was killed together with its supervisor, and whose end takes a moment."""
    with socket.create_server((HOST, 0)) as sock:
        yield sock


def test_a_fixed_port_is_waited_for_until_a_killed_worker_has_closed_it(held: socket.socket) -> None:
    port = held.getsockname()[1]
    listening = KvListenSocket("tcp", HOST, "", port, pause=lambda _: held.close())
    assert listening.address == f"tcp:{HOST}:{port}"
    listening.close()


def test_a_port_that_stays_in_use_is_reported(held: socket.socket) -> None:
    pauses: list[float] = []
    with pytest.raises(StartupError, match="--kv-port 0"):
        KvListenSocket("tcp", HOST, "", held.getsockname()[1], pause=pauses.append)
    assert len(pauses) == MAX_BIND_TRIES - 1


def test_an_address_of_another_machine_is_reported_at_once() -> None:
    pauses: list[float] = []
    with pytest.raises(StartupError, match="cannot listen on"):
        KvListenSocket("tcp", "192.0.2.1", "ab" * 32, 7001, pause=pauses.append)
    assert pauses == []
