"""Sends the requests of a batch to servers over HTTP."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import msgspec

from onward.batches import batch_runner
from onward.batches.batch_files import BatchError, BatchRequest, BatchResponse
from onward.batches.batch_runner import TOO_LARGE, Outcome, Send, body_of_answer, wait_of_header

CONNECT_TIMEOUT_S = 10.0
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)


@dataclass(frozen=True, slots=True)
class BatchTarget:
    urls: tuple[str, ...]
    """Servers that answer alike, such as routers of one cluster. Requests begin with each in turn."""
    api_key: str | None = None
    timeout_s: float = 3600.0
    """Time limit of one request."""


@contextlib.asynccontextmanager
async def http_sender(target: BatchTarget, concurrency: int) -> AsyncIterator[Send]:
    connector = aiohttp.TCPConnector(limit=concurrency)
    timeout = aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def send(request: BatchRequest, number: int) -> Outcome:
            return await _send_once(session, target, target.urls[number % len(target.urls)], request)

        yield send


async def _send_once(session: aiohttp.ClientSession, target: BatchTarget, url: str, request: BatchRequest) -> Outcome:
    headers = {"content-type": "application/json"}
    if target.api_key is not None:
        headers["authorization"] = f"Bearer {target.api_key}"
    body = msgspec.json.encode(request.body)
    try:
        async with session.post(url + request.url, data=body, headers=headers, allow_redirects=False) as response:
            body_bytes = await _read_whole(response.content)
            if body_bytes is None:
                max_bytes = batch_runner.MAX_ANSWER_BYTES
                return Outcome(BatchError(TOO_LARGE, f"the answer is larger than {max_bytes} bytes"))
            request_id = response.headers.get("x-request-id", "")
            answer = BatchResponse(response.status, request_id, body_of_answer(body_bytes))
            return Outcome(answer, wait_of_header(response.headers.get("retry-after", "0")))
    except _BROKEN as fault:
        reason = str(fault) or type(fault).__name__
        return Outcome(BatchError("unreachable", f"{url}{request.url}: {reason}"[:1000]))


async def _read_whole(content: aiohttp.StreamReader) -> bytes | None:
    """Returns the whole body, or None if it is too long."""
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in content.iter_any():
        chunks.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > batch_runner.MAX_ANSWER_BYTES:
            return None
    return b"".join(chunks)
