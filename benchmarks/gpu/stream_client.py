"""Reads completion streams over HTTP, many at once: to their end, or up to a token at which the connection is cut."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp

from benchmarks.gpu.exactness_requests import COMPLETIONS
from benchmarks.gpu.stream_outputs import BrokenStream, StreamOutput

STREAM_LIMIT_S = 300.0
_LINE_BYTES = 1 << 22
"""The first event repeats the prompt's ids, and one with prompt logprobs is long."""

Disturb = Callable[[], Awaitable[None]]


class CompletionsClient:
    def __init__(self, url: str) -> None:
        self._session = aiohttp.ClientSession(
            url,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=STREAM_LIMIT_S),
            read_bufsize=_LINE_BYTES,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def read(
        self, body: dict[str, Any], output: StreamOutput, *, on_event: Callable[[], None] = lambda: None
    ) -> None:
        await self._read("POST", body, output, on_event, {})

    async def read_and_cut(self, body: dict[str, Any], output: StreamOutput, num_tokens: int) -> None:
        """Closes the connection once so many tokens have been read."""
        await self._read("POST", body, output, lambda: None, {}, cut_at=num_tokens)

    async def read_on(self, body: dict[str, Any] | None, output: StreamOutput, last_id: str) -> None:
        """Resumes a stream by `Last-Event-ID`: with its body by POST, without one by GET."""
        method = "GET" if body is None else "POST"
        await self._read(method, body, output, lambda: None, {"Last-Event-ID": last_id})

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._session.post(path, json=body) as response:
            if response.status != 200:
                raise BrokenStream(f"{path} gave {response.status}: {await response.text()}")
            return await response.json()

    async def _read(
        self,
        method: str,
        body: dict[str, Any] | None,
        output: StreamOutput,
        on_event: Callable[[], None],
        headers: dict[str, str],
        cut_at: int | None = None,
    ) -> None:
        async with self._session.request(method, COMPLETIONS, json=body, headers=headers) as response:
            if response.status != 200:
                raise BrokenStream(f"a stream was refused with {response.status}: {await response.text()}")
            async for line in response.content:
                output.take_line(line.decode().rstrip("\n"))
                on_event()
                if cut_at is not None and len(output.token_ids) >= cut_at:
                    response.close()  # without reading the rest, so the server loses its client
                    return
        if not output.is_whole:
            raise BrokenStream(f"a stream ended without its last event after {len(output.token_ids)} tokens")


async def read_all(
    client: CompletionsClient, bodies: Sequence[dict[str, Any]], disturb: Disturb | None = None
) -> list[StreamOutput]:
    """Reads all streams at once."""
    outputs = [StreamOutput() for _ in bodies]
    await read_into(client, bodies, outputs, disturb)
    return outputs


async def read_into(
    client: CompletionsClient,
    bodies: Sequence[dict[str, Any]],
    outputs: Sequence[StreamOutput],
    disturb: Disturb | None = None,
) -> None:
    """Reads each stream into its output. `disturb` is called when an eighth of all tokens has been read: streams have
    begun, and none is near its end."""
    reached = asyncio.Event()
    threshold = sum(body["max_tokens"] for body in bodies) // 8

    def count() -> None:
        if not reached.is_set() and sum(len(output.token_ids) for output in outputs) >= threshold:
            reached.set()

    async def wait_and_disturb(disturb: Disturb) -> None:
        await reached.wait()
        await disturb()

    async with asyncio.TaskGroup() as tasks:
        for body, output in zip(bodies, outputs, strict=True):
            tasks.create_task(client.read(body, output, on_event=count))
        if disturb is not None:
            tasks.create_task(wait_and_disturb(disturb))
