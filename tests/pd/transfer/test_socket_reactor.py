"""A socket's callback: called when the socket is ready, and replaced by a later one."""

import socket

import pytest

from onward.pd.transfer.socket_reactor import SocketReactor


@pytest.mark.parametrize("for_writing", [False, True])
def test_a_second_callback_of_a_socket_replaces_the_first(for_writing: bool) -> None:
    reactor, calls = SocketReactor(), list[str]()
    here, there = socket.socketpair()
    with here, there:
        reactor.watch(here, lambda: calls.append("first"))
        reactor.watch(here, lambda: calls.append("second"), for_writing=for_writing)
        there.send(b"x")
        reactor.dispatch()
        assert calls == ["second"]
        reactor.forget(here)
        reactor.dispatch()
        assert calls == ["second"]
    reactor.close()
