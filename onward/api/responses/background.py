"""Responses that are made although nobody waits for them."""

import asyncio
import logging

from starlette.types import Message

from onward.api.lifecycle.generation_runner import GenerationRunner
from onward.api.lifecycle.stream_registry import INTERNAL_ERROR, LiveStream, StreamRegistry
from onward.api.requests.prepared_request import PreparedRequest
from onward.errors import OnwardError
from onward.web.error_format import RequestFailed
from onward.web.task_pool import TaskPool

_logger = logging.getLogger(__name__)


class BackgroundResponses:
    def __init__(self, runner: GenerationRunner, streams: StreamRegistry, tasks: TaskPool) -> None:
        self._runner = runner
        self._streams = streams
        self._tasks = tasks

    async def start(self, prepared: PreparedRequest) -> None:
        """Until the engine has taken it. Raises what it is refused by."""
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = self._tasks.start(self._run(prepared, accepted), prepared.attempt.caller)
        try:
            await asyncio.shield(accepted)
        except asyncio.CancelledError:
            task.cancel()  # its client has gone before it could learn what to ask for
            raise

    async def _run(self, prepared: PreparedRequest, accepted: "asyncio.Future[None]") -> None:
        def on_accepted(stream: LiveStream) -> None:
            self._streams.store_started(stream)
            accepted.set_result(None)

        try:
            await self._runner.run(prepared, _discard_messages, on_accepted)
        except (OnwardError, RequestFailed) as refused:
            # Later ones are a part of its record.
            if not accepted.done():
                accepted.set_exception(refused)
        except Exception:
            _logger.exception("a background response failed by a fault of ours")
            if not accepted.done():
                accepted.set_exception(RequestFailed(INTERNAL_ERROR))
        finally:
            accepted.cancel()


async def _discard_messages(_: Message) -> None:
    """Reads it."""
