"""Hostile connections, in a process of their own.

    python -m benchmarks.isolation.hostile_connections PORT MODEL COUNT SEED KEY…

Some send a head or a body a byte a second, some ask for a stream and do not read it, some ask and vanish, some say nothing
at all. Those that are ended come again. A line on the input is answered with a line of JSON that tells what has happened;
after any line but `go on` no connection is opened again or closed. At the end of the input the process ends.

There are two keys: those that do not read ask once, with the first; those that vanish ask all the time, with the second.
"""

import asyncio
import random
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable
from typing import cast

import msgspec
import uvloop

from onward.bench.prompts import random_words

KINDS = {"slow_head": 175, "slow_body": 175, "unread": 400, "vanishing": 200, "silent": 50}
"""Number of each kind in a thousand."""
BYTE_EVERY_S = 1.0
AGAIN_S = 0.2
VANISHES_AFTER_S = (2.0, 20.0)
OPENED_WITHIN_S = 2.0
MAX_TOKENS = 96
"""With logprobs, more than the kernel keeps for a client that does not read."""
_STRIDE = 383
"""Has no divisor in common with a thousand."""
_RECEIVE_BYTES = 4096
_RESET = struct.pack("ii", 1, 0)
_PATH = "/v1/chat/completions"


def kinds(count: int) -> list[str]:
    """In the proportions of `KINDS`, mixed."""
    whole = [kind for kind, share in KINDS.items() for _ in range(share)]
    return [whole[number * _STRIDE % len(whole)] for number in range(count)]


class HostileConnection(asyncio.Protocol):
    def __init__(self, kind: str, crowd: "HostileConnections", seed: str) -> None:
        self.kind = kind
        self._crowd = crowd
        self._rng = random.Random(seed)
        self._rest = b""
        self._transport: asyncio.Transport | None = None
        self._status = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._crowd.open.add(self)
        begin: dict[str, Callable[[], None]] = {
            "slow_head": self._send_head_slowly,
            "slow_body": self._send_body_slowly,
            "unread": self._ask,
            "vanishing": self._ask_and_vanish,
            "silent": lambda: None,
        }
        begin[self.kind]()

    def data_received(self, data: bytes) -> None:
        if not self._status:
            self._status = data[9:12]
            self._crowd.counts[f"{self.kind}: answered {self._status.decode(errors='replace')}"] += 1
        if self.kind == "unread" and self._transport is not None:
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._crowd.open.discard(self)
        self._crowd.counts[f"{self.kind}: over"] += 1
        self._crowd.come_again(self.kind)

    def _request(self, body: bytes, claimed_bytes: int) -> bytes:
        key = self._crowd.keys[self.kind == "vanishing"]
        head = f"POST {_PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        return f"{head}content-length: {claimed_bytes}\r\n\r\n".encode() + body

    def _stream_request(self) -> bytes:
        """For those that do not read, there is much to read for each token."""
        messages = [{"role": "user", "content": random_words(16, str(self._rng.random()))}]
        asked = {"model": self._crowd.model, "stream": True, "max_tokens": MAX_TOKENS, "ignore_eos": True}
        more = {"logprobs": True, "top_logprobs": 20} if self.kind == "unread" else {}
        body = msgspec.json.encode({**asked, **more, "messages": messages})
        return self._request(body, len(body))

    def _send_head_slowly(self) -> None:
        self._rest = self._request(b"", 1000)
        self._send_a_byte()

    def _send_body_slowly(self) -> None:
        assert self._transport is not None
        self._transport.write(self._request(b"{", 1 << 20))
        self._rest = b" " * 1000
        self._send_a_byte()

    def _send_a_byte(self) -> None:
        if self._transport is None or not self._rest:
            return
        self._transport.write(self._rest[:1])
        self._rest = self._rest[1:]
        asyncio.get_running_loop().call_later(BYTE_EVERY_S, self._send_a_byte)

    def _ask(self) -> None:
        assert self._transport is not None
        self._transport.write(self._stream_request())

    def _ask_and_vanish(self) -> None:
        self._ask()
        asyncio.get_running_loop().call_later(self._rng.uniform(*VANISHES_AFTER_S), self._vanish)

    def _vanish(self) -> None:
        if self._crowd.goes_on:
            self.go()

    def go(self) -> None:
        """Without a word."""
        if self._transport is None:
            return
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._transport.abort()


class HostileConnections:
    def __init__(self, port: int, keys: tuple[str, str], model: str, seed: str) -> None:
        self.keys, self.model = keys, model
        self.counts: Counter[str] = Counter()
        self.goes_on = True
        self.open: set[HostileConnection] = set()
        self._port, self._seed = port, seed
        self._coming: set[asyncio.Task[None]] = set()

    def come(self, kind: str, after_s: float) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(kind, after_s))
        self._coming.add(task)
        task.add_done_callback(self._coming.discard)

    def leave(self) -> None:
        """All at once, and for good."""
        self.goes_on = False
        for one in list(self.open):
            one.go()

    def come_again(self, kind: str) -> None:
        if self.goes_on:
            self.come(kind, AGAIN_S)

    async def _connect(self, kind: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        loop, sock = asyncio.get_running_loop(), socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        self.counts[f"{kind}: come"] += 1
        try:
            await loop.sock_connect(sock, ("127.0.0.1", self._port))
            await loop.create_connection(
                lambda: HostileConnection(kind, self, f"{self._seed} {self.counts[f'{kind}: come']}"), sock=sock
            )
        except OSError:
            self.counts[f"{kind}: not let in"] += 1
            sock.close()
            self.come_again(kind)


async def run(port: int, model: str, count: int, seed: str, keys: tuple[str, str]) -> None:
    crowd, loop = HostileConnections(port, keys, model, seed), asyncio.get_running_loop()
    for number, kind in enumerate(kinds(count)):
        crowd.come(kind, OPENED_WITHIN_S * number / count)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        crowd.goes_on = line.strip() == "go on"
        print(msgspec.json.encode({"open": len(crowd.open), "counts": crowd.counts}).decode(), flush=True)
    crowd.leave()


if __name__ == "__main__":
    uvloop.run(run(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], (sys.argv[5], sys.argv[6])))
