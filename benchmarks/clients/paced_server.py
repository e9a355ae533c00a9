"""A server that computes nothing and keeps to a timetable: it is known what a load generator should report.

    python -m benchmarks.clients.paced_server

It streams chats as `onward serve` does: an event with the role at once, one event for each token, one with the usage. The
time to the first token is between 100 and 300 ms, evenly spread over successive requests. Tokens are 10 ms apart, but every
eighth one 40 ms, as where a server computes another request's prompt in between: the median time between tokens (10 ms) is
not the mean (13.75 ms).
"""

import asyncio
import json
from collections.abc import Iterator
from itertools import count
from typing import Any, ClassVar

from aiohttp import web

from benchmarks.harness.serving import ServeProcess

MODEL = "paced"
FIRST_TOKEN_S = (0.1, 0.3)
GAP_S, LONG_GAP_S, LONG_EVERY = 0.010, 0.040, 8
TEMPLATE_TOKENS = 30
_GOLDEN = 0.6180339887498949
_requests = count()


class PacedProcess(ServeProcess):
    COMMAND: ClassVar = ["-m", "benchmarks.clients.paced_server"]


def token_times_s(number: int, num_tokens: int) -> Iterator[float]:
    """When each token of a request is due, after its arrival."""
    first_s, last_s = FIRST_TOKEN_S
    due_s = first_s + (last_s - first_s) * (number * _GOLDEN % 1)
    for position in range(num_tokens):
        if position:
            due_s += GAP_S if position % LONG_EVERY else LONG_GAP_S
        yield due_s


def _event(delta: dict[str, str] | None, usage: dict[str, int] | None = None) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": None}]
    chunk = {"id": "paced", "object": "chat.completion.chunk", "created": 0, "model": MODEL, "choices": choices}
    return b"data: " + json.dumps(chunk | {"usage": usage}).encode() + b"\n\n"


def _num_words(messages: list[dict[str, Any]]) -> int:
    texts = [m["content"] if isinstance(m["content"], str) else m["content"][0]["text"] for m in messages]
    return sum(len(text.split()) for text in texts)


async def chat(request: web.Request) -> web.StreamResponse:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    body = await request.json()
    num_tokens = body.get("max_completion_tokens") or body["max_tokens"]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(_event({"role": "assistant", "content": ""}))
    for due_s in token_times_s(next(_requests), num_tokens):
        await asyncio.sleep(began_s + due_s - loop.time())
        await response.write(_event({"content": " word"}))
    prompt_tokens = _num_words(body["messages"]) + TEMPLATE_TOKENS
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": prompt_tokens + num_tokens,
    }
    await response.write(_event(None, usage) + b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def main() -> None:
    """Until it is stopped."""
    app = web.Application(client_max_size=1 << 24)
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models), web.get("/health", health)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"paced server at http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
