"""One HTTP exchange without a socket: what a client sends, and what an ASGI application answers."""

import asyncio
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Scope

DISCONNECT: Message = {"type": "http.disconnect"}


def request_scope(path: str = "/v1/models", headers: dict[str, str] | None = None) -> Scope:
    given = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    return {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": given}


def body_part(body: bytes, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


@dataclass
class Client:
    """`receive` and `send` of an application. After what was `said` it stays connected until it `leaves`."""

    said: list[Message] = field(default_factory=list)
    heard: list[Message] = field(default_factory=list)
    _leaving: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> Message:
        if self.said:
            return self.said.pop(0)
        await self._leaving.wait()
        return DISCONNECT

    async def send(self, message: Message) -> None:
        self.heard.append(message)

    def leave(self) -> None:
        self._leaving.set()

    @property
    def status(self) -> int:
        return self.heard[0]["status"]

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.heard[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.heard[1:])


async def exchanged(app: ASGIApp, scope: Scope) -> Client:
    client = Client([body_part(b"")])
    await app(scope, client.receive, client.send)
    return client
