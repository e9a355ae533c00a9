"""The process of `openvino_peer.py`, and the virtual environment that it runs in."""

import json
import select
import subprocess
import time
import venv
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import START_TIMEOUT_S, STOP_TIMEOUT_S, BenchProcess

PEER_REQUIREMENT = "openvino-genai>=2026.4"
PEER_SCRIPT = Path(__file__).with_name("openvino_peer.py")
ANSWER_TIMEOUT_S = 600.0


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


def peer_python(folder: Path) -> Path:
    """The interpreter of the peer's environment, which is made on first use."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {PEER_REQUIREMENT} into {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", PEER_REQUIREMENT], check=True)
        (folder / "complete").touch()
    return python
