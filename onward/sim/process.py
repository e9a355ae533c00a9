"""A simulated process: it owns the tasks and timers made in it, and can be stopped, resumed and killed.

A killed process sends nothing more: wires and connections check `is_dead` first. Its tasks are cancelled, and unwind
without any effect on other processes.
"""

import asyncio
import signal
import weakref
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any

from onward.sim.loop import CURRENT_PROCESS, VirtualLoop, local_time

UNWIND_S = 30.0
EPOCH_S = 1_700_000_000.0


class SimProcess:
    def __init__(self, loop: VirtualLoop, name: str, clock_rate: float = 1.0) -> None:
        self.name = name
        self.clock_rate = clock_rate
        self.wall_offset_s = 0.0
        """How far its wall clock is ahead. Only `wall_s` includes it."""
        self.is_stopped = False
        self.is_dead = False
        self.return_code = 0
        """Exit code of a dead process."""
        self.held: list[asyncio.Handle] = []
        self.on_death: list[Callable[[], None]] = []
        """Called when the process dies, for example to break its connections."""
        self.on_stop: list[Callable[[bool], None]] = []
        """Called with True when the process is stopped, and with False when it resumes."""
        self._loop = loop
        self._died_s = 0.0
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._context = copy_context()
        self._context.run(CURRENT_PROCESS.set, self)

    # The clock that its code reads.

    def now_s(self) -> float:
        return local_time(self, self._loop.now_s)

    def wall_s(self) -> float:
        return EPOCH_S + self.now_s() + self.wall_offset_s

    # Tasks, timers and states.

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls a function at once, in the context of this process. Not for use within the process itself."""
        return self._context.copy().run(call, *args)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self.run(self._loop.create_task, work)

    def call_later(self, seconds: float, call: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, self._call, call, args, context=self.context())

    def call_soon(self, call: Callable[[], Any]) -> None:
        self._loop.call_soon(self._call, call, (), context=self.context())

    def coalesced(self, call: Callable[[], Any], delay_s: Callable[[], float] | None = None) -> Callable[[], None]:
        """Returns a function that schedules `call` to run soon, or after a delay. `call` runs once, however often the
        function is called until then."""
        is_due = False

        def run() -> None:
            nonlocal is_due
            is_due = False
            call()

        def run_later() -> None:
            nonlocal is_due
            if is_due:
                return
            is_due = True
            if delay_s is None:
                self.call_soon(run)
            else:
                self.call_later(delay_s(), run)

        return run_later

    def _call(self, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if not self.is_dead:
            call(*args)

    def context(self) -> Context:
        return self._context.copy()

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)

    def stop(self) -> None:
        self.is_stopped = True
        for notice in self.on_stop:
            notice(True)

    def resume(self) -> None:
        if self.is_stopped:
            self.is_stopped = False
            self._loop.resume_process(self)
            for notice in self.on_stop:
                notice(False)

    def kill(self, return_code: int = -signal.SIGKILL) -> None:
        """Kills the process. Its supervisor sees `return_code`."""
        if self.is_dead:
            return
        self.is_dead = True
        self.return_code = return_code
        self._died_s = self._loop.now_s
        self.resume()
        for notice in self.on_death:
            notice()
        for task in sorted(self._tasks, key=lambda task: int(task.get_name().rpartition("-")[2])):
            task.cancel()
            task.add_done_callback(_forget)

    def has_unwound(self, now_s: float) -> bool:
        return self.is_dead and now_s > self._died_s + UNWIND_S

    def __repr__(self) -> str:
        return self.name


def _forget(task: asyncio.Task[Any]) -> None:
    """Retrieves the exception of a dead process's task, so that asyncio does not report it."""
    if not task.cancelled():
        task.exception()


def install_task_factory(loop: VirtualLoop) -> None:
    """Installs a task factory that assigns each task to the process that made it."""
    numbers = iter(range(1, 1 << 62))

    def make(loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, name=f"sim-{next(numbers)}", context=context)
        process = CURRENT_PROCESS.get() if context is None else context.get(CURRENT_PROCESS)
        if isinstance(process, SimProcess):
            process.adopt(task)
            if process.is_dead:
                task.cancel()
        return task

    loop.set_task_factory(make)
