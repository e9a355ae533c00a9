"""A server of one's own: on a free port, stopped at the end."""

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from types import TracebackType
from typing import Any, ClassVar, Self

from benchmarks.harness.metrics_text import parse_metrics

START_LIMIT_S = 180.0
STOP_LIMIT_S = 30.0


class ServeProcess:
    """`onward serve`. Errors and warnings of the server go where this process's go."""

    COMMAND: ClassVar = ["-m", "onward.cli.main", "serve", "--port", "0"]
    """Prints its address when it is ready."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags
        self._process = subprocess.Popen([sys.executable, *self.COMMAND, *flags], stdout=subprocess.PIPE, text=True)
        try:
            self.url = self._wait_for_address()
        except BaseException:
            self.stop()
            raise

    def _wait_for_address(self) -> str:
        """Reads the address that the server prints when it is ready."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(START_LIMIT_S, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                if found := re.search(r"at (http://\S+)", line):
                    return found.group(1)
        finally:
            watchdog.cancel()
        raise RuntimeError(f"the server did not start: {' '.join([*self.COMMAND, *self._flags])}")

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as response:
            return response.read().decode()

    def info(self) -> dict[str, Any]:
        return json.loads(self._get("/info"))

    def metric(self, name: str) -> float:
        return parse_metrics(self._get("/metrics")).get(name, 0.0)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
