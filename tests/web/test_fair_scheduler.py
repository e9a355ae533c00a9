"""Callers share threads fairly: no caller waits for another caller's queue, however long or slow that is."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import InvalidRequest, Overloaded, RateLimited
from onward.web.fair_executor import FairExecutor
from onward.web.fair_scheduler import FairScheduler, FairSchedulerLimits, RefusedWorkBudget

BOUNDS = FairSchedulerLimits(
    running=2, running_per_caller=1, waiting=8, waiting_per_caller=4, bytes_per_caller=100, refused_work_s=3
)


class ByHand(Executor):
    """Work ends when the test says so."""

    def __init__(self) -> None:
        self.running: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self.running.append((lambda: fn(*args, **kwargs), future))
        return future

    async def end(self, index: int = 0) -> None:
        call, future = self.running.pop(index)
        try:
            future.set_result(call())
        except Exception as fault:
            future.set_exception(fault)
        del call, future  # as executors do
        await settled()


class SetClock:
    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return self.at_s


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def refusal(task: "asyncio.Task[Any]") -> BaseException | None:
    await settled()
    assert task.done(), "it was let in"
    return task.exception()


class Table:
    """A queue, and what has begun in it."""

    def __init__(self, bounds: FairSchedulerLimits = BOUNDS) -> None:
        self.threads, self.clock = ByHand(), SetClock()
        self.queue = FairExecutor(self.threads, bounds, self.clock, "texts")
        self.ended: list[str] = []
        self.tasks: list[asyncio.Task[Any]] = []

    def ask(self, caller: str, name: str, fault: Exception | None = None, num_bytes: int = 0) -> "asyncio.Task[Any]":
        def call() -> str:
            self.ended.append(name)
            if fault is not None:
                raise fault
            return name

        task = asyncio.ensure_future(self.queue.run(caller, call, num_bytes))
        self.tasks.append(task)
        return task

    async def end(self, took_s: float = 0.0) -> None:
        self.clock.at_s += took_s
        await self.threads.end()


def run(scenario: Callable[[Table], Any], bounds: FairSchedulerLimits = BOUNDS) -> None:
    async def whole() -> None:
        table = Table(bounds)
        await scenario(table)
        while table.threads.running:
            await table.end()
        for task in table.tasks:
            task.cancel()
        await asyncio.gather(*table.tasks, return_exceptions=True)

    asyncio.run(whole())


def test_one_caller_cannot_occupy_all_threads() -> None:
    async def scenario(table: Table) -> None:
        for name in "abc":
            table.ask("hostile", name)
        await settled()
        assert len(table.threads.running) == 1
        other = table.ask("other", "x")
        await settled()
        await table.threads.end(1)
        assert await other == "x"
        assert table.ended == ["x"]

    run(scenario)


def test_a_caller_with_one_request_waits_for_no_queue_of_another() -> None:
    async def scenario(table: Table) -> None:
        for name in ("a1", "a2", "a3", "a4"):
            table.ask("a", name)
        await settled()
        for name in ("b1", "b2"):
            table.ask("b", name)
        await settled()
        table.ask("c", "c1")
        await settled()
        await table.end(5.0)  # a1
        assert [call for call, _ in table.threads.running]
        await table.end()
        await table.end()
        assert "c1" in table.ended[:3]

    run(scenario)


def test_the_caller_that_was_charged_least_is_next_whether_its_work_was_refused_or_not() -> None:
    order: FairScheduler[str] = FairScheduler(
        FairSchedulerLimits(running=1, running_per_caller=1, waiting=9, waiting_per_caller=9)
    )
    for work in ("slow1", "slow2", "slow3"):
        order.add("slow", work)
    assert order.start_next() == "slow1"
    for work in ("quick1", "quick2", "quick3"):
        order.add("quick", work)
    order.finish("slow", 10.0)
    for work in ("quick1", "quick2", "quick3"):
        assert order.start_next() == work
        order.finish("quick", 1.0)
    assert order.start_next() == "slow2"


def test_a_caller_that_comes_back_starts_level_with_the_others() -> None:
    order: FairScheduler[str] = FairScheduler(
        FairSchedulerLimits(running=1, running_per_caller=1, waiting=9, waiting_per_caller=9)
    )
    order.add("a", "a0")
    for number in range(1, 4):
        order.start_next()
        order.add("a", f"a{number}")
        order.finish("a", 10.0)
    order.add("b", "b0")
    order.add("b", "b1")
    assert order.start_next() == "b0"
    order.finish("b", 10.0)
    assert order.start_next() == "a3", "idle time is not saved up"


def test_queues_have_bounds_and_each_caller_its_own() -> None:
    async def scenario(table: Table) -> None:
        for number in range(5):
            table.ask("a", f"a{number}")
        await settled()
        error = await refusal(table.ask("a", "one more"))
        assert isinstance(error, Overloaded) and "too many texts" in error.message
        assert error.retry_after_s == 1.0
        table.ask("b", "b0")
        for caller in "cdef":
            table.ask(caller, caller)
        await settled()
        assert isinstance(await refusal(table.ask("g", "more than may wait in all")), Overloaded)
        await table.end()
        assert not table.ask("g", "g").done()
        await settled()

    run(scenario)


def test_bodies_that_wait_have_a_bound_and_one_is_always_taken() -> None:
    async def scenario(table: Table) -> None:
        table.ask("a", "large", num_bytes=1000)
        await settled()
        assert isinstance(await refusal(table.ask("a", "small", num_bytes=1)), Overloaded)
        await table.end()
        for number in range(2):
            table.ask("a", f"half{number}", num_bytes=50)
        await settled()
        assert isinstance(await refusal(table.ask("a", "small", num_bytes=1)), Overloaded)
        table.tasks[-2].cancel()
        await settled()
        assert not table.ask("a", "small", num_bytes=1).done()
        await settled()

    run(scenario)


def test_work_whose_client_has_gone_is_not_started_and_what_runs_counts_until_it_ends() -> None:
    async def scenario(table: Table) -> None:
        first, second = table.ask("a", "first"), table.ask("a", "second")
        await settled()
        first.cancel()
        second.cancel()
        await settled()
        third = table.ask("a", "third")
        await settled()
        assert len(table.threads.running) == 1, "its first one runs on, though nobody waits for it"
        await table.end()
        await table.end()
        assert table.ended == ["first", "third"]
        assert third.done()

    run(scenario)


def test_refused_work_is_paid_for_and_other_work_is_not() -> None:
    async def scenario(table: Table) -> None:
        for took_s in (2.0, 2.0):
            task = table.ask("a", "wrong", InvalidRequest("no"))
            await settled()
            await table.end(took_s)
            with pytest.raises(InvalidRequest):
                await task
        error = await refusal(table.ask("a", "another"))
        assert isinstance(error, RateLimited) and "refused" in error.message
        assert error.retry_after_s == pytest.approx(18.0)
        for fault in (None, Overloaded("ours")):
            other = table.ask("b", "right", fault)
            await settled()
            await table.end(50.0)
            assert (await asyncio.gather(other, return_exceptions=True)) == ["right" if fault is None else fault]
        again = table.ask("a", "later")
        await settled()
        await table.end()
        assert await again == "later"

    run(scenario)


def test_refused_work_is_forgotten_in_time() -> None:
    refused = RefusedWorkBudget(10.0)
    refused.charge("a", 30.0, 0.0)
    assert refused.wait_s("a", 0.0) == pytest.approx(120.0)
    assert refused.wait_s("a", 119.0) == pytest.approx(1.0)
    assert refused.wait_s("b", 0.0) == 0.0
    refused.charge("b", 0.001, 1000.0)
    assert refused.wait_s("a", 1000.0) == 0.0
    assert len(refused._used) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=60))
def test_callers_that_always_have_work_get_equal_shares(works: list[tuple[str, int]]) -> None:
    """Whatever their work costs, their charges differ by no more than one piece of work."""
    order: FairScheduler[tuple[str, int]] = FairScheduler(
        FairSchedulerLimits(running=1, running_per_caller=1, waiting=100, waiting_per_caller=100)
    )
    for caller, cost in works:
        order.add(caller, (caller, cost))
    left = {caller: sum(one == caller for one, _ in works) for caller, _ in works}
    used = dict.fromkeys(left, 0.0)
    while (started := order.start_next()) is not None:
        caller, cost = started
        order.finish(caller, cost)
        used[caller] += cost
        left[caller] -= 1
        busy = [used[one] for one, number in left.items() if number]
        assert not busy or max(busy) - min(busy) <= 5.01
    assert not any(left.values())
    assert len(order) == 0


def test_refused_work_leaves_nothing_for_the_garbage_collector() -> None:
    class Body:
        """As large as a client likes."""

    async def scenario(table: Table) -> None:
        body = Body()
        left = weakref.ref(body)

        async def ask(body: Body) -> None:
            def call() -> None:
                raise InvalidRequest(f"not with {body}")

            with contextlib.suppress(InvalidRequest):
                await table.queue.run("a", call)

        asking = asyncio.ensure_future(ask(body))
        del body
        await settled()
        await table.end()
        await asking
        del asking
        await settled()
        assert left() is None

    gc.disable()
    try:
        run(scenario)
    finally:
        gc.enable()
