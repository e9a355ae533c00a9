"""A TCP proxy that breaks connections after a given number of bytes from the server."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterable
from typing import Self

_RESET = struct.pack("ii", 1, 0)


class CuttingProxy:
    """`cuts`: for each connection the number of bytes after which it breaks; connections after them do not break.
    `resets`: they break by a reset instead of an orderly end."""

    def __init__(self, url: str, cuts: Iterable[int] = (), *, resets: bool = False) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._server = host, int(port)
        self._cuts, self._resets = iter(cuts), resets
        self.num_bytes: list[int] = []
        """From the server, for each connection."""
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for thread in self._threads:
            thread.join(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                index = len(self.num_bytes)
                self.num_bytes.append(0)
                thread = threading.Thread(target=self._serve, args=(client, index, next(self._cuts, None)), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket, index: int, cut: int | None) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._server) as server:
            upload = threading.Thread(target=_pump, args=(client, server), daemon=True)
            upload.start()
            while cut is None or self.num_bytes[index] < cut:
                received = server.recv(65536 if cut is None else min(65536, cut - self.num_bytes[index]))
                if not received:
                    break
                client.sendall(received)
                self.num_bytes[index] += len(received)
            if self._resets:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            # Wakes the other thread, whose call would keep the connection open.
            client.shutdown(socket.SHUT_RD if self._resets else socket.SHUT_RDWR)
            server.shutdown(socket.SHUT_RDWR)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while received := source.recv(65536):
            target.sendall(received)
        target.shutdown(socket.SHUT_WR)
