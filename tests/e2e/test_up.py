"""`onward up`: a cluster on this machine in one command, from its first line to the last trace of it."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.pd_instances import wait_for
from tests.e2e.server import START_TIMEOUT_S, STOP_TIMEOUT_S
from tests.e2e.test_lifecycle import alive

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence. " * 4}]


class RunningCluster:
    def __init__(self, folder: str, port: int, *flags: str, variables: dict[str, str] | None = None) -> None:
        self._log = Path(folder) / "log"
        self.table: list[str] = []
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "onward.cli.main", "up", "--port", str(port), "--num-kv-blocks", "256", *flags],
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | {"TMPDIR": folder, "COLUMNS": "200"} | (variables or {}),
                text=True,
            )
        try:
            self._read_welcome()
        except AssertionError:
            self.close()
            raise

    def _read_welcome(self) -> None:
        """Up to the line that one could type next: then all instances are ready."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(START_TIMEOUT_S, self.process.kill)
        watchdog.start()
        try:
            for line in self.process.stdout:
                self.table.append(line)
                if "curl" in line:
                    return
        finally:
            watchdog.cancel()
        raise AssertionError(f"the cluster did not start:\n{self.log()}")

    def log(self) -> str:
        return self._log.read_text()

    def pids(self) -> list[int]:
        """Returns the pids of all processes below ours."""
        return descendants(self.process.pid)

    def url(self) -> str:
        """Where the line that one could type next sends its request."""
        found = re.search(r"curl (http://[^/\s]+)", self.table[-1])
        assert found is not None, self.table
        return found.group(1)

    def row(self, name: str) -> str:
        [row] = [line for line in self.table if line.strip().startswith(name)]
        return row

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_TIMEOUT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return children + [deeper for child in children for deeper in descendants(child)]


@pytest.fixture
def cluster() -> Iterator[RunningCluster]:
    with tempfile.TemporaryDirectory(prefix="onward-test-") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        cluster = RunningCluster(folder, port)
        yield cluster
        cluster.close()
        assert [path.name for path in Path(folder).iterdir()] == ["log"]


def test_one_command_starts_a_cluster_that_answers_recovers_and_leaves_nothing_behind(cluster: RunningCluster) -> None:
    assert re.search(r"tcp://127.0.0.1:\d+", cluster.row("prefill-0"))

    def answer() -> str | None:
        with openai.OpenAI(base_url=cluster.url() + "/v1", api_key="none", max_retries=0) as client:
            said = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=20)  # type: ignore[arg-type]
        return said.choices[0].message.content

    first = answer()
    assert "Paris" in (first or "")
    supervisor = int(cluster.row("prefill-0").split()[-1])
    os.kill(supervisor, signal.SIGKILL)
    assert answer() == first
    wait_for(lambda: cluster.log().count("instance ready instance=prefill-0") == 2, "the prefill instance again")
    assert answer() == first
    pids = cluster.pids()
    assert len(pids) >= 8
    before_the_end = len(cluster.log())
    assert cluster.stop() == 0
    assert not [pid for pid in pids if alive(pid)]
    assert " WARNING " not in cluster.log()[before_the_end:], cluster.log()[before_the_end:]
