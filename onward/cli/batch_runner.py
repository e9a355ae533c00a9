"""Sends the requests of a batch to a server, so many at a time, and hands the answers out as they come, in any order.

What may pass (nobody there, overloaded, a fault of the server) is asked again for a while; everything else is an answer.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from onward.cli.batch_files import BatchError, BatchRequest, BatchResponse, BatchResult

MAX_PAUSE_S = 30.0
FIRST_PAUSE_S = 0.5
CONNECT_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 256 << 20
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
_TOO_LARGE = "too_large"
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)


@dataclass(frozen=True, slots=True)
class BatchTarget:
    url: str
    api_key: str | None = None
    timeout_s: float = 3600.0
    """Of one request."""
    num_retries: int = 8


async def run_batch(
    server: BatchTarget, requests: Iterable[BatchRequest], concurrency: int, on_result: Callable[[BatchResult], None]
) -> None:
    """`requests` are read as they are needed."""
    pending = iter(requests)
    connector = aiohttp.TCPConnector(limit=concurrency)
    timeout = aiohttp.ClientTimeout(total=server.timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def work() -> None:
            for request in pending:
                on_result(await _send_with_retries(session, server, request))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())


async def _send_with_retries(session: aiohttp.ClientSession, server: BatchTarget, request: BatchRequest) -> BatchResult:
    pause_s = FIRST_PAUSE_S
    result, wait_s = await _send_once(session, server, request)
    for _ in range(server.num_retries):
        if not _is_transient(result):
            break
        await asyncio.sleep(min(MAX_PAUSE_S, max(pause_s, wait_s)))
        pause_s *= 2
        result, wait_s = await _send_once(session, server, request)
    if isinstance(result, BatchResponse):
        return BatchResult(f"batch_req_{result.request_id}", request.custom_id, result, None)
    return BatchResult(f"batch_req_{request.custom_id}", request.custom_id, None, result)


def _is_transient(result: BatchResponse | BatchError) -> bool:
    return result.status_code in _PASSING if isinstance(result, BatchResponse) else result.code != _TOO_LARGE


async def _send_once(
    session: aiohttp.ClientSession, server: BatchTarget, request: BatchRequest
) -> tuple[BatchResponse | BatchError, float]:
    """What came of it, and how long the server wants us to wait before we ask again."""
    headers = {"content-type": "application/json"}
    if server.api_key is not None:
        headers["authorization"] = f"Bearer {server.api_key}"
    body = msgspec.json.encode(request.body)
    try:
        async with session.post(
            server.url + request.url, data=body, headers=headers, allow_redirects=False
        ) as response:
            body_bytes = await _read_whole(response.content)
            if body_bytes is None:
                return BatchError(_TOO_LARGE, f"the answer is larger than {MAX_ANSWER_BYTES} bytes"), 0.0
            request_id = response.headers.get("x-request-id", "")
            return BatchResponse(response.status, request_id, _body_of(body_bytes)), _wait_of(response)
    except _BROKEN as fault:
        reason = str(fault) or type(fault).__name__
        return BatchError("unreachable", f"{server.url}{request.url}: {reason}"[:1000]), 0.0


async def _read_whole(content: aiohttp.StreamReader) -> bytes | None:
    """None: it is longer than it may be."""
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in content.iter_any():
        chunks.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > MAX_ANSWER_BYTES:
            return None
    return b"".join(chunks)


def _body_of(body_bytes: bytes) -> Any:
    """JSON goes on as it came, but in one line, whatever it was written in."""
    try:
        msgspec.json.decode(body_bytes)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body_bytes.decode(errors="replace")
    return msgspec.Raw(msgspec.json.format(body_bytes, indent=-1))


def _wait_of(response: aiohttp.ClientResponse) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:
        return 0.0
