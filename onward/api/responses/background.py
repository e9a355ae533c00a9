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
    def __init__(self, generator: GenerationRunner, streams: StreamRegistry, tasks: TaskPool) -> None:
        self._generator = generator
        self._streams = streams
        self._tasks = tasks

    async def start(self, prepared: PreparedRequest) -> None:
        """Until the engine has taken it. Raises what it is refused by."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = self._tasks.start(self._run(prepared, taken), prepared.attempt.caller)
        try:
            await asyncio.shield(taken)
        except asyncio.CancelledError:
            task.cancel()  # its client has gone before it could learn what to ask for
            raise

    async def _run(self, prepared: PreparedRequest, taken: "asyncio.Future[None]") -> None:
        def begun(stream: LiveStream) -> None:
            self._streams.store_started(stream)
            taken.set_result(None)

        try:
            await self._generator.run(prepared, _discard_messages, begun)
        except (OnwardError, RequestFailed) as refused:
            # Later ones are a part of its record.
            if not taken.done():
                taken.set_exception(refused)
        except Exception:
            _logger.exception("a background response failed by a fault of ours")
            if not taken.done():
                taken.set_exception(RequestFailed(INTERNAL_ERROR))
        finally:
            taken.cancel()


async def _discard_messages(_: Message) -> None:
    """Reads it."""
