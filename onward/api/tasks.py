"""Work that no connection waits for: so many at once, and none is left behind when the process ends."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from onward.errors import Overloaded

MAX_TASKS = 512


class Tasks:
    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        if len(self._running) >= MAX_TASKS:
            work.close()
            raise Overloaded(f"{MAX_TASKS} background responses are under way here already", retry_after_s=1.0)
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def close(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
