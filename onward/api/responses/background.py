"""Responses that are made although nobody waits for them."""

import asyncio
import logging

from starlette.types import Message

from onward.api.generation import Generator
from onward.api.prepared import Prepared
from onward.api.streams import BROKEN, Stream, Streams
from onward.errors import OnwardError
from onward.web.failures import RequestFailed
from onward.web.tasks import Tasks

_logger = logging.getLogger(__name__)


class Background:
    def __init__(self, generator: Generator, streams: Streams, tasks: Tasks) -> None:
        self._generator = generator
        self._streams = streams
        self._tasks = tasks

    async def begin(self, prepared: Prepared) -> None:
        """Until the engine has taken it. Raises what it is refused by."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = self._tasks.start(self._run(prepared, taken), prepared.attempt.caller)
        try:
            await asyncio.shield(taken)
        except asyncio.CancelledError:
            task.cancel()  # its client has gone before it could learn what to ask for
            raise

    async def _run(self, prepared: Prepared, taken: "asyncio.Future[None]") -> None:
        def begun(stream: Stream) -> None:
            self._streams.keep_begun(stream)
            taken.set_result(None)

        try:
            await self._generator.run(prepared, _nobody, begun)
        except (OnwardError, RequestFailed) as refused:
            # Later ones are a part of its record.
            if not taken.done():
                taken.set_exception(refused)
        except Exception:
            _logger.exception("a background response failed by a fault of ours")
            if not taken.done():
                taken.set_exception(RequestFailed(BROKEN))
        finally:
            taken.cancel()


async def _nobody(_: Message) -> None:
    """Reads it."""
