"""A process of a real server is stopped by a signal: it is replaced within seconds, and the streams continue."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.server import Server
from tests.e2e.streams import Stream, chat_body, run_streams

NUM_TOKENS = 64
BODIES = [chat_body(index, NUM_TOKENS) for index in range(3)]
MAX_STEPS_IN_FLIGHT = 2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--max-num-seqs", "4", "--num-kv-blocks", "128", "--stopped-timeout-s", "2") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[tuple]:
    return [stream.result() for stream in run_streams(server.url, BODIES)]


class StopOnce:
    """Stops a process for good when each stream has had 5 tokens."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.was_sent = False

    def __call__(self, streams: list[Stream]) -> None:
        if not self.was_sent and min(len(stream.token_ids) for stream in streams) >= 5:
            os.kill(self._pid, signal.SIGSTOP)
            self.was_sent = True


@pytest.mark.parametrize("role", ["worker", "engine"])
def test_streams_continue_when_a_process_stays_stopped(server: Server, undisturbed: list[tuple], role: str) -> None:
    pid = server.pid(role)
    stop = StopOnce(pid)
    streams = run_streams(server.url, BODIES, stop)
    assert stop.was_sent
    assert [stream.result() for stream in streams] == undisturbed
    assert server.pid(role) != pid
    if role == "worker":  # a stopped worker has written nothing wrong, so its memory is kept
        recomputed = server.metrics()['onward_recomputed_tokens_total{cause="worker"}']
        assert recomputed <= MAX_STEPS_IN_FLIGHT * len(BODIES)
    assert "stopped by a signal" in server.log()
