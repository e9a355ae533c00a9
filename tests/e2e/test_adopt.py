"""`onward serve --adopt` with real processes: a new server takes over the port and the KV memory of an old one.

Whichever of the two dies, and when: one server works afterwards.
"""

import os
import signal
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.e2e.adoption import NewServer
from tests.e2e.cluster import Port
from tests.e2e.pd_instances import wait_for
from tests.e2e.server import STOP_TIMEOUT_S, Server
from tests.e2e.streams import Stream, run_streams

FLAGS = ("--max-num-seqs", "4", "--num-kv-blocks", "128", "--standby-worker", "off", "--log-level", "info")
BLOCK_SIZE = 16
NUM_TOKENS = 300
NUM_PROMPT_WORDS = 40


def body(index: int, max_tokens: int = NUM_TOKENS) -> dict:
    words = " ".join(f"{index}{number}" for number in range(NUM_PROMPT_WORDS))
    sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "seed": index}
    return {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": f"Go on with this list: {words}"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **sampling,
    }


BODIES = [body(0), body(1)]
SHORT = [body(0, 4)]


@pytest.fixture
def port() -> Iterator[Port]:
    port = Port()
    yield port
    port.close()


@pytest.fixture
def old(port: Port) -> Iterator[Server]:
    with Server(*port.flags, *FLAGS) as server:
        yield server


def tokens_of(url: str) -> list[list[int]]:
    return [stream.token_ids for stream in run_streams(url, SHORT)]


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False  # or it has, and the init process has not reaped it yet


def num_computed(stream: Stream) -> int:
    """Tokens of the prompt that were not cached."""
    assert stream.usage is not None
    return stream.usage["prompt_tokens"] - stream.usage["prompt_tokens_details"]["cached_tokens"]


class Connections:
    """Connects again and again, and keeps what went wrong."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._address = parts.hostname or "", parts.port or 0
        self._has_ended = threading.Event()
        self._connecting = threading.Thread(target=self._connect)
        self.faults: list[OSError] = []
        self._connecting.start()

    def _connect(self) -> None:
        while not self._has_ended.wait(0.005):
            try:
                socket.create_connection(self._address, timeout=30).close()
            except OSError as fault:
                self.faults.append(fault)

    def end(self) -> None:
        self._has_ended.set()
        self._connecting.join()


def continued(stream: Stream) -> dict:
    """The request that continues a stream which was cut."""
    assert stream.error is not None, "it ended before the old server was replaced: too early to be a test"
    assert stream.error["code"] == "unavailable"
    assert stream.resume is not None
    return stream.body | stream.resume


@pytest.mark.parametrize("drains", [False, True], ids=["serving", "draining"])
def test_streams_continue_at_the_new_server_and_only_unfinished_blocks_are_computed_again(
    port: Port, old: Server, drains: bool
) -> None:
    undisturbed = [stream.token_ids for stream in run_streams(old.url, BODIES)]
    connections = Connections(old.url)
    with NewServer(port, *FLAGS, is_held=True) as new:
        new.wait_for_line("standby ready")
        has_gone_on = threading.Event()

        def go_on(streams: list[Stream]) -> None:
            if not has_gone_on.is_set() and min(len(stream.token_ids) for stream in streams) >= 5:
                has_gone_on.set()
                if drains:
                    old._process.terminate()
                new.go_on()

        try:
            cut = run_streams(old.url, BODIES, go_on)
            new.wait_until_ready()
        finally:
            connections.end()
        assert connections.faults == []
        assert old._process.wait(STOP_TIMEOUT_S) == 0
        assert "keeps_memory=True" in old.log()
        new.wait_for_line("cached blocks adopted")
        resumed = run_streams(new.url, [continued(stream) for stream in cut])
        assert [stream.token_ids for stream in resumed] == undisturbed
        for stream in run_streams(new.url, [body(0, 1), body(1, 1)]):
            assert num_computed(stream) <= BLOCK_SIZE


def test_a_server_of_another_format_begins_with_empty_memory_and_says_why(port: Port, old: Server) -> None:
    expected = tokens_of(old.url)
    with NewServer(port, *FLAGS, "--block-size", "32") as new:
        new.wait_until_ready()
        assert old._process.wait(STOP_TIMEOUT_S) == 0
        assert "block_size is 16 there and 32 here" in new.log()
        assert "cached blocks adopted" not in new.log()
        assert tokens_of(new.url) == expected


def test_a_new_server_that_dies_before_it_takes_over_leaves_the_old_one_as_it_was(port: Port, old: Server) -> None:
    expected, pids = tokens_of(old.url), old.pids()
    with NewServer(port, *FLAGS, is_held=True) as new:
        new.wait_for_line("standby ready")
        new.kill()
    assert tokens_of(old.url) == expected
    assert old.pids() == pids
    with NewServer(port, *FLAGS) as second:
        second.wait_until_ready()
        assert tokens_of(second.url) == expected
        assert old._process.wait(STOP_TIMEOUT_S) == 0


def test_a_new_server_whose_worker_crashes_costs_the_old_one_its_memory_and_nothing_else(
    port: Port, old: Server
) -> None:
    """The worker had mapped the memory."""
    expected, worker = tokens_of(old.url), old.pid("worker")
    with NewServer(port, *FLAGS, is_held=True) as new:
        new.wait_for_line("standby ready")
        os.kill(new.pid_of("standby"), signal.SIGSEGV)
        assert new.process.wait(STOP_TIMEOUT_S) == 1
    wait_for(lambda: "the standby worker of a new server died" in old.log(), "the old server's memory given up")
    wait_for(lambda: old.get("/info")["pids"]["worker"] not in ([], [worker]), "another worker")
    assert tokens_of(old.url) == expected


@pytest.mark.parametrize("victim", ["old", "new", "new, told to stop"])
def test_one_server_works_when_the_other_dies_during_the_takeover(port: Port, old: Server, victim: str) -> None:
    """The old server cannot end its worker, which is stopped, so it has not released its memory yet."""
    expected, worker = tokens_of(old.url), old.pid("worker")
    with NewServer(port, *FLAGS, is_held=True) as new:
        new.wait_for_line("standby ready")
        os.kill(worker, signal.SIGSTOP)
        new.go_on()
        wait_for(lambda: "handing over to a new server" in old.log(), "the takeover")
        if victim == "old":
            old.stop(signal.SIGKILL)
            new.wait_until_ready()
            assert 'release="without memory"' in new.log()
        else:
            if victim == "new":
                new.kill()
            else:
                new.process.terminate()
                assert new.process.wait(STOP_TIMEOUT_S) == 0
            wait_for(lambda: "starting again" in old.log(), "the old server starting again")
        assert tokens_of(port.url) == expected
        wait_for(lambda: has_ended(worker), "the end of the old worker")


def test_the_old_server_starts_again_with_empty_memory_when_the_new_one_dies_with_it(port: Port, old: Server) -> None:
    expected = tokens_of(old.url)
    with NewServer(port, *FLAGS, is_held=True) as new:
        new.wait_for_line("standby ready")
        os.kill(new.pid_of("standby"), signal.SIGSTOP)
        new.go_on()
        new.wait_for_line('old server has ended release="with memory"')
        new.kill()
        wait_for(lambda: "starting again" in old.log(), "the old server starting again")
        assert "keeps_memory=False" in old.log()
        assert tokens_of(old.url) == expected


def test_a_decode_instance_is_replaced_at_its_kv_port_also_without_its_memory(port: Port) -> None:
    """Two workers cannot open one port, so the new one opens it when the old server has ended."""
    with closing(Port()) as kv_port:
        pd = ("--role", "decode", "--prefill-peers", "tcp://127.0.0.1:9", "--kv-backend", "tcp")
        flags = (*FLAGS, *pd, "--kv-port", kv_port.flags[1])
        with Server(*port.flags, *flags) as old:
            expected = tokens_of(old.url)
            with NewServer(port, *flags, "--num-kv-blocks", "144") as new:
                new.wait_until_ready()
                assert old._process.wait(STOP_TIMEOUT_S) == 0
                assert "num_kv_blocks is 128 there and 144 here" in new.log()
                assert tokens_of(new.url) == expected


def test_without_a_server_to_replace_it_starts_as_usual(port: Port) -> None:
    with NewServer(port, *FLAGS) as new:
        new.wait_until_ready()
        assert "no old server to adopt" in new.log()
