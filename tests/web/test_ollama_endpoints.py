"""An endpoint of Ollama's API in front of a stand-in for the endpoint of OpenAI's API."""

import asyncio
import gc
import json
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from onward.clock import SystemClock
from onward.web import asgi
from onward.web.auth.api_key_table import Caller
from onward.web.auth.authenticator import set_caller
from onward.web.error_handlers import handle_errors
from onward.web.ollama_api.ollama_conversion import INNER_CHAT_PATH, ConvertedRequest, convert_chat
from onward.web.ollama_api.ollama_endpoints import Conversion, ConvertingEndpoint, OllamaServices
from tests.web.exchange import Client, body_part, request_scope

MESSAGE: dict[str, Any] = {"role": "user", "content": "hi"}


class Cards:
    def served_names(self) -> list[str]:
        return ["m"]

    async def model_cards(self) -> list[dict[str, Any]]:
        return [{"id": "m"}]


async def convert_in_thread(_caller: str, conversion: Conversion, _num_bytes: int) -> ConvertedRequest:
    return await asyncio.to_thread(conversion)


def post(inner: ASGIApp, body: bytes) -> Client:
    """What a client of `/api/chat` hears when the endpoint below is `inner`."""
    services = OllamaServices(Cards(), SystemClock(), 1 << 20, {INNER_CHAT_PATH: inner}, convert_in_thread)
    scope = request_scope("/api/chat")
    set_caller(scope, Caller())
    client = Client([body_part(body)])
    asyncio.run(ConvertingEndpoint(convert_chat, services)(scope, client.receive, client.send))
    return client


def chat(fields: dict[str, Any]) -> bytes:
    return json.dumps({"model": "m", "messages": [MESSAGE]} | fields).encode()


async def accept(_: Scope, receive: Receive, send: Send) -> None:
    await asgi.read_body(receive, 1 << 20)
    await asgi.respond(send, 418, b'{"error": {"message": "it has come"}}')


def test_a_body_is_accepted_or_refused_at_every_depth() -> None:
    """The converted body is nested more deeply than the client's."""
    answers = set()
    for depth in range(850, 1010):
        body = chat({}).replace(b"{", b'{"format": ' + b'{"a":' * depth + b"1" + b"}" * depth + b",", 1)
        client = post(accept, body)
        answers.add((client.status, b"the body is not valid JSON: it is nested too deeply" in client.body))
    assert answers == {(418, False), (400, True)}


def test_a_decoded_request_is_not_kept_during_the_answer() -> None:
    kept: list[object] = []

    async def look(_: Scope, receive: Receive, send: Send) -> None:
        assert b"a long conversation" in await asgi.read_body(receive, 1 << 20)
        kept.extend(one for one in gc.get_objects() if isinstance(one, dict) and "a long conversation" in one)
        await asgi.respond(send, 200, b"")

    tool = b'{"function": {"name": "f", "parameters": {"a long conversation": [[]]}}}'
    post(look, chat({"tools": [7]}).replace(b"7", tool))
    assert not kept


def test_a_stream_that_fails_inside_the_server_ends_with_an_error_line() -> None:
    async def fail(scope: Scope, _: Receive, send: Send) -> None:
        async def begin() -> None:
            await send(asgi.start_message(200, {"content-type": "text/event-stream"}))
            await send(asgi.body_message(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: {"cho'))
            raise ValueError("a bug")

        await handle_errors(scope, send, begin())

    client = post(fail, chat({}))
    assert [message["type"] for message in client.heard].count("http.response.start") == 1
    text, error = map(json.loads, client.body.splitlines())
    assert (text["message"]["content"], text["done"]) == ("a", False)
    assert error == {"error": "internal error"}
    assert not client.heard[-1]["more_body"]


def test_a_stream_that_ends_before_its_output_does_ends_with_an_error_line() -> None:
    async def stop(_: Scope, __: Receive, send: Send) -> None:
        await send(asgi.start_message(200, {"content-type": "text/event-stream"}))
        await send(asgi.body_message(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n', more_body=False))

    text, error = map(json.loads, post(stop, chat({})).body.splitlines())
    assert text["message"]["content"] == "a"
    assert list(error) == ["error"]


def test_an_error_in_a_stream_is_its_only_end() -> None:
    async def refuse(_: Scope, __: Receive, send: Send) -> None:
        await send(asgi.start_message(200, {"content-type": "text/event-stream"}))
        event = b'event: error\ndata: {"error": {"message": "no instance is left"}}\n\n'
        await send(asgi.body_message(event, more_body=False))

    assert post(refuse, chat({})).body == b'{"error":"no instance is left"}\n'
