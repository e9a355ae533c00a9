"""A new server that replaces a running one (`onward serve --adopt`), which tests hold at a stage, and kill there."""

import os
import re
import signal
import subprocess
import sys
import threading
from types import TracebackType
from typing import Self

from tests.e2e.cluster import Port
from tests.e2e.pd_instances import wait_for

START_PATIENCE_S = 300.0
"""Two servers start and serve on the same cores."""


class NewServer:
    """Started beside an old server on the same port. With `is_held` it stops short of asking the old one to hand over,
    until `go_on`: its stream store is stopped while it starts."""

    def __init__(self, port: Port, *flags: str, is_held: bool = False) -> None:
        command = [sys.executable, "-m", "onward.cli.main", "serve", *port.flags, "--adopt", *flags]
        self.url = port.url
        self.process = subprocess.Popen(
            [*command, "--log-level", "info", "--stopped-timeout-s", "120"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []
        self._held_pid = 0
        self._is_held = is_held
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if self._is_held and not self._held_pid and (found := re.search(r"role=stream_store pid=(\d+)", line)):
                self._held_pid = int(found.group(1))
                os.kill(self._held_pid, signal.SIGSTOP)
            self._lines.append(line)

    def log(self) -> str:
        return "".join(self._lines)

    def wait_for_line(self, text: str) -> str:
        """The first line with this text."""

        def find() -> str | None:
            return next((line for line in list(self._lines) if text in line), None)

        try:
            found = wait_for(find, text, START_PATIENCE_S)
        except AssertionError:
            raise AssertionError(f"no {text!r} in the log of the new server:\n{self.log()}") from None
        assert found is not None
        return found

    def pid_of(self, role: str) -> int:
        found = re.search(r"pid=(\d+)", self.wait_for_line(f"started role={role} "))
        assert found is not None
        return int(found.group(1))

    def go_on(self) -> None:
        os.kill(self._held_pid, signal.SIGCONT)

    def wait_until_ready(self) -> None:
        self.wait_for_line("Onward serves")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        self._reading.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        if kind is not None:
            print(self.log())
