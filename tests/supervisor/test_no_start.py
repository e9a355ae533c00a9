"""A system that allows no further process, file or memory for a while does not end the supervisor."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onward.config import ServeConfig
from onward.supervisor.child_process import ProcessRole
from onward.supervisor.supervisor import START_RETRY_S, Supervisor
from tests.supervisor.stand_ins import supervisor_of


def open_files() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()}


@contextmanager
def files_left(count: int) -> Iterator[None]:
    """Only so many may be opened meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_files()) + 1 + count, limits[1]))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)


def roles(supervisor: Supervisor) -> list[ProcessRole]:
    return [child.role for child in supervisor._children]


def test_a_start_that_the_system_does_not_allow_is_tried_again_and_leaves_nothing() -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        supervisor._restart_at_s[ProcessRole.STREAM_STORE, 0] = 5.0
        before = open_files()
        for count in (0, 1, 2):  # not even a socket pair, and one without a process
            with files_left(count):
                supervisor._restart_due(5.0 + count * START_RETRY_S)
            assert (roles(supervisor), open_files()) == ([], before)
        supervisor._restart_due(5.0 + 2.5 * START_RETRY_S)
        assert roles(supervisor) == []
        supervisor._restart_due(5.0 + 3 * START_RETRY_S)
        assert roles(supervisor) == [ProcessRole.STREAM_STORE]


def test_an_engine_that_could_be_started_without_its_worker_gets_one_later_and_stays_the_only_one() -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        now_s, room = 0.0, 1
        supervisor._restart_at_s[ProcessRole.ENGINE, 0] = now_s
        while not roles(supervisor):  # with a little more room each time there is enough for the first of the two
            with files_left(room):
                supervisor._restart_due(now_s)
            now_s, room = now_s + START_RETRY_S, room + 1
        assert roles(supervisor) == [ProcessRole.ENGINE]
        supervisor._restart_due(now_s)
        assert sorted(role.value for role in roles(supervisor)) == ["engine", "worker"]
        assert not supervisor._restart_at_s
