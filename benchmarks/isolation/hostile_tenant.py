"""A tenant that does its worst within its key: `python -m benchmarks.isolation.hostile_tenant PORT MODEL KIND KEY`.

Each kind attacks one thing that tenants share. It goes on until the input is closed, and then tells in a line of JSON how
its requests were answered.
"""

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import msgspec
import uvloop

KINDS = {"texts": 6, "grammars": 12, "templates": 24, "resumes": 16, "stored": 8}
"""How many requests of each kind are open at a time."""
WELL_BEHAVED = "decent"
"""No attack: one stream at a time, which is what a key with one request in flight may have."""
HUGE_TEXT = 8_283_750
MAX_TOKENS = 96
CUT_AFTER = 4
"""Events of a stream, before its client goes away."""
NUM_TOOLS, DESCRIPTION_CHARS = 60, 16_000
"""The tools of a stored response: a megabyte of tools that must not be called, of which the model reads nothing."""

_SLOW_TEMPLATE = "{% set l = range(99999)|list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}"


def bodies(kind: str, model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests without end, each with its path. No grammar is sent twice, since refusals are remembered."""
    chat = [{"role": "user", "content": "x"}]
    for number in itertools.count():
        match kind:
            case "texts":
                yield "/v1/completions", {"prompt": "1" * HUGE_TEXT, "max_tokens": 1}
            case "grammars":
                schema = {"type": "integer", "multipleOf": 9999991, "minimum": -number, "maximum": 98765432109876}
                yield "/v1/chat/completions", {"messages": chat, "guided_json": schema, "max_tokens": 1}
            case "templates":
                yield "/v1/chat/completions", {"messages": chat, "chat_template": _SLOW_TEMPLATE, "max_tokens": 1}
            case "stored":
                tool = {"type": "function", "description": "x" * DESCRIPTION_CHARS, "parameters": {"type": "object"}}
                tools = [{**tool, "name": f"f{number}_{index}"} for index in range(NUM_TOOLS)]
                fields = {"input": "x", "store": True, "max_output_tokens": 16}
                yield "/v1/responses", {**fields, "tools": tools, "tool_choice": "none"}
            case _:
                yield "/v1/chat/completions", _stream(number)


def _stream(seed: int) -> dict[str, Any]:
    chat = [{"role": "user", "content": "x"}]
    return {"messages": chat, "stream": True, "seed": seed, "max_tokens": MAX_TOKENS, "ignore_eos": True}


class HostileTenant:
    def __init__(self, session: aiohttp.ClientSession, kind: str, model: str) -> None:
        self._session, self._kind, self._model = session, kind, model
        self._bodies = bodies(kind, model)
        self._encoded: bytes | None = None
        self.statuses: Counter[int] = Counter()

    async def attack(self) -> None:
        """One of the requests that are open at a time, again and again."""
        while True:
            try:
                await (self._cut_and_resume() if self._kind == "resumes" else self._ask())
            except aiohttp.ClientError:
                self.statuses[0] += 1

    async def _ask(self) -> None:
        path, fields = next(self._bodies)
        if self._encoded is None or self._kind != "texts":
            self._encoded = msgspec.json.encode({"model": self._model, **fields})
        async with self._session.post(path, data=self._encoded) as answer:
            self.statuses[answer.status] += 1
            await answer.read()

    async def _cut_and_resume(self) -> None:
        path, fields = next(self._bodies)
        body = msgspec.json.encode({"model": self._model, **fields})
        cursor = await self._read(path, body, None, CUT_AFTER)
        if cursor is not None:
            await self._read(path, body, cursor, None)

    async def _read(self, path: str, body: bytes, cursor: str | None, num_events: int | None) -> str | None:
        """The last cursor. Goes away after so many events."""
        headers = {} if cursor is None else {"Last-Event-ID": cursor}
        async with self._session.post(path, data=body, headers=headers) as answer:
            self.statuses[answer.status] += 1
            async for line in answer.content:
                if line.startswith(b"id: "):
                    cursor = line[4:].decode().strip()
                    num_events = None if num_events is None else num_events - 1
                if num_events == 0:
                    answer.close()
                    break
        return cursor


async def _until_closed() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def _main(port: int, model: str, kind: str, key: str, until: Callable[[], Any] = _until_closed) -> Counter[int]:
    headers = {"Authorization": f"Bearer {key}", "content-type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", headers=headers, connector=connector, timeout=timeout
    ) as session:
        tenant = HostileTenant(session, kind, model)
        attacks = [asyncio.ensure_future(tenant.attack()) for _ in range(KINDS.get(kind, 1))]
        await until()
        for one in attacks:
            one.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)
        return tenant.statuses


if __name__ == "__main__":
    told = uvloop.run(_main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]))
    print(msgspec.json.encode({str(status): count for status, count in sorted(told.items())}).decode(), flush=True)
