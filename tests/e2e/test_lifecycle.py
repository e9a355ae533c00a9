"""Starting and stopping: what is there when it is ready, what is left when it is gone, what it says when it cannot."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.e2e.streams import chat_body, run_streams


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_server_leaves_nothing_behind(number: signal.Signals) -> None:
    shared_memory_before = shared_memory()
    with Server("--api-processes", "2") as server:
        pids = server.pids()
        assert len(pids) == 6
        streams = run_streams(server.url, [chat_body(i, 8) for i in range(6)])
        assert all(len(stream.token_ids) == 8 for stream in streams)
        assert server.stop(number) == 0
        assert not [pid for pid in pids if alive(pid)]
        assert server.leftovers() == []
        _, *stopping = server.log().partition(" stopping ")[2].splitlines()
        assert stopping and not [line for line in stopping if " INFO " not in line], "a stop is nothing to worry about"
    assert shared_memory() <= shared_memory_before


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_nothing_is_left_when_every_process_is_killed_at_once(transport: str) -> None:
    shared_memory_before = shared_memory()
    with Server("--transport", transport) as server:
        run_streams(server.url, [chat_body(i, 4) for i in range(4)])
        pids = server.pids()
        pidfds = [os.pidfd_open(pid) for pid in pids]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        server.stop(signal.SIGKILL)
        for fd in pidfds:
            assert _ended(fd), "a process is still there"
            os.close(fd)
        assert server.leftovers() == []
    assert shared_memory() <= shared_memory_before


def test_children_do_not_outlive_a_killed_supervisor() -> None:
    with Server() as server:
        children = [pid for pid in server.pids() if pid != server.pid("supervisor")]
        pidfds = [os.pidfd_open(pid) for pid in children]
        server.stop(signal.SIGKILL)
        for fd in pidfds:
            assert _ended(fd), "a child is still there"
            os.close(fd)


def shared_memory() -> set[Path]:
    """But for `multiprocessing`'s semaphores: nothing of ours has any, and others on this machine come and go."""
    return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")}


def _ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 20)[0])


def start_failing(*flags: str) -> str:
    """The one line of a server that cannot start."""
    result = subprocess.run(
        [sys.executable, "-m", "onward.cli.main", "serve", *flags], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = start_failing("--port", str(port))
    assert re.search(rf"cannot listen on 127.0.0.1:{port}.*--port", line)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    line = start_failing("--port", "0", "--model", str(tmp_path / "nowhere"))
    assert "nowhere" in line


def test_a_pool_that_cannot_fit_into_memory_is_refused_with_advice() -> None:
    line = start_failing("--port", "0", "--num-kv-blocks", "100000000")
    assert "--num-kv-blocks" in line


def test_the_engine_starts_without_torch() -> None:
    code = "import sys, onward.engine.main; sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
