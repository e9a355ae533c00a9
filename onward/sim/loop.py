"""An event loop with virtual time: it never waits, and the same calls always run in the same order.

Several simulated processes share it. Each handle belongs to the process in whose context it was made. The handles of a
stopped process are kept until it resumes. Each process reads the time from its own clock, which may run fast or slow.
"""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onward.sim.process import SimProcess

START_S = 1000.0
"""Virtual time at the start. It is not zero, so that no clock shows a time that could be mistaken for a duration."""


MAX_EVENTS = 1_000_000
"""Limit on the events of one run. Long runs have 50,000."""


class Livelock(Exception):
    """The run has too many events, so it makes no progress."""


CURRENT_PROCESS: "ContextVar[SimProcess | None]" = ContextVar("OWNER", default=None)


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = START_S
        self.num_events = 0
        self._due: deque[tuple[SimProcess | None, asyncio.Handle]] = deque()
        self._later: list[tuple[float, int, SimProcess | None, asyncio.Handle]] = []
        self._order = itertools.count()

    def time(self) -> float:
        """Returns the time by the clock of the current process."""
        return local_time(CURRENT_PROCESS.get(), self.now_s)

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._due.append((_current_process(context), handle))
        return handle

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        process = _current_process(context)
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        at_s = when if process is None else START_S + (when - START_S) / process.clock_rate
        heapq.heappush(self._later, (max(at_s, self.now_s), next(self._order), process, handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(local_time(_current_process(context), self.now_s) + delay, callback, *args, context=context)

    def call_at_global(self, at_s: float, context: Context, callback: Callable[..., Any], *args: Any) -> None:
        """Schedules a call at a global virtual time, whatever the clock of the process shows."""
        handle = asyncio.Handle(callback, args, self, context)
        heapq.heappush(self._later, (max(at_s, self.now_s), next(self._order), context.get(CURRENT_PROCESS), handle))

    def resume_process(self, process: "SimProcess") -> None:
        """Schedules the handles that were kept while the process was stopped."""
        self._due.extend((process, handle) for handle in process.held)
        process.held.clear()

    def run_until(self, end_s: float, is_over: Callable[[], bool]) -> None:
        """Runs events in order until `is_over` returns True or no event is left before `end_s`."""
        due, later = self._due, self._later
        asyncio._set_running_loop(self)
        try:
            while not is_over():
                if due:
                    process, handle = due.popleft()
                elif later and later[0][0] <= end_s:
                    at_s, _, process, handle = heapq.heappop(later)
                    if process is not None and process.has_unwound(at_s):
                        continue
                    self.now_s = at_s
                else:
                    return
                self._run_one(process, handle)
        finally:
            asyncio._set_running_loop(None)

    def _run_one(self, process: "SimProcess | None", handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        if process is not None and process.is_stopped:
            process.held.append(handle)
            return
        self.num_events += 1
        if self.num_events > MAX_EVENTS:
            raise Livelock(f"{MAX_EVENTS} events, and no end")
        handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: a cancelled handle is dropped when its time comes."""


def local_time(process: "SimProcess | None", now_s: float) -> float:
    return now_s if process is None else START_S + (now_s - START_S) * process.clock_rate


def _current_process(context: Context | None) -> "SimProcess | None":
    return CURRENT_PROCESS.get() if context is None else context.get(CURRENT_PROCESS)
