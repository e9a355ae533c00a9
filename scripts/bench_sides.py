"""The sides of `bench_cpu.py` and `bench_pd.py`, each a process of its own that sleeps while another is measured."""

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

PEER_REQUIREMENT = "openvino-genai>=2026.4"
PEER_SCRIPT = Path(__file__).with_name("openvino_peer.py")
START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 600.0
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


class OpenVinoPeer(BenchProcess):
    """OpenVINO GenAI, spoken to in JSON lines."""

    def __init__(self, python: Path, gguf: Path) -> None:
        super().__init__([str(python), str(PEER_SCRIPT), str(gguf)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.hello = self._receive(START_TIMEOUT_S)
        self.start_s = time.perf_counter() - self.started_s

    def tokens_per_s(self, prompts: list[list[int]], max_tokens: int) -> float:
        outputs, seconds = self.generate(prompts, max_tokens)
        num_tokens = sum(len(output) for output in outputs)
        if num_tokens != len(prompts) * max_tokens:
            raise SystemExit(f"the peer wrote {num_tokens} tokens, not {len(prompts)} x {max_tokens}")
        return num_tokens / seconds

    def generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        answer = self._receive(ANSWER_TIMEOUT_S)
        return answer["outputs"], answer["seconds"]

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        # One line for each order, and nothing else on this pipe, so what `select` sees is the whole of it.
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise SystemExit(f"the peer did not answer within {timeout_s:.0f} s")
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"the peer ended with status {self.process.wait(STOP_TIMEOUT_S)}")
        return json.loads(line)


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


def peer_python(folder: Path) -> Path:
    """The interpreter of the peer's environment, which is made on first use."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {PEER_REQUIREMENT} into {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", PEER_REQUIREMENT], check=True)
        (folder / "complete").touch()
    return python


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
