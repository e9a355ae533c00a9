"""What `make bench-api` starts: a real api process, its stream store, and stub engines. Plays the supervisor's part."""

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks import ROOT
from benchmarks.api.api_cost import ThreadTimes
from benchmarks.api.api_load import ApiLoad, ApiLoadResult
from onward.config import ApiConfig, environment_with
from onward.proto.control import ChildReady, EngineGone, EngineUp, StartApi, StartStreamStore, StopChild, StreamStoreUp
from onward.proto.model import PreparedModel
from onward.proto.step import WorkerHello
from onward.transport.control_channel import control_pair
from onward.transport.curve import make_private_address

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0
NUM_BLOCKS, BLOCK_SIZE = 1 << 16, 16


class ControlledProcess:
    """A process of an instance, born as the supervisor does it."""

    def __init__(self, arguments: list[str], log: Path, inherited: tuple[int, ...] = (), source: Path = ROOT) -> None:
        self.channel, theirs = control_pair()
        command = [sys.executable, *arguments, "--control-fd", str(theirs.fileno())]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=source,
                env=environment_with({"PYTHONPATH": str(source)}),
                pass_fds=(theirs.fileno(), *inherited),
            )
        theirs.close()
        self._log = log

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.process.args} ended with {self.process.returncode}; see {self._log}")
            if select.select([self.channel], [], [], 0.1)[0] and isinstance(self.channel.receive(), ChildReady):
                return
        raise SystemExit(f"{self.process.args} is not ready after {START_TIMEOUT_S:.0f} s; see {self._log}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.channel.send(StopChild(0.0))
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.channel.close()


class ApiUnderTest:
    """`profile`: the file that says where the time went between two calls of `toggle_profile`. `source`: the folder of
    the package, where another version of it is measured."""

    def __init__(
        self,
        model: PreparedModel,
        folder: Path,
        profile: Path | None = None,
        *,
        config: ApiConfig | None = None,
        source: Path = ROOT,
    ) -> None:
        self.model = model
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = self._listening.getsockname()[1]
        fd = self._listening.fileno()
        program = ["-m", "onward.api.main"]
        if profile is not None:
            program = ["-m", "benchmarks.api.profiled_api", "--profile", str(profile.resolve())]
        self._api = ControlledProcess(program, folder / "bench-api.log", (fd,), source)
        self._stream_store = ControlledProcess(
            ["-m", "onward.stream_store.main"], folder / "bench-api-stream-store.log"
        )
        to_bind, stream_store_address = make_private_address(f"bench-stream-store-{secrets.token_hex(4)}")
        self._stream_store.channel.send(StartStreamStore("bench-stream-store", to_bind))
        self._api.channel.send(StartApi("bench-api", 0, config or ApiConfig(), model, fd))
        self._stream_store.wait_ready()
        self._api.wait_ready()
        self._api.channel.send(StreamStoreUp("bench-stream-store", stream_store_address))

    @property
    def pid(self) -> int:
        return self._api.process.pid

    def engine_up(self, engine: "StubEngineProcess") -> None:
        hello = WorkerHello(1, "bench-worker", engine.incarnation, 0, self.model.fingerprint, NUM_BLOCKS, BLOCK_SIZE,
                            self.model.config.max_position_embeddings, self.model.config.vocab_size)  # fmt: skip
        self._api.channel.send(EngineUp(engine.incarnation, engine.address, hello))

    def engine_gone(self, engine: "StubEngineProcess") -> None:
        self._api.channel.send(EngineGone(engine.incarnation, "the benchmark is done with it"))

    def toggle_profile(self) -> None:
        self._api.process.send_signal(signal.SIGUSR1)

    def thread_times(self) -> ThreadTimes:
        """Processor time so far."""
        tasks = [path.read_text() for path in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        return ThreadTimes.of_tasks(self.pid, tasks, os.sysconf("SC_CLK_TCK"))

    def cpu_s(self) -> float:
        """Processor time so far of all threads, to the nanosecond."""
        schedstats = (path.read_text() for path in Path(f"/proc/{self.pid}/task").glob("*/schedstat"))
        return sum(int(text.split()[0]) for text in schedstats) / 1e9

    def stop(self) -> None:
        self._api.stop()
        self._stream_store.stop()
        self._listening.close()


@dataclass(slots=True)
class StubEngineProcess:
    """A stub engine. As a context it is up, and gone at the end."""

    api: ApiUnderTest
    interval_ms: float
    token_ids: list[int]
    incarnation: str = ""
    address: str = ""
    _process: "subprocess.Popen[bytes] | None" = None

    def __enter__(self) -> "StubEngineProcess":
        self.incarnation = f"bench-engine-{secrets.token_hex(4)}"
        to_bind, self.address = make_private_address(self.incarnation)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.api.stub_engine", "--address", to_bind, "--incarnation", self.incarnation,
             "--interval-ms", str(self.interval_ms), "--token-ids", ",".join(map(str, self.token_ids))],
            cwd=ROOT,
        )  # fmt: skip
        self.api.engine_up(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self.api.engine_gone(self)
        self._process.kill()
        self._process.wait()


def load(asked: ApiLoad) -> ApiLoadResult:
    """In a process of its own."""
    command = [
        sys.executable, "-m", "benchmarks.api.api_load", "--port", str(asked.port), "--model", asked.model,
        "--connections", str(asked.num_connections), "--requests-each", str(asked.requests_each),
        "--max-tokens", str(asked.max_tokens), *(["--stream"] if asked.stream else []),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit("the load did not come to its end")
    return msgspec.json.decode(done.stdout, type=ApiLoadResult)
