"""Kill -9 the worker or the engine while streams are running: every client gets exactly the text it would have got."""

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.e2e.server import Server
from tests.e2e.streams import Stream, chat_body, run_streams

NUM_STREAMS = 16
NUM_TOKENS = 64
BODIES = [chat_body(i, NUM_TOKENS) for i in range(NUM_STREAMS)]


@pytest.fixture(scope="module", params=["shm", "zmq"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server("--max-num-seqs", "16", "--transport", request.param) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[tuple]:
    return [stream.result() for stream in run_streams(server.url, BODIES)]


class KillOnce:
    """Kills a process as soon as every stream has delivered 5 tokens; none may have come to its last 20 by then."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.killed = False
        self.pause_s = 0.0
        """The longest silence of all streams after the kill."""
        self._last_token_s = 0.0

    def __call__(self, streams: list[Stream]) -> None:
        now_s = time.monotonic()
        if self.killed:
            self.pause_s = max(self.pause_s, now_s - self._last_token_s)
        elif min(len(stream.token_ids) for stream in streams) >= 5:
            longest = max(len(stream.token_ids) for stream in streams)
            assert longest <= NUM_TOKENS - 20, f"too late to be a test: {longest} tokens"
            os.kill(self.pid, signal.SIGKILL)
            self.killed = True
        self._last_token_s = now_s


def kill_during_streams(server: Server, role: str, undisturbed: list[tuple]) -> float:
    restarts = server.get("/info")["restarts"][role]
    kill = KillOnce(server.pid(role))
    streams = run_streams(server.url, BODIES, kill)
    assert kill.killed, "the kill never came"
    assert [stream.result() for stream in streams] == undisturbed
    info = server.get("/info")
    assert info["restarts"][role] == restarts + 1
    assert info["pids"][role] != [kill.pid]
    return kill.pause_s


@pytest.mark.parametrize("role", ["worker", "engine"])
def test_streams_go_on_when_a_process_is_killed(server: Server, undisturbed: list[tuple], role: str) -> None:
    pause_s = kill_during_streams(server, role, undisturbed)
    print(f"{role}: next token {pause_s:.2f} s after the kill")


@pytest.mark.full
@pytest.mark.parametrize("role", ["worker", "engine"])
def test_streams_go_on_when_a_process_is_killed_five_times_in_a_row(
    server: Server, undisturbed: list[tuple], role: str
) -> None:
    pauses_s = [kill_during_streams(server, role, undisturbed) for _ in range(5)]
    print(f"{role}: next token after the kill, seconds: {[round(p, 2) for p in pauses_s]}")
    metrics = server.metrics()
    assert metrics['onward_kv_blocks{state="owned"}'] == metrics['onward_kv_blocks{state="fenced"}'] == 0


def test_an_api_process_that_is_killed_comes_back_and_its_requests_are_dropped(server: Server) -> None:
    old = server.pid("api")
    killed = False

    def kill(streams: list[Stream]) -> None:
        nonlocal killed
        if not killed:
            killed = True
            os.kill(old, signal.SIGKILL)

    with pytest.raises(Exception):  # noqa: B017 - the connection breaks in one of several ways
        run_streams(server.url, [chat_body(0, 2000)], kill)
    status, answer = server.post("/v1/chat/completions", chat_body(1, 5))
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 5
    assert server.pid("api") != old
    assert server.get("/info")["requests"]["running"] == 0
