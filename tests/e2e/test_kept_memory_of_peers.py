"""KV memory of real decode and prefill instances: what a kill costs, and what a peer that is late can do to it."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from tests.e2e.pd_instances import SMALL, Pair, handovers, wait_for
from tests.e2e.server import Server
from tests.e2e.streams import TOPICS, Stream, chat_body, run_streams
from tests.e2e.test_standby import wait_for_standby

NUM_STREAMS = 4
NUM_LONG = 2
MAX_STEPS_IN_FLIGHT = 2
BLOCK_SIZE = 16

fresh = count(1)
"""Salts that make a prompt new to every cache."""


def long_chat(index: int) -> dict[str, Any]:
    """A prompt of about 500 tokens: several steps, and many pages to push."""
    words = " and ".join(f"{TOPICS[(index + i) % len(TOPICS)]} {i}" for i in range(130))
    return chat_body(index, 10, messages=[{"role": "user", "content": f"{index}: {words}"}])


STREAMS = [chat_body(index, 96) for index in range(NUM_STREAMS)]
LONG = [long_chat(index) for index in range(NUM_LONG)]
BODIES = STREAMS + LONG


def salted() -> list[dict[str, Any]]:
    salt = f"salt-{next(fresh)}"
    return [body | {"cache_salt": salt} for body in BODIES]


@pytest.fixture(scope="module")
def undisturbed() -> list[tuple]:
    with Server(*SMALL) as mixed:
        return [stream.result() for stream in run_streams(mixed.url, BODIES)]


@pytest.fixture(
    scope="module", params=["shm", *(pytest.param(name, marks=pytest.mark.full) for name in ("tcp", "nixl"))]
)
def shared_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    decode = ("--local-prefill-tokens", "0", "--kv-backend", request.param)
    with Pair("--max-num-batched-tokens", "64", decode=decode) as pair:
        run_streams(pair.decode.url, salted()[:1])
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    yield shared_pair
    shared_pair.heal()


class PushBesideStreams:
    """Once all streams run, sends the long prompts, and acts while a peer pushes them."""

    def __init__(self, pair: Pair, long: list[dict[str, Any]], act: Callable[[], None]) -> None:
        self._pair, self._long, self._act = pair, long, act
        self._beside = ThreadPoolExecutor(1)
        self._sent: Future[list[Stream]] | None = None

    def __call__(self, streams: list[Stream]) -> None:
        if self._sent is not None or min(len(stream.token_ids) for stream in streams) < 3:
            return
        self._sent = self._beside.submit(run_streams, self._pair.decode.url, self._long)
        wait_for(lambda: handovers(self._pair.prefill, "prefill", "granted"), "a push")
        self._act()

    def long_streams(self) -> list[Stream]:
        with self._beside:
            assert self._sent is not None, "the long prompts were sent"
            return self._sent.result()


def run_with(pair: Pair, act: Callable[[], None]) -> list[tuple]:
    bodies = salted()
    push = PushBesideStreams(pair, bodies[NUM_STREAMS:], act)
    streams = run_streams(pair.decode.url, bodies[:NUM_STREAMS], push)
    return [stream.result() for stream in streams + push.long_streams()]


def kill(server: Server, role: str) -> None:
    os.kill(server.pid(role), signal.SIGKILL)


def recomputed(server: Server) -> float:
    return server.metrics().get('onward_recomputed_tokens_total{cause="worker"}', 0.0)


def log_since(server: Server, begin: int) -> str:
    return server.log()[begin:]


def test_a_killed_decode_worker_costs_the_steps_in_flight(pair: Pair, undisturbed: list[tuple]) -> None:
    before, begin = recomputed(pair.decode), len(pair.decode.log())
    assert run_with(pair, lambda: kill(pair.decode, "worker")) == undisturbed
    assert "keeps_memory=True" in log_since(pair.decode, begin)
    assert recomputed(pair.decode) - before <= MAX_STEPS_IN_FLIGHT * (NUM_STREAMS + NUM_LONG)
    pair.wait_until_at_rest()


def test_a_killed_decode_engine_leaves_its_blocks_to_the_next(pair: Pair, undisturbed: list[tuple]) -> None:
    begin = len(pair.decode.log())
    assert run_with(pair, lambda: kill(pair.decode, "engine")) == undisturbed
    assert "cached blocks adopted" in log_since(pair.decode, begin)
    pair.wait_until_at_rest()


def test_a_prefill_worker_killed_in_mid_push_keeps_its_cached_blocks(pair: Pair, undisturbed: list[tuple]) -> None:
    begin = len(pair.prefill.log())
    assert run_with(pair, lambda: kill(pair.prefill, "worker")) == undisturbed
    assert "keeps_memory=True" in log_since(pair.prefill, begin)
    pair.wait_until_at_rest()


def test_memory_that_a_stopped_peer_has_mapped_is_given_up_and_its_late_write_changes_nothing(
    pair: Pair, undisturbed: list[tuple]
) -> None:
    """With other backends than shm, nothing but the dead worker itself has written its memory: that is kept."""
    maps_memory = pair.decode.get("/info")["configuration"]["kv_backend"] == "shm"
    begin = len(pair.decode.log())

    def stop_the_peer_and_kill() -> None:
        pair.pause([pair.prefill.pid("worker")])
        kill(pair.decode, "worker")
        kept = f"keeps_memory={not maps_memory}"
        wait_for(lambda: kept in log_since(pair.decode, begin), f"{kept} in the log")
        pair.resume()

    assert run_with(pair, stop_the_peer_and_kill) == undisturbed
    pair.wait_until_at_rest()


def test_standby_workers_of_both_instances_take_over_with_their_handoffs(undisturbed: list[tuple]) -> None:
    with Pair("--max-num-batched-tokens", "64", "--standby-worker", "on") as pair:
        standbys = [wait_for_standby(server) for server in pair.both]

        def kill_both_workers() -> None:
            for server in pair.both:
                kill(server, "worker")

        assert run_with(pair, kill_both_workers) == undisturbed
        assert [server.pid("worker") for server in pair.both] == standbys
        pair.wait_until_at_rest()
