"""The backends of `onward chat`: a server over HTTP, or a model in this process. Both yield an answer piece by piece.

Closing the iterator, or an exception thrown while it waits, stops the answer: the connection closes, or the request ends.
"""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from onward.bench.openai_chunks import decode_chunk, error_message
from onward.bench.sse_reader import DONE, SseReader
from onward.cli.server_url import checked_url, describe_error
from onward.errors import ServerError, Unavailable
from onward.llm import LLM
from onward.offline.sampling_options import SamplingOptions

Messages = list[dict[str, str]]
_TIMEOUT_S = 120.0
"""Longest time between two pieces of an answer."""


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    text: str
    num_tokens: int | None = None
    """Tokens of the whole answer so far, if known."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Sampling options. None: the default of the server or the model."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None

    def given(self) -> dict[str, Any]:
        return {
            name: value for name in ("max_tokens", "temperature", "seed") if (value := getattr(self, name)) is not None
        }


class ChatBackend(Protocol):
    name: str

    def stream_reply(self, messages: Messages) -> Iterator[ReplyDelta]: ...


class OfflineChatBackend:
    def __init__(self, llm: LLM, options: ChatOptions) -> None:
        self.name = llm.model.name
        self._llm = llm
        self._sampling = SamplingOptions(**options.given())

    def stream_reply(self, messages: Messages) -> Iterator[ReplyDelta]:
        for piece in self._llm.stream_chat(messages, self._sampling):
            yield ReplyDelta(piece.text, piece.num_tokens)


class ServerChatBackend:
    def __init__(self, url: str, model: str | None, options: ChatOptions, api_key: str | None = None) -> None:
        self._url = checked_url(url, "--url")
        self._parts = urlsplit(self._url)
        self._options = options
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.name = model or self._first_model()

    def stream_reply(self, messages: Messages) -> Iterator[ReplyDelta]:
        body = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options.given(),
        }
        with closing(self._connect()) as connection:
            response = self._request(connection, "POST", "/v1/chat/completions", body)
            yield from self._read(response)

    def _read(self, response: http.client.HTTPResponse) -> Iterator[ReplyDelta]:
        reader = SseReader()
        while True:
            try:
                received = response.read1(1 << 16)
            except (OSError, http.client.HTTPException) as fault:
                raise ServerError(f"the connection to {self._url} broke: {fault}") from None
            if not received:
                raise ServerError(f"{self._url} closed the connection in the middle of the answer")
            for data in reader.feed(received):
                if data == DONE:
                    return
                chunk = decode_chunk(data)
                yield ReplyDelta(chunk.text, chunk.usage.completion_tokens if chunk.usage else None)

    def _first_model(self) -> str:
        with closing(self._connect()) as connection:
            try:
                return json.loads(self._request(connection, "GET", "/v1/models").read())["data"][0]["id"]
            except (ValueError, KeyError, IndexError, TypeError, OSError):
                raise ServerError(f"{self._url}/v1/models names no model; give one with --model") from None

    def _connect(self) -> http.client.HTTPConnection:
        connection_class = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        assert self._parts.hostname is not None
        return connection_class(self._parts.hostname, self._parts.port, timeout=_TIMEOUT_S)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        """Returns the response before its body is read. Raises `Unavailable` if no server answers, and `ServerError` if
        it refuses the request."""
        try:
            connection.request(
                method,
                self._parts.path.rstrip("/") + path,
                json.dumps(body) if body is not None else None,
                self._headers,
            )
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as fault:
            raise Unavailable(
                f"no server answers at {self._url}: {describe_error(fault)}; start one with `make serve`, "
                "or talk without one: --offline"
            ) from None
        if response.status != 200:
            raise ServerError(f"{self._url} answers {response.status}: {error_message(response.read(1 << 16))}")
        return response
