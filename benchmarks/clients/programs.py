"""Load generators as command lines: each gets the same load, in the form that it wants, and leaves its figures in a folder.

Prompts have the words of `onward bench`, with a seed of their own, so that no run finds its prompts in the prefix cache.
Tokens are those that the server counts.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.clients import figures
from benchmarks.clients.figures import Figures
from onward.bench.prompts import random_words

LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    url: str
    model: str
    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    num_words: int
    """Words that make a prompt of `prompt_tokens`."""

    def prompts(self, seed: str) -> list[str]:
        return [random_words(self.num_words, f"{seed} {number}") for number in range(self.requests)]


class Program(ABC):
    name: str

    def measure(self, load: Load, seed: str, folder: Path) -> Figures:
        """Runs the load once. The folder is new, and keeps what the program writes and prints."""
        folder.mkdir(parents=True)
        code = _run(self.command(load, seed, folder), folder / "output.txt")
        if code:
            raise SystemExit(f"{self.name} ended with {code}: see {folder}/output.txt")
        found = self.figures(folder)
        found.check(load.requests, load.output_tokens)
        return found

    @abstractmethod
    def command(self, load: Load, seed: str, folder: Path) -> list[str]:
        """Writes the prompts where the program needs a file, and returns its command line."""

    @abstractmethod
    def figures(self, folder: Path) -> Figures: ...


class Onward(Program):
    name = "onward"

    def command(self, load: Load, seed: str, folder: Path) -> list[str]:
        command = [sys.executable, "-m", "onward.cli.main", "bench", "--url", load.url, "--model", load.model]
        command += ["--streams", str(load.streams), "--requests", str(load.requests), "--seed", seed]
        command += ["--prompt-tokens", str(load.prompt_tokens), "--output-tokens", str(load.output_tokens)]
        return [*command, "--json", str(folder / "figures.json")]

    def figures(self, folder: Path) -> Figures:
        return figures.of_onward(_read(folder / "figures.json"))


class GuideLlm(Program):
    name = "guidellm"

    def __init__(self, executable: str) -> None:
        self._executable = executable

    def command(self, load: Load, seed: str, folder: Path) -> list[str]:
        rows = [{"prompt": prompt, "output_tokens_count": load.output_tokens} for prompt in load.prompts(seed)]
        _write_lines(folder / "prompts.jsonl", [json.dumps(row) for row in rows])
        backend = {
            "kind": "openai_http", "target": load.url, "model": load.model, "request_format": "/v1/chat/completions",
            "extras": {"body": {"temperature": 0, "ignore_eos": True}},
        }  # fmt: skip
        command = [self._executable, "run", "--disable-progress", "--backend", json.dumps(backend)]
        command += ["--profile", json.dumps({"kind": "concurrent", "streams": [load.streams]})]
        command += ["--constraint", json.dumps({"kind": "max_requests", "count": load.requests})]
        command += ["--data", json.dumps({"kind": "json_file", "path": str(folder / "prompts.jsonl")})]
        return [*command, "--output", json.dumps({"kind": "json", "path": str(folder / "figures.json")})]

    def figures(self, folder: Path) -> Figures:
        return figures.of_guidellm(_read(folder / "figures.json"))


class AiPerf(Program):
    name = "aiperf"

    def __init__(self, executable: str, tokenizer: Path) -> None:
        """It wants a tokenizer, also where the server counts."""
        self._executable, self._tokenizer = executable, tokenizer

    def command(self, load: Load, seed: str, folder: Path) -> list[str]:
        rows = [{"text": prompt, "output_length": load.output_tokens} for prompt in load.prompts(seed)]
        _write_lines(folder / "prompts.jsonl", [json.dumps(row) for row in rows])
        command = [self._executable, "profile", "--model", load.model, "--url", load.url, "--endpoint-type", "chat"]
        command += ["--streaming", "--use-server-token-count", "--tokenizer", str(self._tokenizer)]
        command += ["--input-file", str(folder / "prompts.jsonl"), "--custom-dataset-type", "single_turn"]
        command += ["--concurrency", str(load.streams), "--request-count", str(load.requests)]
        for extra in ("temperature:0", "ignore_eos:true", f"max_tokens:{load.output_tokens}"):
            command += ["--extra-inputs", extra]
        command += ["--no-gpu-telemetry", "--no-server-metrics", "--ui", "none"]
        return [*command, "--artifact-dir", str(folder / "artifacts")]

    def figures(self, folder: Path) -> Figures:
        return figures.of_aiperf(_read(folder / "artifacts" / "profile_export_aiperf.json"))


class EvalScope(Program):
    name = "evalscope"

    def __init__(self, executable: str) -> None:
        self._executable = executable

    def command(self, load: Load, seed: str, folder: Path) -> list[str]:
        _write_lines(folder / "prompts.txt", load.prompts(seed))
        command = [self._executable, "perf", "--api", "openai", "--url", f"{load.url}/v1/chat/completions"]
        command += ["--model", load.model, "--dataset", "line_by_line", "--dataset-path", str(folder / "prompts.txt")]
        command += ["--number", str(load.requests), "--parallel", str(load.streams)]
        command += ["--max-tokens", str(load.output_tokens), "--temperature", "0", "--stream", "--no-test-connection"]
        command += ["--extra-args", json.dumps({"ignore_eos": True})]
        return [*command, "--outputs-dir", str(folder), "--no-timestamp", "--name", "run"]

    def figures(self, folder: Path) -> Figures:
        (summary,) = folder.glob("run/*/benchmark_summary.json")
        return figures.of_evalscope(_read(summary), _read(summary.with_name("benchmark_percentile.json")))


def _run(command: list[str], output: Path) -> int:
    """The exit code. Ends the whole session: some programs have processes of their own."""
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(file: Path) -> Any:
    return json.loads(file.read_bytes())


def _write_lines(file: Path, lines: list[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
