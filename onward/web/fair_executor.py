"""Runs work that blocks in threads, fairly between callers. What is next is decided in `fair_order`.

A thread cannot be stopped: work whose client has gone while it waited is not started, and work that has started counts
until it has ended, so that coming and going does not get a caller more than its share.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from onward.clock import Clock
from onward.errors import ClientError, Overloaded, RateLimited
from onward.web.fair_scheduler import FairScheduler, FairSchedulerLimits, RefusedWorkBudget

R = TypeVar("R")
RETRY_S = 1.0


@dataclass(slots=True, eq=False)
class _Work:
    caller: str
    call: Callable[[], Any]
    num_bytes: int
    outcome: "asyncio.Future[Any]"


class FairExecutor:
    """`what`: is waited for, in the plural, for messages. `code`: of the error if there is no room."""

    def __init__(
        self, threads: Executor, bounds: FairSchedulerLimits, clock: Clock, what: str, code: str = Overloaded.code
    ) -> None:
        self._threads = threads
        self._clock = clock
        self._work_name, self._code = what, code
        self._order: FairScheduler[_Work] = FairScheduler(bounds)
        self._refused = None if bounds.refused_work_s is None else RefusedWorkBudget(bounds.refused_work_s)

    async def run(self, caller: str, call: Callable[[], R], num_bytes: int = 0) -> R:
        """The call's result. Raises `Overloaded` or `RateLimited` before anything is done. `num_bytes`: what it holds
        meanwhile."""
        self._check(caller, num_bytes)
        work = _Work(caller, call, num_bytes, asyncio.get_running_loop().create_future())
        self._order.add(caller, work, num_bytes)
        self._start()
        try:
            return await work.outcome
        except asyncio.CancelledError:
            self._order.cancel(caller, work, num_bytes)
            raise
        finally:
            # An error refers to this frame, and `work` to the error: a cycle that would keep the request's body until the
            # next garbage collection.
            del work

    def _check(self, caller: str, num_bytes: int) -> None:
        if self._order.is_full(caller, num_bytes):
            problem = f"too many {self._work_name} are waiting, of this caller or of all; try again later"
            raise Overloaded(problem, code=self._code, retry_after_s=RETRY_S)
        wait_s = 0.0 if self._refused is None else self._refused.wait_s(caller, self._clock.now_s())
        if wait_s:
            problem = f"{self._work_name} of this caller that were refused have taken too long in the last minute"
            raise RateLimited(problem, retry_after_s=max(RETRY_S, wait_s))

    def _start(self) -> None:
        while (work := self._order.start_next()) is not None:
            self._run(work)

    def _run(self, work: _Work) -> None:
        began_s = self._clock.now_s()
        running = asyncio.get_running_loop().run_in_executor(self._threads, work.call)
        running.add_done_callback(lambda ended: self._ended(work, began_s, ended))

    def _ended(self, work: _Work, began_s: float, ended: "asyncio.Future[Any]") -> None:
        now_s = self._clock.now_s()
        took_s = now_s - began_s
        fault = None if ended.cancelled() else ended.exception()
        if self._refused is not None and isinstance(fault, ClientError):
            self._refused.charge(work.caller, took_s, now_s)
        self._order.finish(work.caller, took_s, work.num_bytes)
        if not work.outcome.done():
            if ended.cancelled():
                work.outcome.cancel()
            elif fault is not None:
                work.outcome.set_exception(fault)
            else:
                work.outcome.set_result(ended.result())
        del fault  # as above
        self._start()
