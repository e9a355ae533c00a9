"""HTTP helpers for ASGI endpoints: reading a body within a size limit, sending responses, detecting a disconnect."""

import asyncio
from collections.abc import Coroutine, Mapping
from io import BytesIO
from typing import Any

from starlette.types import Receive, Scope, Send

from onward.errors import ClientError, InvalidRequest, TooLarge
from onward.proto.engine import ErrorInfo
from onward.web.error_format import error_body, error_headers

BODY_TIMEOUT_S = 60.0
MAX_DISCARDED_BYTES = 64 << 20

ERROR_CODE = "onward.error_code"
"""Key in the first message of an error response, for middleware. ASGI servers ignore unknown keys."""
JSON_HEADERS = {"content-type": "application/json"}


class ClientDisconnected(Exception):
    """The client has disconnected, or was given up, so there is no connection for a response."""


def header(scope: Scope, name: bytes) -> str | None:
    """Returns the first header of this lower-case name, decoded as Latin-1, so that any byte is preserved."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    try:
        return await asyncio.wait_for(_read_body(receive, max_bytes), BODY_TIMEOUT_S)
    except TimeoutError:
        raise ClientError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="body_timeout") from None


async def read_connected_body(receive: Receive, max_bytes: int) -> bytes:
    """Reads a body like `read_body`, for Starlette's endpoints: a disconnect raises `InvalidRequest`, because these
    endpoints return a response in any case."""
    try:
        return await read_body(receive, max_bytes)
    except ClientDisconnected:
        raise InvalidRequest("the client has disconnected") from None


async def _read_body(receive: Receive, max_bytes: int) -> bytes:
    """Reads the body. Bytes over the limit are discarded, but still read for a while, because a client that is still
    sending does not read the response.

    A large body grows in place (`BytesIO` hands its buffer over): joining parts would take as much memory again, and all
    other work of the process would wait meanwhile."""
    buffer = BytesIO()
    num_bytes, more_body = 0, True
    while more_body and num_bytes <= max_bytes + MAX_DISCARDED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        more_body = message.get("more_body", False)
        if not num_bytes and not more_body and len(part) <= max_bytes:
            return part
        num_bytes += len(part)
        if num_bytes <= max_bytes:
            buffer.write(part)
        else:
            buffer = BytesIO()
    if num_bytes > max_bytes:
        raise TooLarge(f"the body is larger than {max_bytes} bytes, the limit of this server")
    return buffer.getvalue()


async def run_until_disconnect(receive: Receive, coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs `coroutine` to its end, or until the client disconnects. Cancelling its task acts like a
    disconnect."""
    task = asyncio.ensure_future(coroutine)
    disconnected = asyncio.ensure_future(_wait_disconnect(receive))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        disconnected.cancel()
        await asyncio.wait((task, disconnected))
    # CancelledError is not passed on: it would look as if the caller's own task had been cancelled, but that continues.
    if task.cancelled():
        raise ClientDisconnected
    try:
        task.result()
    finally:
        # An error refers to this frame, and the task to the error: a cycle that would keep the request's body until the
        # next garbage collection.
        del task


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def start_message(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}


def body_message(body: bytes, more_body: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more_body}


async def respond(send: Send, status: int, body: bytes, headers: Mapping[str, str] = JSON_HEADERS) -> None:
    await send(start_message(status, {**headers, "content-length": str(len(body))}))
    await send(body_message(body, more_body=False))


async def respond_error(send: Send, info: ErrorInfo, body: bytes | None = None) -> None:
    """Sends an error response. `body` is the error in another API's format; by default it has OpenAI's."""
    body = body or error_body(info)
    headers = {**JSON_HEADERS, **error_headers(info), "content-length": str(len(body))}
    await send({**start_message(info.status, headers), ERROR_CODE: info.code})
    await send(body_message(body, more_body=False))
