"""A standby worker of a real server: who serves after a kill, and that streams do not notice more than a pause."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.observed_estate import wait_until
from tests.e2e.server import Server
from tests.e2e.streams import Stream, chat_body, run_streams

NUM_TOKENS = 160
BODIES = [chat_body(i, NUM_TOKENS) for i in range(8)]


@pytest.fixture(scope="module", params=["shm", "zmq"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server("--max-num-seqs", "8", "--transport", request.param, "--standby-worker", "on") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[tuple]:
    return [stream.result() for stream in run_streams(server.url, BODIES)]


def wait_for_standby(server: Server) -> int:
    """The pid of a standby that is ready, beside a worker that is."""
    pids: dict[str, int] = {}

    def is_ready() -> bool:
        processes = server.get("/info")["processes"]
        pids.update((process["role"], process["pid"]) for process in processes if process["state"] == "ready")
        return {"worker", "standby"} <= {process["role"] for process in processes if process["state"] == "ready"}

    wait_until(is_ready)
    return pids["standby"]


def after_tokens(counts: list[int], act: Callable[[], None]) -> Callable[[list[Stream]], None]:
    """Acts when every stream has so many tokens, and again for each further count."""
    remaining = list(counts)

    def look(streams: list[Stream]) -> None:
        if remaining and min(len(stream.token_ids) for stream in streams) >= remaining[0]:
            remaining.pop(0)
            act()

    return look


def test_the_standby_serves_after_the_worker_was_killed(server: Server, undisturbed: list[tuple]) -> None:
    standby, worker = wait_for_standby(server), server.pid("worker")
    streams = run_streams(server.url, BODIES, after_tokens([5], lambda: os.kill(worker, signal.SIGKILL)))
    assert [stream.result() for stream in streams] == undisturbed
    assert server.pid("worker") == standby


def test_two_kills_in_a_row_are_exact(server: Server, undisturbed: list[tuple]) -> None:
    """The second one comes before there is another standby."""
    wait_for_standby(server)
    kill = after_tokens([5, 8], lambda: os.kill(server.pid("worker"), signal.SIGKILL))
    streams = run_streams(server.url, BODIES, kill)
    assert [stream.result() for stream in streams] == undisturbed


def test_the_standby_serves_the_next_engine(server: Server, undisturbed: list[tuple]) -> None:
    standby, engine = wait_for_standby(server), server.pid("engine")
    streams = run_streams(server.url, BODIES, after_tokens([5], lambda: os.kill(engine, signal.SIGKILL)))
    assert [stream.result() for stream in streams] == undisturbed
    assert server.pid("worker") == standby


def test_a_crashed_standby_costs_the_memory_and_no_token(server: Server, undisturbed: list[tuple]) -> None:
    standby, worker = wait_for_standby(server), server.pid("worker")
    streams = run_streams(server.url, BODIES, after_tokens([5], lambda: os.kill(standby, signal.SIGSEGV)))
    assert [stream.result() for stream in streams] == undisturbed
    assert server.pid("worker") not in (standby, worker)
    assert "keeps_memory=False" in server.log()
