"""Clients that read streams as JSON objects, and a function that makes an OpenAI client resume its streams."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, overload

import httpx

from onward.client.event_parser import EventParser
from onward.client.failures import ReceivedOutput, StreamFailed, refusal
from onward.client.options import OnResume, ResumeOptions
from onward.client.resuming_http_client import async_resuming_http_client, resuming_http_client
from onward.client.resuming_transport import AsyncResumingTransport, ResumingTransport
from onward.optional_packages import require_openai

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


class ResumingClient:
    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        options: ResumeOptions | None = None,
        on_resume: OnResume | None = None,
    ) -> None:
        """`base_url` is the URL of the server or router, without `/v1`."""
        self._options = options or ResumeOptions()
        transport = ResumingTransport(options=self._options, on_resume=on_resume)
        self._client = httpx.Client(base_url=base_url, headers=_auth(api_key), transport=transport)

    def stream(self, path: str, body: Mapping[str, Any], *, last_event_id: str = "") -> Iterator[dict[str, Any]]:
        """Yields the decoded events of one stream. Closing the iterator ends the request at the server. With
        `last_event_id` the stream continues after that event of an earlier stream with the same body. Raises
        StreamFailed."""
        with self._client.stream(
            "POST", path, json={**body, "stream": True}, headers=_cursor(last_event_id)
        ) as response:
            if response.status_code != 200:
                raise _refused(response, response.read())
            parser = EventParser(self._options.max_event_bytes)
            for received in response.iter_raw():
                yield from _decoded(parser, received)

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncResumingClient:
    """`ResumingClient` for asyncio and trio."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        options: ResumeOptions | None = None,
        on_resume: OnResume | None = None,
    ) -> None:
        self._options = options or ResumeOptions()
        transport = AsyncResumingTransport(options=self._options, on_resume=on_resume)
        self._client = httpx.AsyncClient(base_url=base_url, headers=_auth(api_key), transport=transport)

    async def stream(
        self, path: str, body: Mapping[str, Any], *, last_event_id: str = ""
    ) -> AsyncIterator[dict[str, Any]]:
        async with self._client.stream(
            "POST", path, json={**body, "stream": True}, headers=_cursor(last_event_id)
        ) as response:
            if response.status_code != 200:
                raise _refused(response, await response.aread())
            parser = EventParser(self._options.max_event_bytes)
            async for received in response.aiter_raw():
                for event in _decoded(parser, received):
                    yield event

    async def aclose(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


@overload
def resume_streams(
    client: "OpenAI", *, options: ResumeOptions | None = None, on_resume: OnResume | None = None
) -> "OpenAI": ...
@overload
def resume_streams(
    client: "AsyncOpenAI", *, options: ResumeOptions | None = None, on_resume: OnResume | None = None
) -> "AsyncOpenAI": ...
def resume_streams(
    client: "OpenAI | AsyncOpenAI", *, options: ResumeOptions | None = None, on_resume: OnResume | None = None
) -> "OpenAI | AsyncOpenAI":
    """Returns a copy of an OpenAI client that resumes its streams. The copy has the settings of the client, shares its
    connections, and does not retry by itself, so that only the transport does."""
    require_openai("onward.client.resume_streams")
    from openai import OpenAI

    options = options or ResumeOptions()
    http_client = (
        resuming_http_client(client._client, options, on_resume)
        if isinstance(client, OpenAI)
        else async_resuming_http_client(client._client, options, on_resume)
    )
    return client.copy(http_client=http_client, max_retries=0)


def _auth(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def _cursor(last_event_id: str) -> dict[str, str]:
    return {"Last-Event-ID": last_event_id} if last_event_id else {}


def _refused(response: httpx.Response, body: bytes) -> StreamFailed:
    failure = refusal(response.status_code, response.headers, body)
    return StreamFailed(failure.message, failure, ReceivedOutput("", []))


def _decoded(parser: EventParser, received: bytes) -> Iterator[dict[str, Any]]:
    for event in parser.feed(received):
        if event.data and event.data != b"[DONE]":
            yield json.loads(event.data)
