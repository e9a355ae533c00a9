"""Requests that an endpoint makes of another endpoint of the same application, to answer its own request."""

from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onward.web.request_id_middleware import inner_scope, share_response_request_id


@dataclass(slots=True)
class HeldAnswer:
    """A `send` that holds the answer. `start` is None until it has begun."""

    start: Message | None = None
    body: bytes = b""
    is_complete: bool = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
        else:
            self.body += message.get("body", b"")
            self.is_complete = not message.get("more_body", False)


async def run_inner_request(
    endpoint: ASGIApp, scope: Scope, path: str, body: bytes, receive: Receive, send: Send
) -> None:
    """Runs a POST of `body` to `endpoint`, whose path is `path`. The answer goes to `send`. `receive` is the client's, who
    has sent a body already."""
    inner = inner_scope(scope, path, send)

    async def share_id_and_send(message: Message) -> None:
        share_response_request_id(inner, scope)
        await send(message)

    receive = with_body(body, receive)
    del body  # it would stay in memory for the whole answer
    await endpoint(inner, receive, share_id_and_send)


def with_body(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives the body first, and then what the client sends further."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_body() -> Message:
        return first.pop() if first else await receive()

    return receive_body
