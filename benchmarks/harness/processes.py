"""Processes that benchmarks compare, each in a session of its own, and what other programs took of the machine."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.02
SERVE = "from onward.cli.main import main; main()"


class BenchProcess:
    """A process and whatever it starts, in a session of their own."""

    def __init__(self, command: list[str], **streams: Any) -> None:
        self.started_s = time.perf_counter()
        self.process = subprocess.Popen(command, text=True, start_new_session=True, **streams)

    def cpu_s(self) -> float:
        """Processor time that the session has used so far."""
        ticks = sum(_ticks(fields) for fields in self._processes())
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise SystemExit(f"{self.process.args} did not stop within {STOP_TIMEOUT_S:.0f} s") from None
        if left := [fields[0] for fields in self._processes()]:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise SystemExit(f"{self.process.args} left processes behind: {left}")

    def _processes(self) -> list[list[str]]:
        """The lines of /proc that belong to the session, without what is before the state."""
        found: list[list[str]] = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[3]) == self.process.pid:
                found.append(fields)
        return found


def _ticks(fields: list[str]) -> int:
    return int(fields[11]) + int(fields[12])


class BackgroundLoad:
    """How many cores, on average, were busy with something that is neither side nor this program, since it began."""

    def __init__(self, sides: list[BenchProcess]) -> None:
        self._sides = sides
        self._began_s = time.perf_counter()
        self._others_s = self._read()

    def cores(self) -> float:
        return max(0.0, (self._read() - self._others_s) / (time.perf_counter() - self._began_s))

    def _read(self) -> float:
        user, nice, system, _, _, irq, softirq, steal = _machine_ticks()[:8]
        busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return busy_s - time.process_time() - sum(side.cpu_s() for side in self._sides)


def _machine_ticks() -> list[int]:
    return [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]


class ServerProcess(BenchProcess):
    """`onward serve` on a free port."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        command = [sys.executable, "-c", SERVE, "serve", "--port", str(self.port), *arguments]
        with log.open("w") as file:
            super().__init__(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self.start_s = self._wait_ready()

    def _wait_ready(self) -> float:
        while (waited_s := time.perf_counter() - self.started_s) < START_TIMEOUT_S:
            if self.process.poll() is not None:
                raise SystemExit(f"onward serve ended with status {self.process.returncode}; see {self._log}")
            if self._is_healthy():
                return time.perf_counter() - self.started_s
            time.sleep(POLL_S)
        self.stop()
        raise SystemExit(f"onward serve was not ready after {waited_s:.0f} s; see {self._log}")

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
