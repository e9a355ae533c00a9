"""Tasks that no connection waits for: callers share a limit on their number, and `close` cancels them."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from onward.errors import RETRY_SOON_S, Overloaded
from onward.fair_share import within_fair_share

MAX_TASKS = 512


class TaskPool:
    def __init__(self, max_tasks: int = MAX_TASKS) -> None:
        self._max_tasks = max_tasks
        self._running: dict[asyncio.Task[None], str] = {}
        """Running tasks, each with its caller."""

    def start(self, coroutine: Coroutine[Any, Any, None], caller: str) -> asyncio.Task[None]:
        num_own = sum(other == caller for other in self._running.values())
        if not within_fair_share(1, num_own, len(self._running) - num_own, self._max_tasks, is_named=bool(caller)):
            coroutine.close()
            problem = f"{num_own} background responses of this caller are running, of {len(self._running)} in all"
            raise Overloaded(f"{problem}; try again later", retry_after_s=RETRY_SOON_S)
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running[task] = caller
        task.add_done_callback(self._running.pop)
        return task

    async def close(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
