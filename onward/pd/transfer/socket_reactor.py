"""Waits for many sockets by one epoll descriptor, and calls back for those that are ready."""

import selectors
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import HasFileno


class SocketReactor:
    """Calls a callback for each watched socket that is ready. Its own file descriptor can be read whenever one of
    them is ready, so the thread waits for all of them, and for its zmq sockets, in one poll. Then it calls
    `dispatch`."""

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()

    def fileno(self) -> int:
        return self._selector.fileno()

    def watch(self, sock: "HasFileno", callback: Callable[[], None], *, for_writing: bool = False) -> None:
        """Calls `callback` whenever the socket can be read, or with `for_writing` also when it can be written. A second
        call for the same socket replaces the first."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if for_writing else 0)
        key = self._selector.get_map().get(sock.fileno())
        if key is None:
            self._selector.register(sock.fileno(), events, callback)
        elif (key.events, key.data) != (events, callback):
            self._selector.modify(sock.fileno(), events, callback)

    def forget(self, sock: "HasFileno") -> None:
        """Stops watching a socket. Called before the socket is closed."""
        if sock.fileno() in self._selector.get_map():
            self._selector.unregister(sock.fileno())

    def dispatch(self) -> None:
        """Calls the callbacks of all sockets that are ready now."""
        for key, _ in self._selector.select(0):
            # Skips a socket that an earlier callback has closed, and perhaps replaced under the same number.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def close(self) -> None:
        self._selector.close()
