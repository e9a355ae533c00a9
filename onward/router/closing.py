"""How the answer to a request ends that the router gives up: with what was generated so far, in the client's own form.

The router has the tokens and an instance knows what they say, so one is asked. Where none answers, the client is told how
to continue the request, and nothing else: tokens are not shown without their text.
"""

import asyncio
from typing import Any

import msgspec
from starlette.types import Send

from onward.proto.request import ErrorInfo
from onward.proto.router import Close, Closed
from onward.router.client_side import ClientSide
from onward.router.core import ABORTED
from onward.router.replicas import Replica, State
from onward.router.serving import Serving
from onward.router.stream import CUT, Stream
from onward.web import http
from onward.web.failures import error_body

MAX_ASKED = 2
CLOSE_S = 3.0
"""For all of them together: the client waits for its end."""


class _Sketch(msgspec.Struct, frozen=True):
    n: Any = None
    best_of: Any = None


class ClosingClientSide(ClientSide):
    """Ends a stream that was given up with what there is of it."""

    def __init__(self, send: Send, stream: Stream, serving: Serving, *, tells_resumes: bool) -> None:
        super().__init__(send, stream, tells_resumes=tells_resumes)
        self._serving = serving

    async def fail(self, info: ErrorInfo, body: bytes | None) -> None:
        stream = self._stream
        is_aborted = info.code == ABORTED.code
        if body is not None or not stream.is_at_place or not (stream.has_tokens or is_aborted):
            await super().fail(info, body)
            return
        # A stream that has not begun fails by its status. One that was aborted has not failed.
        is_written_by_instance = is_aborted or self._has_started or not stream.origin.streams
        closed = await self._closed(info) if is_written_by_instance else None
        if closed is None:
            partial = partial_of(stream)
            await super().fail(info, None if partial is None else error_body(info, msgspec.json.encode(partial)))
        elif stream.origin.streams:
            await self.write(closed.body + self.done)
            await self._send(http.part(b"", more=False))
        elif closed.status == 200:
            headers = {**http.JSON_HEADERS, **self._resume_header(), **self._ignored_header()}
            await http.respond(self._send, 200, closed.body, headers)
        else:
            await http.respond_error(self._send, info, closed.body)

    async def _closed(self, info: ErrorInfo) -> Closed | None:
        """As an instance writes it. None: no instance could be asked in time."""
        serving = self._serving
        if serving.is_stopping:
            return None
        question = Close(self._stream.attempt(serving.clock.now_s(), []), info)
        asked = sorted(serving.core.takers(serving.clock.now_s()), key=self._is_troubled)[:MAX_ASKED]
        try:
            async with asyncio.timeout(CLOSE_S):
                for replica in asked:
                    if (closed := await serving.upstream.close_stream(replica.url, question)) is not None:
                        return closed
        except TimeoutError:
            pass
        return None

    def _is_troubled(self, replica: Replica) -> tuple[bool, bool]:
        """Healthy instances are asked first, and the one that the stream was lost at last."""
        return replica.state is not State.READY, replica.instance == self._stream.instance


def partial_of(stream: Stream) -> dict[str, Any] | None:
    """What the router itself can say: the fields that continue the request. None: it cannot be continued."""
    if not stream.has_tokens or _picks_best(stream.origin.body):
        return None
    token_ids = [choice.token_ids for choice in stream.choices]
    reasons = [None if choice.finish_reason in CUT else choice.finish_reason for choice in stream.choices]
    resume = {
        "seed": stream.origin.seed,
        "generated_token_ids": token_ids[0] if len(token_ids) == 1 else token_ids,
        "generated_finish_reasons": reasons,
    }
    return {"seed": stream.origin.seed, "resume": resume}


def _picks_best(body: bytes) -> bool:
    """An instance has accepted the request, so the fields are numbers or absent."""
    sketch = msgspec.json.decode(body, type=_Sketch)
    return isinstance(sketch.best_of, int) and sketch.best_of > (sketch.n or 1)
