"""Loads an OpenAI server with streams and records when each piece of text came. `report` evaluates the records."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from onward.bench.openai_chunks import Chunk, ChunkUsage, decode_chunk, error_message
from onward.bench.prompts import random_words, words_for_tokens
from onward.bench.sse_reader import DONE, SseReader
from onward.errors import OnwardError, ServerError, Unavailable

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_PROBE_WORDS = (16, 64)


@dataclass(frozen=True, slots=True)
class BenchTarget:
    url: str
    model: str
    endpoint: str = "chat"
    api_key: str | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request: a text or chat messages, and the number of tokens to generate."""

    prompt: str | list[dict[str, str]]
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = True


@dataclass(slots=True)
class RequestTiming:
    """Times of one request, on this process's clock."""

    started_s: float
    text_at_s: list[float] = field(default_factory=list)
    """When each event with text or reasoning came."""
    ended_s: float = 0.0
    usage: ChunkUsage | None = None
    error: str | None = None
    text_pieces: list[str] = field(default_factory=list)
    """The text of the answer, without reasoning, in the pieces in which it came."""

    @property
    def is_ok(self) -> bool:
        return self.error is None


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The progress of a run."""

    num_done: int
    num_failed: int
    num_events: int


def new_session(target: BenchTarget) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    timeout = aiohttp.ClientTimeout(total=target.timeout_s, connect=10.0)
    # No limit here: the number of streams is the caller's, and a queue in the client would be measured as the server's.
    return aiohttp.ClientSession(headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Returns the id of the first model that the server offers."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            body = await response.read()
            if response.status != 200:
                raise ServerError(f"{url}/v1/models answers {response.status}: {error_message(body)}")
            models = await response.json(content_type=None)
            return models["data"][0]["id"]
    except (aiohttp.ClientConnectionError, TimeoutError) as fault:
        why = str(fault) or "no answer in time"
        raise Unavailable(f"no server answers at {url}: {why}; start one with `make serve`") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise ServerError(f"{url}/v1/models names no model; give one with --model") from None


async def calibrate_prompt_words(
    session: aiohttp.ClientSession, target: BenchTarget, num_tokens: int, seed: str
) -> int:
    """Returns how many words make a prompt of about `num_tokens`, by this server's count. Raises `ServerError` if the
    server fails."""
    counts: list[int] = []
    for num_words in _PROBE_WORDS:
        record = await send_request(
            session, target, BenchRequest(random_words(num_words, f"{seed} probe {num_words}"), max_tokens=1)
        )
        if record.error is not None or record.usage is None:
            raise ServerError(f"the server does not answer a first request: {record.error}")
        counts.append(record.usage.prompt_tokens)
    return words_for_tokens(num_tokens, ((_PROBE_WORDS[0], counts[0]), (_PROBE_WORDS[1], counts[1])))


async def run(
    session: aiohttp.ClientSession,
    target: BenchTarget,
    jobs: Sequence[BenchRequest],
    num_streams: int,
    on_progress: Callable[[LoadProgress], None] = lambda snapshot: None,
) -> list[RequestTiming]:
    """Runs the jobs, `num_streams` at a time. Each stream begins its next job when its last one has ended."""
    records: list[RequestTiming] = []
    remaining = iter(jobs)

    def report() -> None:
        failed = sum(not record.is_ok for record in records)
        done = sum(record.ended_s > 0 for record in records)
        on_progress(LoadProgress(done, failed, sum(len(record.text_at_s) for record in records)))

    async def one_stream() -> None:
        for job in remaining:
            record = RequestTiming(time.perf_counter())
            records.append(record)
            await send_request(session, target, job, record)
            report()

    await asyncio.gather(*(one_stream() for _ in range(num_streams)))
    return records


async def send_request(
    session: aiohttp.ClientSession, target: BenchTarget, job: BenchRequest, record: RequestTiming | None = None
) -> RequestTiming:
    """Sends a request and reads its answer. A fault is recorded, not raised, because other requests are being
    measured."""
    record = record or RequestTiming(time.perf_counter())
    try:
        async for chunk in _chunks(session, target, job):
            if chunk.has_output:
                record.text_at_s.append(time.perf_counter())
            if chunk.text:
                record.text_pieces.append(chunk.text)
            record.usage = chunk.usage or record.usage
        if record.usage is None:
            record.error = "the server did not report usage"
    except OnwardError as fault:
        record.error = fault.message
    except (aiohttp.ClientError, TimeoutError, OSError) as fault:
        record.error = f"{type(fault).__name__}: {fault}".rstrip(": ")
    record.ended_s = time.perf_counter()
    return record


async def _chunks(session: aiohttp.ClientSession, target: BenchTarget, job: BenchRequest) -> AsyncIterator[Chunk]:
    async with session.post(target.url + PATHS[target.endpoint], json=_body(target, job)) as response:
        if response.status != 200:
            raise ServerError(f"HTTP {response.status}: {error_message(await response.read())}")
        reader = SseReader()
        async for received in response.content.iter_any():
            for data in reader.feed(received):
                if data == DONE:
                    return
                yield decode_chunk(data)
    raise ServerError("the stream broke off before [DONE]")


def _body(target: BenchTarget, job: BenchRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": job.max_tokens,
        "temperature": job.temperature,
    }
    if job.ignore_eos:  # not every server knows the field
        body["ignore_eos"] = True
    if target.endpoint == "completions":
        return body | {"prompt": job.prompt}
    messages = [{"role": "user", "content": job.prompt}] if isinstance(job.prompt, str) else job.prompt
    return body | {"messages": messages}
