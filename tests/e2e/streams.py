"""Many streams at once, read event by event as a careful client would: each token once, in order, checked by cursor."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from onward.proto.cursor import parse_cursor


@dataclass
class Stream:
    body: dict[str, Any]
    path: str = "/v1/chat/completions"
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    done: bool = False
    error: dict[str, Any] | None = None
    resume: dict[str, Any] | None = None
    """What to put into the next request, where this one was given up."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.body.get("generated_token_ids", []))

    def result(self) -> tuple[str, list[int], list[str], int]:
        """What must be the same however the stream was disturbed."""
        assert self.usage is not None, self.error
        return self.text, self.token_ids, self.finish_reasons, self.usage["completion_tokens"]

    async def read(self, client: httpx.AsyncClient, on_tokens: Callable[[], None]) -> None:
        body = self.body | {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", self.path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    self._take_cursor(line[4:])
                    on_tokens()
                elif line.startswith("data: "):
                    self._take_data(line[6:])

    def _take_cursor(self, text: str) -> None:
        cursor = parse_cursor(text)
        self.token_ids += cursor.new_tokens.get(0, [])
        assert cursor.choices[0].position == len(self.token_ids), "the cursor counts every token once"

    def _take_data(self, data: str) -> None:
        assert not self.done, "nothing comes after [DONE]"
        if data == "[DONE]":
            self.done = True
            return
        event = msgspec.json.decode(data)
        self.error = event.get("error", self.error)
        self.usage = event.get("usage") or self.usage
        self.resume = event.get("partial", event).get("resume", self.resume)
        for choice in event.get("choices", []):
            self.text += choice.get("delta", {}).get("content") or choice.get("text") or ""
            if choice["finish_reason"]:
                self.finish_reasons.append(choice["finish_reason"])


def run_streams(
    url: str,
    bodies: list[dict[str, Any]],
    on_tokens: Callable[[list[Stream]], None] = lambda _: None,
    path: str = "/v1/chat/completions",
    headers: dict[str, str] | None = None,
) -> list[Stream]:
    """Reads all streams to their end. `on_tokens` is called at each event that carries tokens."""
    streams = [Stream(body, path) for body in bodies]

    async def run() -> None:
        limits = httpx.Limits(max_connections=len(bodies) + 1)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, headers=headers) as client:
            await asyncio.gather(*(stream.read(client, lambda: on_tokens(streams)) for stream in streams))

    asyncio.run(run())
    assert all(stream.done for stream in streams)
    return streams


TOPICS = ["rivers", "glass", "bread", "sails", "moths", "iron", "chess", "snow", "salt", "clocks", "owls", "ink", "tea"]


def chat_body(index: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Different prompts, every other one sampled with a seed."""
    sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": index}
    question = f"{index}. Tell me something about {TOPICS[index % len(TOPICS)]}, and why it matters."
    return {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **sampling,
        **more,
    }
