"""How the answer to a request ends that the router gives up: with what was generated so far, in the client's own form.

The router has the tokens and an instance knows what they say, so one is asked. Where none answers, the client is told how
to continue the request, and nothing else: tokens are not shown without their text.
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


class _ChoiceCounts(msgspec.Struct, frozen=True):
    n: Any = None
    best_of: Any = None


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
        """As an instance writes it. None: no instance could be asked in time."""
        runner = self._runner
        if runner.is_stopping:
            return None
        message = CloseAttempt(self._stream.build_attempt(runner.clock.now_s(), []), error)
        instances = sorted(runner.core.serving_instances(runner.clock.now_s()), key=self._instance_order)[
            :MAX_INSTANCES_ASKED
        ]
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for instance in instances:
                    if (closed := await runner.upstream.render_stream_end(instance.url, message)) is not None:
                        return closed
        except TimeoutError:
            pass
        return None

    def _instance_order(self, instance: InstanceInfo) -> tuple[bool, bool]:
        """Healthy instances are asked first, and the one that the stream was lost at last."""
        return instance.state is not InstanceState.READY, instance.instance_id == self._stream.instance_id


def build_partial(stream: ClientStream) -> dict[str, Any] | None:
    """What the router itself can say: the fields that continue the request. None: it cannot be continued."""
    if not stream.has_tokens or _uses_best_of(stream.request.body):
        return None
    token_ids = [choice.token_ids for choice in stream.choices]
    reasons = [
        None if choice.finish_reason in INCOMPLETE_REASONS else choice.finish_reason for choice in stream.choices
    ]
    resume = {
        "seed": stream.request.seed,
        "generated_token_ids": token_ids[0] if len(token_ids) == 1 else token_ids,
        "generated_finish_reasons": reasons,
    }
    return {"seed": stream.request.seed, "resume": resume}


def _uses_best_of(body: bytes) -> bool:
    """An instance has accepted the request, so the fields are numbers or absent."""
    fields = msgspec.json.decode(body, type=_ChoiceCounts)
    return isinstance(fields.best_of, int) and fields.best_of > (fields.n or 1)
