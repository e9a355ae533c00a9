"""Runs work that waits for a caller's lock, one piece at a time for each caller.

Such work blocks a thread of a pool that all callers share. The other pieces of a caller wait without a thread.
"""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class CallerTurns:
    def __init__(self) -> None:
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}
        """The lock of each caller that has work, and how many pieces run or wait."""

    async def run(self, caller: str, call: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
        """Returns the result of the call, which is made in a thread."""
        lock, number = self._turns.get(caller, (asyncio.Lock(), 0))
        self._turns[caller] = (lock, number + 1)
        try:
            async with lock:
                return await complete_in_thread(call, *args, **options)
        finally:
            lock, number = self._turns[caller]
            self._turns[caller] = (lock, number - 1)
            if number == 1:
                del self._turns[caller]


async def complete_in_thread(call: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """Returns the result of a call in a thread. If this task is cancelled, it ends only after the call, because a thread
    cannot be stopped."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *args, **options))
    try:
        return await asyncio.shield(running)
    finally:
        if not running.done():
            await asyncio.wait((running,))
