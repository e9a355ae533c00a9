"""Sends the requests of a batch, a limited number at a time, and passes each answer on when it comes.

Transient failures (no server, overload, an error that the server calls retryable) are retried for a while. Everything
else is an answer. How a request reaches a server is up to a `Send` (`http_sender`, `app_sender`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from onward.batches.batch_files import BatchError, BatchRequest, BatchResponse, BatchResult

MAX_PAUSE_S = 30.0
FIRST_PAUSE_S = 0.5
MAX_ANSWER_BYTES = 256 << 20
TOO_LARGE = "too_large"
_BUSY = frozenset({429, 503})
_PASSING = frozenset({408, 500, 502, 504}) | _BUSY


class _ErrorFields(msgspec.Struct, frozen=True):
    retryable: bool | None = None
    code: str | None = None


class _BatchFailure(msgspec.Struct, frozen=True):
    error: _ErrorFields


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of sending a request once."""

    result: BatchResponse | BatchError
    wait_s: float = 0.0
    """How long the server wants the client to wait before a retry."""


Send = Callable[[BatchRequest, int], Awaitable[Outcome]]
"""Sends a request once. The number is that of the request in its batch plus the number of the retry, so that a sender
with several servers can begin with each in turn."""


def _never(_: BatchRequest, __: BatchResponse) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Retries:
    max_retries: int = 8
    waits_for: Callable[[BatchRequest, BatchResponse], bool] = _never
    """Returns whether an answer is retried without a limit. Something else must end the batch."""


async def run_batch(
    send: Send,
    requests: Iterable[BatchRequest],
    concurrency: int,
    on_result: Callable[[BatchResult], Awaitable[None]],
    retries: Retries,
) -> None:
    """Sends all requests, at most `concurrency` at a time. `requests` are read in threads, one at a time, as they are
    needed."""
    pending, reading = iter(enumerate(requests)), asyncio.Lock()

    async def work() -> None:
        while True:
            async with reading:
                following = await asyncio.to_thread(_next_of, pending)
            if following is None:
                return
            number, request = following
            await on_result(await _send_with_retries(send, request, number, retries))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())


def _next_of(pending: Iterator[tuple[int, BatchRequest]]) -> tuple[int, BatchRequest] | None:
    return next(pending, None)


async def _send_with_retries(send: Send, request: BatchRequest, number: int, retries: Retries) -> BatchResult:
    """Sends a request, and retries transient failures. `number` is the number of the request in its batch."""
    pause_s, attempt, num_counted = FIRST_PAUSE_S, 0, 0
    while True:
        outcome = await send(request, number + attempt)
        if not (isinstance(outcome.result, BatchResponse) and retries.waits_for(request, outcome.result)):
            if not _is_transient(outcome.result) or num_counted == retries.max_retries:
                break
            num_counted += 1
        await asyncio.sleep(min(MAX_PAUSE_S, max(pause_s, outcome.wait_s)))
        attempt, pause_s = attempt + 1, min(MAX_PAUSE_S, 2 * pause_s)
    result = outcome.result
    if isinstance(result, BatchResponse):
        return BatchResult(f"batch_req_{result.request_id}", request.custom_id, result, None)
    return BatchResult(f"batch_req_{request.custom_id}", request.custom_id, None, result)


def is_busy(result: BatchResponse) -> bool:
    """Returns whether a server refuses the request because it has no room, or does not serve yet."""
    return result.status_code in _BUSY and not _is_final(result.body)


def error_code(result: BatchResponse) -> str | None:
    error = _error_of(result.body)
    return None if error is None else error.code


def _is_transient(result: BatchResponse | BatchError) -> bool:
    if isinstance(result, BatchError):
        return result.code != TOO_LARGE
    return result.status_code in _PASSING and not _is_final(result.body)


def _is_final(body: Any) -> bool:
    """Returns whether the server says that the same request would fail again, for example because it crashes
    workers."""
    error = _error_of(body)
    return error is not None and error.retryable is False


def _error_of(body: Any) -> _ErrorFields | None:
    try:
        return msgspec.json.decode(body, type=_BatchFailure).error
    except (msgspec.MsgspecError, TypeError):
        return None


def body_of_answer(body_bytes: bytes) -> Any:
    """Returns JSON as it came but on one line, and any other body as text."""
    try:
        msgspec.json.decode(body_bytes)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body_bytes.decode(errors="replace")
    return msgspec.Raw(msgspec.json.format(body_bytes, indent=-1))


def wait_of_header(retry_after: str) -> float:
    """Returns the seconds of a `Retry-After` header, or 0."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return 0.0
