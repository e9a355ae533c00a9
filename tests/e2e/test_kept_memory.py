"""What is computed again after a kill of the worker or the engine of a real server, by its counters."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.e2e.server import Server
from tests.e2e.streams import Stream, run_streams

NUM_STREAMS = 4
NUM_TOKENS = 64
BLOCK_SIZE = 16
MAX_STEPS_IN_FLIGHT = 2
NUM_PROMPT_WORDS = 40
"""A token each, at least: contexts are much longer than what a step in flight computes."""


def body(index: int) -> dict:
    words = " ".join(f"{index}{number}" for number in range(NUM_PROMPT_WORDS))
    sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "seed": index}
    return {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": f"Go on with this list: {words}"}],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        **sampling,
    }


BODIES = [body(index) for index in range(NUM_STREAMS)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--max-num-seqs", "8") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[tuple]:
    return [stream.result() for stream in run_streams(server.url, BODIES)]


class SignalOnce:
    """Sends a signal to a process when each stream has had 5 tokens, and none is near its end."""

    def __init__(self, pid: int, number: signal.Signals) -> None:
        self._pid, self._number = pid, number
        self.was_sent = False

    def __call__(self, streams: list[Stream]) -> None:
        if not self.was_sent and min(len(stream.token_ids) for stream in streams) >= 5:
            assert max(len(stream.token_ids) for stream in streams) <= NUM_TOKENS - 20, "too late to be a test"
            os.kill(self._pid, self._number)
            self.was_sent = True


def recomputed(server: Server, cause: str) -> float:
    return server.metrics()[f'onward_recomputed_tokens_total{{cause="{cause}"}}']


def signal_during_streams(server: Server, role: str, number: signal.Signals) -> list[Stream]:
    restarts = server.get("/info")["restarts"][role]
    sent = SignalOnce(server.pid(role), number)
    streams = run_streams(server.url, BODIES, sent)
    assert sent.was_sent
    assert server.get("/info")["restarts"][role] == restarts + 1
    return streams


def test_a_killed_worker_costs_the_steps_in_flight(server: Server, undisturbed: list[tuple]) -> None:
    before = recomputed(server, "worker")
    streams = signal_during_streams(server, "worker", signal.SIGKILL)
    assert [stream.result() for stream in streams] == undisturbed
    assert recomputed(server, "worker") - before <= MAX_STEPS_IN_FLIGHT * NUM_STREAMS


def test_a_worker_that_crashed_costs_every_context(server: Server, undisturbed: list[tuple]) -> None:
    before = recomputed(server, "worker")
    streams = signal_during_streams(server, "worker", signal.SIGSEGV)
    assert [stream.result() for stream in streams] == undisturbed
    assert recomputed(server, "worker") - before >= NUM_STREAMS * NUM_PROMPT_WORDS


def test_a_killed_engine_costs_a_block_of_each_stream_at_most(server: Server, undisturbed: list[tuple]) -> None:
    """Counters begin again with the engine."""
    streams = signal_during_streams(server, "engine", signal.SIGKILL)
    assert [stream.result() for stream in streams] == undisturbed
    assert recomputed(server, "engine") <= NUM_STREAMS * BLOCK_SIZE
    assert "cached blocks adopted" in server.log()
