"""Builds the error of a request that the router gives up, with the output so far in the client's own format.

The router has the tokens, and an instance can turn them into text, so one is queried. If none answers, the client gets
only the fields that continue the request: tokens are never shown without their text.
"""

import asyncio
from typing import Any

import msgspec
from starlette.types import Send

from onward.proto.engine import ErrorInfo
from onward.proto.finish_reasons import INCOMPLETE_REASONS
from onward.proto.router import CloseAttempt, ClosedAttempt
from onward.router.client_stream import ClientStream
from onward.router.client_writer import ClientWriter
from onward.router.core import ABORTED
from onward.router.instance_registry import InstanceInfo, InstanceState
from onward.router.stream_runner import StreamRunner
from onward.web import asgi
from onward.web.error_format import error_body

MAX_INSTANCES_ASKED = 2
CLOSE_TIMEOUT_S = 3.0
"""For all of them together: the client waits for its end."""


class _ResponseFields(msgspec.Struct, frozen=True):
    n: Any = None
    best_of: Any = None
    echo: Any = None
    max_tokens: Any = None


class PartialOutputWriter(ClientWriter):
    """Ends a stream that was given up with what there is of it."""

    def __init__(self, send: Send, stream: ClientStream, runner: StreamRunner, *, reports_resumes: bool) -> None:
        super().__init__(send, stream, reports_resumes=reports_resumes)
        self._runner = runner

    async def fail(self, error: ErrorInfo, body: bytes | None) -> None:
        stream = self._stream
        is_aborted = error.code == ABORTED.code
        if body is not None or not stream.has_reached_cursor or not (stream.has_tokens or is_aborted):
            await super().fail(error, body)
            return
        # A stream that has not begun fails by its status. One that was aborted has not failed.
        is_written_by_instance = is_aborted or self._has_started or not stream.request.is_streaming
        closed = await self._render_end(error) if is_written_by_instance else None
        if closed is None:
            partial = build_partial(stream)
            await super().fail(error, None if partial is None else error_body(error, msgspec.json.encode(partial)))
        elif stream.request.is_streaming:
            await self.write(closed.body + self.end_marker)
            await self._send(asgi.body_message(b"", more_body=False))
        elif closed.status == 200:
            headers = {**asgi.JSON_HEADERS, **self._resume_header(), **self._ignored_header()}
            await asgi.respond(self._send, 200, closed.body, headers)
        else:
            await asgi.respond_error(self._send, error, closed.body)

    async def _render_end(self, error: ErrorInfo) -> ClosedAttempt | None:
        """Returns the end of the stream as an instance renders it. Returns None if no instance answers in time, or if
        the router is stopping."""
        runner = self._runner
        if runner.is_stopping:
            return None
        message = CloseAttempt(self._stream.build_attempt(runner.clock.now_s(), []), error)
        instances = runner.core.serving_instances(runner.clock.now_s(), self._stream.model or None)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for instance in sorted(instances, key=self._instance_order)[:MAX_INSTANCES_ASKED]:
                    if (closed := await runner.upstream.render_stream_end(instance.url, message)) is not None:
                        return closed
        except TimeoutError:
            pass
        return None

    def _instance_order(self, instance: InstanceInfo) -> tuple[bool, bool]:
        """Returns a sort key: ready instances are queried first, and the instance of the lost attempt comes last among
        its equals."""
        return instance.state is not InstanceState.READY, instance.instance_id == self._stream.instance_id


def build_partial(stream: ClientStream) -> dict[str, Any] | None:
    """Returns the fields that continue the request, which the router knows without an instance; None if it cannot be
    continued."""
    if not stream.has_tokens or not _is_continuable(stream.request.body):
        return None
    token_ids = [choice.token_ids for choice in stream.choices]
    reasons = [
        None if choice.finish_reason in INCOMPLETE_REASONS else choice.finish_reason for choice in stream.choices
    ]
    resume: dict[str, Any] = {
        "seed": stream.request.seed,
        "generated_token_ids": token_ids[0] if len(token_ids) == 1 else token_ids,
        "generated_finish_reasons": reasons,
    }
    if stream.model_tag:
        resume["model"] = stream.model
    if stream.max_prompt_tokens is not None:
        resume["truncate_prompt_tokens"] = stream.max_prompt_tokens
    return {"seed": stream.request.seed, "resume": resume}


def _is_continuable(body: bytes) -> bool:
    """Returns whether the response has all of the generated tokens: not with `best_of`, and not if it is the prompt alone.
    An instance has accepted the request, so the fields have their types or are absent."""
    fields = msgspec.json.decode(body, type=_ResponseFields)
    selects_best = isinstance(fields.best_of, int) and fields.best_of > (fields.n or 1)
    only_echoes = fields.echo is True and fields.max_tokens == 0
    return not (selects_best or only_echoes)
