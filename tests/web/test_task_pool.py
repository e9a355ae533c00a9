"""Work that no connection waits for: how much of it each caller may have."""

import asyncio

from onward.errors import Overloaded
from onward.web.task_pool import TaskPool


async def num_started(tasks: TaskPool, caller: str) -> int:
    """Until the next one is refused."""
    for number in range(100):
        try:
            tasks.start(asyncio.sleep(3600), caller)
        except Overloaded as refused:
            assert f"{number} background responses of this caller" in str(refused)
            return number
    raise AssertionError("there is no bound")


def counts_of(*callers: str) -> list[int]:
    async def scenario() -> list[int]:
        tasks = TaskPool(max_tasks=8)
        counts = [await num_started(tasks, caller) for caller in callers]
        await tasks.close()
        return counts

    return asyncio.run(scenario())


def test_a_caller_leaves_room_for_others() -> None:
    assert counts_of("a", "b", "c") == [4, 2, 1]


def test_without_keys_all_places_are_there_for_the_one_caller() -> None:
    assert counts_of("") == [8]
