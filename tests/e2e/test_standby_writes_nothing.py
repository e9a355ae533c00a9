"""Checksums of all blocks of a real server before and after a standby worker starts beside 16 running streams."""

import hashlib
import os
import signal
from pathlib import Path

from tests.e2e.observed_estate import wait_until
from tests.e2e.server import Server
from tests.e2e.streams import Stream, chat_body, run_streams
from tests.e2e.test_standby import wait_for_standby

NUM_STREAMS = 16
NUM_TOKENS = 60
NUM_LAYERS = 30
NUM_BLOCKS = 128
BODIES = [chat_body(index, NUM_TOKENS) for index in range(NUM_STREAMS)]


def block_checksums(pid: int) -> list[bytes]:
    """Returns checksums of the KV memory that this worker has open, for each block of the pool: not the scratch block,
    which is the last."""
    [path] = {
        path.resolve(): path
        for path in Path(f"/proc/{pid}/fd").iterdir()
        if "/memfd:onward-kv-memory" in str(path.readlink())
    }.values()
    content = path.read_bytes()
    page_bytes, rest = divmod(len(content), NUM_LAYERS * (NUM_BLOCKS + 1))
    assert rest == 0
    checksums = []
    for block in range(NUM_BLOCKS):
        starts = ((layer * (NUM_BLOCKS + 1) + block) * page_bytes for layer in range(NUM_LAYERS))
        checksums.append(hashlib.blake2b(b"".join(content[at : at + page_bytes] for at in starts)).digest())
    return checksums


class StartStandby:
    """Once each stream has tokens: the worker is stopped, so that nothing else writes, and a new standby starts."""

    def __init__(self, server: Server, first_standby: int) -> None:
        self._server, self._first_standby = server, first_standby
        self.before: list[bytes] = []
        self.after: list[bytes] = []

    def __call__(self, streams: list[Stream]) -> None:
        if self.before or min(len(stream.token_ids) for stream in streams) < 5:
            return
        worker = self._server.pid("worker")
        os.kill(worker, signal.SIGSTOP)
        try:
            self.before = block_checksums(worker)
            os.kill(self._first_standby, signal.SIGKILL)
            wait_until(lambda: self._first_standby not in standbys(self._server))
            assert wait_for_standby(self._server) != self._first_standby
            self.after = block_checksums(worker)
        finally:
            os.kill(worker, signal.SIGCONT)


def standbys(server: Server) -> list[int]:
    return [process["pid"] for process in server.get("/info")["processes"] if process["role"] == "standby"]


def test_a_standby_that_starts_beside_running_streams_changes_no_block() -> None:
    flags = ("--max-num-seqs", str(NUM_STREAMS), "--num-kv-blocks", str(NUM_BLOCKS), "--max-model-len", "512")
    with Server(*flags, "--standby-worker", "on") as server:
        undisturbed = [stream.result() for stream in run_streams(server.url, BODIES)]
        start = StartStandby(server, wait_for_standby(server))
        streams = run_streams(server.url, [body | {"cache_salt": "again"} for body in BODIES], start)
        assert [stream.result() for stream in streams] == undisturbed
        assert len(set(start.before)) > NUM_STREAMS, "the streams have written blocks"
        assert start.after == start.before
