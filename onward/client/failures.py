"""The failures that end a connection before its stream, whether a retry may succeed, and the error of a failed
stream."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import Any

STALE_ATTEMPT = "stale_attempt"
_BUSY_CODES = ("conflict", "label_in_use", STALE_ATTEMPT)
"""Codes of a 409 while the server has not noticed yet that an earlier connection of this stream is closed."""
_PROXY_STATUSES = (429, 502, 503, 504)
"""Statuses that are retryable if the body does not state it: a proxy sends them while the server behind it restarts."""
_FINAL_CODES = frozenset(
    {
        "aborted",
        "crashed_engine",
        "crashed_worker",
        "deadline_exceeded",
        "grammar_failed",
        "internal_error",
        "invalid_logits",
        "no_token_allowed",
        "stream_unknown",
    }
)
"""Codes of a failed response (`/v1/responses`) that are not retryable. Such an error has no `retryable` field."""


@dataclass(frozen=True, slots=True)
class ConnectionFailure:
    message: str
    is_retryable: bool = True
    status: int | None = None
    """HTTP status of a refusal."""
    code: str | None = None
    retry_after_s: float = 0.0


class ReceivedOutput:
    """The output that a stream had delivered when it failed."""

    def __init__(self, last_event_id: str, data: list[bytes]) -> None:
        self.last_event_id = last_event_id
        """The position at which another client can resume the stream (an argument of `ResumingClient.stream`). Empty if
        nothing arrived."""
        self._data = data

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(data) for data in self._data]

    @property
    def texts(self) -> dict[int, str]:
        """The text of each choice, or of each output item of a response."""
        texts: dict[int, str] = {}
        for event in self.events:
            for index, text in _texts_of(event):
                texts[index] = texts.get(index, "") + text
        return texts

    @property
    def text(self) -> str:
        """The text that had arrived: of the one choice, or of all output items of a response. Several choices are
        joined; `texts` has them apart."""
        return "".join(self.texts.values())


class StreamFailed(Exception):
    """A stream cannot be resumed, or was not resumed in time."""

    def __init__(self, message: str, failure: ConnectionFailure, partial: ReceivedOutput) -> None:
        super().__init__(message)
        self.status = failure.status
        """The HTTP status of the last refusal; None: the connection was lost."""
        self.code = failure.code
        """The server's code for the error, if it sent one."""
        self.partial = partial


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> ConnectionFailure:
    """Returns the failure that a response without events means."""
    error = _error_fields(body)
    code = error.get("code")
    is_busy = status == 409 and (code in _BUSY_CODES or error.get("param") == "X-Request-Id")
    is_retryable = is_busy or bool(error.get("retryable", status in _PROXY_STATUSES))
    message = f"the server answered {status}: {error.get('message') or body[:200].decode('utf-8', 'replace')}"
    return ConnectionFailure(message, is_retryable, status, code, _retry_after_s(headers.get("retry-after", ""), error))


def error_event_failure(data: bytes) -> ConnectionFailure:
    """Returns the failure that an `error` event of a stream means."""
    error = _error_fields(data)
    message = f"the server ended the stream: {error.get('message') or data[:200].decode('utf-8', 'replace')}"
    return ConnectionFailure(
        message, bool(error.get("retryable")), code=error.get("code"), retry_after_s=_retry_after_s("", error)
    )


def response_failure(data: bytes) -> ConnectionFailure:
    """Returns the failure that a `response.failed` event means."""
    error = _object(_object(_decoded(data)).get("response")).get("error")
    error = _object(error)
    is_retryable = error.get("code") != "invalid_prompt" and error.get("type") not in _FINAL_CODES
    return ConnectionFailure(f"the response failed: {error.get('message')}", is_retryable, code=error.get("type"))


def _error_fields(body: bytes) -> dict[str, Any]:
    return _object(_object(_decoded(body)).get("error"))


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _retry_after_s(header: str, error: dict[str, Any]) -> float:
    """Returns the time to wait, or 0. The header has seconds or a date; the error may have seconds with a fraction."""
    seconds = error.get("retry_after_s")
    if isinstance(seconds, int | float) and seconds > 0:
        return float(seconds)
    if header.strip().isdecimal():
        return float(header)
    with suppress(ValueError):
        moment = parsedate_to_datetime(header)
        return max(0.0, (moment.astimezone(UTC) - datetime.now(UTC)).total_seconds())
    return 0.0


def _texts_of(event: dict[str, Any]) -> list[tuple[int, str]]:
    if event.get("type") == "response.output_text.delta":
        return [(event["output_index"], event["delta"])]
    return [
        (choice["index"], _object(choice.get("delta")).get("content") or choice.get("text") or "")
        for choice in event.get("choices") or []
    ]
