"""A real server for tests: `onward serve` on a free port, with its own temporary folder, stopped and checked at the end."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from benchmarks.harness.metrics_text import parse_metrics

START_TIMEOUT_S = 400
STOP_TIMEOUT_S = 30


class Server:
    DEFAULT_FLAGS = ("--standby-worker", "off", "--stopped-timeout-s", "120")
    """A standby takes most of a second of one core to start, and most tests are over by then. Tests stop processes for as
    long as they need."""

    def __init__(self, *flags: str) -> None:
        self._tmp = tempfile.TemporaryDirectory(prefix="onward-test-")
        self._log = Path(self._tmp.name) / "log"
        with self._log.open("wb") as log:
            self._process = self._start(flags, log)
        try:
            self.url = self._wait_for_address()
        except AssertionError as fault:
            self.__exit__(type(fault), fault, None)
            raise

    def _start(self, flags: tuple[str, ...], log: BinaryIO) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "onward.cli.main", "serve", "--port", "0", *self.DEFAULT_FLAGS, *flags],
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {"TMPDIR": self._tmp.name, "COLUMNS": "200"},
            text=True,
        )

    def _wait_for_address(self) -> str:
        """Reads the welcome; the server prints it when it is ready, so no poll is needed."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(START_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                if found := re.search(r"at (http://\S+)", line):
                    return found.group(1)
        finally:
            watchdog.cancel()
        raise AssertionError(f"the server did not start:\n{self.log()}")

    @property
    def temporary_folder(self) -> str:
        return self._tmp.name

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return json.load(response)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as response:
            return parse_metrics(response.read().decode())

    def pid(self, role: str) -> int:
        [pid] = self.get("/info")["pids"][role]
        return pid

    def pids(self) -> list[int]:
        return [pid for pids in self.get("/info")["pids"].values() for pid in pids]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self._process.send_signal(number)
        return self._process.wait(STOP_TIMEOUT_S)

    def leftovers(self) -> list[str]:
        """What the server has left in its temporary folder. Only our own log should be there."""
        return sorted(p.name for p in Path(self._tmp.name).iterdir() if p != self._log)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.stop()
        if self._process.stdout is not None:
            self._process.stdout.close()
        if kind is not None:
            print(self.log())
        self._tmp.cleanup()
