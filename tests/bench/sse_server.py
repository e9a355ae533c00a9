"""A real HTTP server on a free port that speaks just enough of OpenAI's API: the test says what each answer is."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from aiohttp import web

Answer = Callable[[dict[str, Any]], AsyncIterator[bytes]]


def chunk(text: str | None = None, *, chat: bool = True, **fields: Any) -> bytes:
    choices: list[dict[str, Any]] = []
    if text is not None:
        said = {"delta": {"content": text}} if chat else {"text": text}
        choices = [{"index": 0, **said, "finish_reason": None}]
    body = {"id": "x", "object": "chunk", "choices": choices, **fields}
    return b"id: 1;x;0;1;1;\ndata: " + msgspec.json.encode(body) + b"\n\n"


def usage(prompt: int, completion: int, cached: int = 0) -> bytes:
    details = {"cached_tokens": cached}
    return chunk(usage={"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details})


DONE = b"data: [DONE]\n\n"


class SseServer:
    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        """What was shown as a bearer token, with questions for models too."""
        self.url = ""

    async def _post(self, request: web.Request) -> web.StreamResponse:
        self.keys.append(request.headers.get("Authorization"))
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.path)
        if body["model"] != "tiny":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for part in self.answer(body):
            await response.write(part)
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._post)
        app.router.add_post("/v1/completions", self._post)
        app.router.add_get("/v1/models", self._models)
        return app


@contextmanager
def serving(answer: Answer) -> Iterator[SseServer]:
    server = SseServer(answer)
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(server.app(), shutdown_timeout=1.0)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
