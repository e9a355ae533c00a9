"""A real router process's parts on a real socket, in the event loop of the test, and a client that keeps what it gets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from onward.config import RouterConfig
from onward.proto.cursor import Cursor, parse_cursor
from onward.router.main import RouterProcess
from onward.web.auth.api_key_file import ApiKeySource
from tests.router.stand_in_instance import StandInInstance, text_of, token

CHAT = "/v1/chat/completions"


@dataclass
class Router:
    url: str
    process: RouterProcess
    session: aiohttp.ClientSession
    instances: list[StandInInstance]

    async def post(self, body: dict[str, Any], *, path: str = CHAT, headers: dict[str, str] | None = None) -> "Answer":
        async with self.session.post(self.url + path, json=body, headers=headers or {}) as response:
            return Answer(response.status, _headers(response), await response.read())

    async def get(self, path: str, headers: dict[str, str] | None = None) -> "Answer":
        async with self.session.get(self.url + path, headers=headers or {}) as response:
            return Answer(response.status, _headers(response), await response.read())

    def metric(self, name: str, *labels: str) -> float:
        return getattr(self.process.stream_runner.core.metrics, name).value(*labels)


def _headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def stream(self) -> "Received":
        return Received.of(self.body)


@dataclass
class Received:
    """A stream as a client has it."""

    cursors: list[Cursor] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    partials: list[dict[str, Any] | None] = field(default_factory=list)
    """Next to each error."""
    num_done: int = 0
    last_id: str = ""

    @staticmethod
    def of(body: bytes) -> "Received":
        received = Received()
        assert body.endswith(b"\n\n") or not body, "whole events only"
        for event in body.decode().split("\n\n")[:-1]:
            received.take(event)
        return received

    def take(self, event: str) -> None:
        name = "message"
        for line in event.split("\n"):
            key, _, value = line.partition(": ")
            if key == "event":
                name = value
            elif key == "id":
                self.last_id = value
                self.cursors.append(parse_cursor(value))
            elif key == "data" and value == "[DONE]":
                self.num_done += 1
            elif key == "data" and name == "error":
                self.errors.append(msgspec.json.decode(value)["error"])
                self.partials.append(msgspec.json.decode(value).get("partial"))
            elif key == "data":
                assert name == "message", f"{name} is not for clients"
                self.chunks.append(msgspec.json.decode(value))

    def choices(self, index: int) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(choice["delta"].get("content", "") for choice in self.choices(index))

    def finish_reasons(self, index: int = 0) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices(index) if choice["finish_reason"]]

    def roles(self, index: int = 0) -> int:
        return sum("role" in choice["delta"] for choice in self.choices(index))

    def usages(self) -> list[dict[str, Any]]:
        return [chunk["usage"] for chunk in self.chunks if chunk["usage"]]


def expected_text(seed: int, num_tokens: int, index: int = 0, start: int = 0) -> str:
    return text_of([token(seed, index, position) for position in range(start, num_tokens)])


def assert_seamless(received: Received, seed: int, num_tokens: int, num_choices: int = 1) -> None:
    """Nothing of what happened behind the router can be seen."""
    assert received.errors == []
    assert received.num_done == 1
    assert len({(chunk["id"], chunk["created"]) for chunk in received.chunks}) == 1
    for index in range(num_choices):
        assert received.text(index) == expected_text(seed, num_tokens, index)
        assert received.finish_reasons(index) == ["length"]
        assert received.roles(index) == 1
    positions = [[choice.position for choice in cursor.choices] for cursor in received.cursors]
    assert positions == sorted(positions) and len(positions) == num_tokens * num_choices
    assert [cursor.attempt_epoch for cursor in received.cursors] == sorted(
        cursor.attempt_epoch for cursor in received.cursors
    )


@asynccontextmanager
async def running_router(
    *instances: StandInInstance,
    registers: bool = True,
    cluster_key: str = "",
    settle_s: float = 0.0,
    keep_alive_s: float = 15.0,
    key_source: ApiKeySource | None = None,
    **config: Any,
) -> AsyncIterator[Router]:
    plain = key_source.plain if key_source is not None else config.get("api_key", ())
    for instance in instances:
        instance.key = plain[0] if plain else None
        if not instance.port:
            await instance.start()
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    started = asyncio.Event()
    process = RouterProcess(
        RouterConfig(**{"drain_s": 0.0, **config}),
        cluster_key,
        settle_s=settle_s,
        keep_alive_s=keep_alive_s,
        key_source=key_source,
        on_started=started.set,
    )
    running = asyncio.create_task(process.run(listening))
    await started.wait()
    async with aiohttp.ClientSession() as session:
        if registers:
            for instance in instances:
                assert (await instance.register_once(session, url)).error == ""
                instance.register_with(url)
        try:
            yield Router(url, process, session, list(instances))
        finally:
            # Tasks with connections end first, so that no other task waits for them.
            await session.close()
            for instance in instances:
                await instance.stop()
            process.stop()
            await running
            listening.close()
