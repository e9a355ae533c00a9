"""Runs blocking work in threads, fairly between callers. `fair_scheduler` decides which work is next.

A thread cannot be stopped. Waiting work is dropped when its client disconnects, but started work counts until it has
ended, so that a caller cannot get more than its share by disconnecting.
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
    """`work_name` is the name of the work in error messages, in the plural. `code` is the error code if the queue is
    full."""

    def __init__(
        self, threads: Executor, limits: FairSchedulerLimits, clock: Clock, work_name: str, code: str = Overloaded.code
    ) -> None:
        self._threads = threads
        self._clock = clock
        self._work_name, self._code = work_name, code
        self._scheduler: FairScheduler[_Work] = FairScheduler(limits)
        self._refused_budget = None if limits.refused_work_s is None else RefusedWorkBudget(limits.refused_work_s)

    async def run(self, caller: str, call: Callable[[], R], num_bytes: int = 0) -> R:
        """Returns the call's result. Raises `Overloaded` or `RateLimited` before anything is done. `num_bytes` is the
        memory that the work holds meanwhile."""
        self._check(caller, num_bytes)
        work = _Work(caller, call, num_bytes, asyncio.get_running_loop().create_future())
        self._scheduler.add(caller, work, num_bytes)
        self._start_waiting()
        try:
            return await work.outcome
        except asyncio.CancelledError:
            self._scheduler.cancel(caller, work, num_bytes)
            raise
        finally:
            # An error refers to this frame, and `work` to the error: a cycle that would keep the request's body until the
            # next garbage collection.
            del work

    def _check(self, caller: str, num_bytes: int) -> None:
        if self._scheduler.is_full(caller, num_bytes):
            problem = f"too many {self._work_name} are waiting, of this caller or of all; try again later"
            raise Overloaded(problem, code=self._code, retry_after_s=RETRY_S)
        wait_s = 0.0 if self._refused_budget is None else self._refused_budget.wait_s(caller, self._clock.now_s())
        if wait_s:
            problem = f"{self._work_name} of this caller that were refused have taken too long in the last minute"
            raise RateLimited(problem, retry_after_s=max(RETRY_S, wait_s))

    def _start_waiting(self) -> None:
        while (work := self._scheduler.start_next()) is not None:
            self._run(work)

    def _run(self, work: _Work) -> None:
        started_at_s = self._clock.now_s()
        future = asyncio.get_running_loop().run_in_executor(self._threads, work.call)
        future.add_done_callback(lambda future: self._on_done(work, started_at_s, future))

    def _on_done(self, work: _Work, started_at_s: float, future: "asyncio.Future[Any]") -> None:
        now_s = self._clock.now_s()
        took_s = now_s - started_at_s
        error = None if future.cancelled() else future.exception()
        if self._refused_budget is not None and isinstance(error, ClientError):
            self._refused_budget.charge(work.caller, took_s, now_s)
        self._scheduler.finish(work.caller, took_s, work.num_bytes)
        if not work.outcome.done():
            if future.cancelled():
                work.outcome.cancel()
            elif error is not None:
                work.outcome.set_exception(error)
            else:
                work.outcome.set_result(future.result())
        del error  # as above
        self._start_waiting()
