"""A server at its limits: stuck workers, full queues, deadlines, poison, and a stop in the middle of streams."""

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.server import Server
from tests.e2e.streams import Stream, chat_body, run_streams

MAX_LOOKS = 2000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--max-num-seqs", "2", "--max-queue", "2", "--stall-timeout-s", "1.5") as server:
        yield server


def test_a_worker_that_is_stuck_is_killed_and_its_streams_go_on(server: Server) -> None:
    bodies = [chat_body(i, 40) for i in range(2)]
    expected = [stream.result() for stream in run_streams(server.url, bodies)]
    worker = server.pid("worker")
    stopped = False

    def stop_once(streams: list[Stream]) -> None:
        nonlocal stopped
        if not stopped and min(len(stream.token_ids) for stream in streams) >= 5:
            os.kill(worker, signal.SIGSTOP)
            stopped = True

    streams = run_streams(server.url, bodies, stop_once)
    assert stopped
    assert [stream.result() for stream in streams] == expected
    assert server.pid("worker") != worker


def test_a_full_queue_answers_429_at_once_and_serves_the_others(server: Server) -> None:
    async def ask(client: httpx.AsyncClient, index: int) -> httpx.Response:
        return await client.post("/v1/chat/completions", json=chat_body(index, 60))

    async def ask_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(12)))

    answers = asyncio.run(ask_all())
    refused = [answer for answer in answers if answer.status_code == 429]
    served = [answer for answer in answers if answer.status_code == 200]
    assert len(refused) + len(served) == 12
    assert len(served) >= 4
    assert refused
    assert all(float(answer.headers["retry-after"]) > 0 for answer in refused)
    assert all(answer.json()["error"]["code"] == "overloaded" for answer in refused)
    assert all(answer.json()["usage"]["completion_tokens"] == 60 for answer in served)


def test_a_deadline_ends_the_request_and_says_so(server: Server) -> None:
    status, answer = server.post("/v1/chat/completions", chat_body(1, 4000, deadline_ms=300))
    assert status == 504
    assert answer["error"]["code"] == "deadline_exceeded"
    [stream] = run_streams(server.url, [chat_body(1, 4000, deadline_ms=1000)])
    assert stream.error is not None
    assert stream.error["code"] == "deadline_exceeded"
    assert 0 < len(stream.token_ids) < 4000
    assert stream.finish_reasons == []


@pytest.mark.full
def test_a_request_that_takes_its_worker_down_three_times_fails_alone(server: Server) -> None:
    """Killed while it computes its prompt, so there is no progress to clear the charge."""
    poison = chat_body(0, 10, messages=[{"role": "user", "content": "count the waves " * 1900}])

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            asked = asyncio.ensure_future(client.post("/v1/chat/completions", json=poison))
            for _ in range(3):
                os.kill(await asyncio.to_thread(worker_at_work), signal.SIGKILL)
            return await asked

    killed: set[int] = set()

    def worker_at_work() -> int:
        """A worker that we have not killed yet, with the request running on it."""
        for _ in range(MAX_LOOKS):
            info = server.get("/info")
            # Ready means that this very worker has said hello; the engine's own view may be a moment old.
            ready = [p["pid"] for p in info["processes"] if p["role"] == "worker" and p["state"] == "ready"]
            if ready and ready[0] not in killed and info["requests"]["running"]:
                killed.add(ready[0])
                return ready[0]
        raise AssertionError("the request never ran")

    answer = asyncio.run(ask())
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "crashed_worker"
    status, _ = server.post("/v1/chat/completions", chat_body(1, 5))
    assert status == 200


@pytest.mark.parametrize("everybody", [False, True])
def test_streams_may_finish_after_a_stop_was_asked_for(everybody: bool) -> None:
    """systemd, as it is set up by default, sends its signal to every process of a service."""
    with Server() as server:
        told = False

        def stop_once(_: list[Stream]) -> None:
            nonlocal told
            if not told:
                told = True
                for pid in told_pids:
                    os.kill(pid, signal.SIGTERM)

        told_pids = server.pids() if everybody else [server.pid("supervisor")]
        streams = run_streams(server.url, [chat_body(i, 30) for i in range(4)], stop_once)
        assert all(len(stream.token_ids) == 30 for stream in streams)
        assert server.stop() == 0
        assert server.leftovers() == []
