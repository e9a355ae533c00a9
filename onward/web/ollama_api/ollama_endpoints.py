"""Ollama's routes as ASGI applications, the same at an instance and at a router.

An endpoint converts its request, gives it to the endpoint of OpenAI's API in the same process, and converts the answer
while it is written. It keeps no state, so recovery, limits and the access log are those of the endpoint below.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onward.clock import Clock
from onward.proto.router import IGNORED_FIELDS_HEADER
from onward.web import asgi
from onward.web.access_log import access_record
from onward.web.auth.authenticator import GuardedRoute, RouteAccess, get_caller
from onward.web.converted_errors import Header
from onward.web.error_format import error_body
from onward.web.error_handlers import INTERNAL_ERROR, handle_errors
from onward.web.http_responses import json_response
from onward.web.inner_requests import HeldAnswer, run_inner_request
from onward.web.json_body import decode
from onward.web.ollama_api import ollama_conversion, ollama_paths
from onward.web.ollama_api.answer_kind import AnswerKind
from onward.web.ollama_api.model_views import find_card, ps_body, show_body, tags_body
from onward.web.ollama_api.ollama_answers import AnswerTimes, OllamaAnswerWriter, embed_body, empty_embed_body
from onward.web.ollama_api.ollama_conversion import ConvertedRequest
from onward.web.ollama_api.ollama_errors import ollama_error_body, with_client_field_names
from onward.web.ollama_api.ollama_requests import OllamaShowRequest
from onward.web.request_id_middleware import bypass_middleware_for_body

LINES_TYPE = b"application/x-ndjson"
_LATEST = ":latest"
_IGNORED = IGNORED_FIELDS_HEADER.encode()
_shows = msgspec.json.Decoder(OllamaShowRequest)


class ModelCardSource(Protocol):
    """What Ollama's routes need to know about the served models."""

    def served_names(self) -> Collection[str]: ...
    async def model_cards(self) -> list[dict[str, Any]]:
        """Returns the model cards of `/v1/models`."""
        ...


Conversion = Callable[[], ConvertedRequest]
ConversionRunner = Callable[[str, Conversion, int], Awaitable[ConvertedRequest]]
"""Runs the conversion of a body of this many bytes for a caller."""


async def convert_at_once(_caller: str, conversion: Conversion, _num_bytes: int) -> ConvertedRequest:
    """Converts a body in the event loop, as a `ConversionRunner` without threads. Other tasks do not run meanwhile."""
    return conversion()


@dataclass(frozen=True, slots=True)
class OllamaServices:
    models: ModelCardSource
    clock: Clock
    max_body_bytes: int
    inner_endpoints: Mapping[str, ASGIApp]
    """The endpoints that get converted requests, by path."""
    run_conversion: ConversionRunner = convert_at_once

    def served_name(self, name: str) -> str:
        """Returns the name without `:latest`, which Ollama adds to a name without a tag, unless a model is called so."""
        return name if name in self.models.served_names() else name.removesuffix(_LATEST)


def ollama_routes(services: OllamaServices) -> list[GuardedRoute]:
    """Returns the routes, for clients."""
    shown = ModelEndpoints(services)
    converters: dict[str, Callable[[bytes], ConvertedRequest]] = {
        ollama_paths.CHAT_PATH: ollama_conversion.convert_chat,
        ollama_paths.GENERATE_PATH: ollama_conversion.convert_generate,
        ollama_paths.EMBED_PATH: ollama_conversion.convert_embed,
    }
    endpoints: dict[str, tuple[str, Callable[..., Any]]] = {
        **{path: ("POST", ConvertingEndpoint(convert, services)) for path, convert in converters.items()},
        ollama_paths.SHOW_PATH: ("POST", shown.show),
        ollama_paths.TAGS_PATH: ("GET", shown.tags),
        ollama_paths.PS_PATH: ("GET", shown.ps),
        ollama_paths.VERSION_PATH: ("GET", shown.version),
    }
    return [
        GuardedRoute(path, endpoint, methods=[method], access=RouteAccess.USER)
        for path, (method, endpoint) in endpoints.items()
    ]


class ModelEndpoints:
    """The routes that describe the served models."""

    def __init__(self, services: OllamaServices) -> None:
        self._services = services

    async def tags(self, _: Request) -> Response:
        return json_response(tags_body(await self._services.models.model_cards()))

    async def ps(self, _: Request) -> Response:
        return json_response(ps_body(await self._services.models.model_cards()))

    async def show(self, request: Request) -> Response:
        body = await asgi.read_connected_body(request.receive, self._services.max_body_bytes)
        name = self._services.served_name(decode(body, _shows).model)
        return json_response(show_body(find_card(await self._services.models.model_cards(), name)))

    async def version(self, _: Request) -> Response:
        return json_response({"version": ollama_paths.API_VERSION})


class ConvertingEndpoint:
    """A route whose requests another endpoint answers."""

    def __init__(self, convert: Callable[[bytes], ConvertedRequest], services: OllamaServices) -> None:
        self._convert, self._services = convert, services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = bypass_middleware_for_body(scope, send)
        await handle_errors(scope, send, self._serve(scope, receive, send))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        started_at_s = services.clock.now_s()
        body = await asgi.read_body(receive, services.max_body_bytes)
        conversion = partial(self._convert, body)
        converted = await services.run_conversion(get_caller(scope).name, conversion, len(body))
        del body, conversion
        model = services.served_name(converted.model)
        if not converted.path:
            await self._send_loaded(converted, model, send)
            return
        answer = _answer_send(replace(converted, fields=b""), services.clock, send)
        endpoint, path = services.inner_endpoints[converted.path], converted.path
        inner_body = [converted.body(model)]
        del converted  # it would stay in memory for the whole stream
        await run_inner_request(endpoint, scope, path, inner_body.pop(), receive, answer)
        first_at_s = access_record(scope).first_token_at_s
        until_first_s = None if first_at_s is None else first_at_s - started_at_s
        await answer.finish(AnswerTimes(services.clock.now_s() - started_at_s, until_first_s))

    async def _send_loaded(self, converted: ConvertedRequest, model: str, send: Send) -> None:
        find_card(await self._services.models.model_cards(), model)
        if converted.kind is AnswerKind.EMBED:
            body = empty_embed_body(converted.model)
        else:
            body = OllamaAnswerWriter(converted.model, converted.kind).loaded_body(self._services.clock.wall_s())
        await asgi.respond(send, 200, body)


class _AnswerSend:
    """A `send` that holds a whole answer until the endpoint has returned, and then sends it in Ollama's form."""

    def __init__(self, converted: ConvertedRequest, clock: Clock, send: Send) -> None:
        self.converted, self.clock, self.send = converted, clock, send
        self._held = HeldAnswer()

    async def __call__(self, message: Message) -> None:
        await self._held(message)

    async def finish(self, times: AnswerTimes) -> None:
        """Sends the answer. Without a complete answer the client has disconnected, and nothing is sent."""
        start, converted = self._held.start, self.converted
        if start is None or not self._held.is_complete:
            return
        body = (
            ollama_error_body(self._held.body, converted.kind)
            if start["status"] >= 400
            else self.converted_body(self._held.body, times)
        )
        headers = [(name, value) for name, value in _headers(start) if name != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self.send({**start, "headers": headers})
        await self.send(asgi.body_message(body, more_body=False))

    def converted_body(self, body: bytes, times: AnswerTimes) -> bytes:
        converted = self.converted
        if converted.kind is AnswerKind.EMBED:
            return embed_body(converted.model, body, times)
        writer = OllamaAnswerWriter(converted.model, converted.kind)
        return writer.body(body, times, self.clock.wall_s())


class _LineSend(_AnswerSend):
    """A `send` that writes a stream as lines. An answer that is no stream, such as an error, is held as a whole."""

    def __init__(self, converted: ConvertedRequest, clock: Clock, send: Send) -> None:
        super().__init__(converted, clock, send)
        self._writer = OllamaAnswerWriter(converted.model, converted.kind)
        self._is_streaming = False
        self._is_ended = False
        self._error: bytes | None = None
        """The error of an endpoint that has failed in mid-stream, in OpenAI's form. None: it has not."""

    async def __call__(self, message: Message) -> None:
        if self._is_streaming and (message["type"] == "http.response.start" or self._error is not None):
            # The endpoint has failed, and gives its error as an answer of its own.
            self._error = (self._error or b"") + message.get("body", b"")
            self._is_ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        elif message["type"] == "http.response.start" and message["status"] == 200:
            self._is_streaming = True
            others = [(name, value) for name, value in _headers(message) if name != b"content-type"]
            await self.send({**message, "headers": [*others, (b"content-type", LINES_TYPE)]})
        elif not self._is_streaming:
            await super().__call__(message)
        else:
            self._is_ended = not message.get("more_body", False)
            if lines := self._writer.lines(message.get("body", b""), self.clock.wall_s()):
                await self.send(asgi.body_message(lines))

    async def finish(self, times: AnswerTimes) -> None:
        if not self._is_streaming:
            await super().finish(times)
        elif self._is_ended:
            await self.send(asgi.body_message(self._last_line(times), more_body=False))

    def _last_line(self, times: AnswerTimes) -> bytes:
        if self._writer.has_failed:
            return b""
        if self._error is None and self._writer.is_finished:
            return self._writer.last_line(times, self.clock.wall_s())
        error = self._error or error_body(INTERNAL_ERROR)
        return ollama_error_body(error, self.converted.kind) + b"\n"


def _answer_send(converted: ConvertedRequest, clock: Clock, send: Send) -> _AnswerSend:
    return _LineSend(converted, clock, send) if converted.is_streaming else _AnswerSend(converted, clock, send)


def _headers(start: Message) -> list[Header]:
    return with_client_field_names(list(start.get("headers", [])), _IGNORED)
