"""Whether a stream's tokens are the same however they are computed, checked over HTTP against `onward serve`.

    python -m benchmarks.gpu.exactness SHAPE [--streams 64] [--prompt 200 1000 3000] [--tokens 128] [--kinds plain mixed]
                                       [--lines cached …] [--device cuda] [--model FOLDER] [-- FLAGS of serve…]

A base run reads all streams at once. Each line then computes them in another way, compares token ids, logprobs (as they
are printed) and finish reasons with the base run, and prints how many streams differ and at which token first. The exit
status is 1 if a stream differs, or if a line shows nothing since, for example, no request was preempted.

SHAPE is one of `onward.bench.model_shapes`, with weights made on the device. With --model a folder with a `config.json` is
served instead. On CUDA the server runs with --deterministic, on the CPU with --quantization int8; FLAGS come later and win,
so `-- --no-deterministic` shows what the check finds without the promise.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.gpu.exactness_lines import BLOCK_SIZE, LINES, ComparisonRun, Line, compute_base
from benchmarks.gpu.exactness_requests import KINDS, Requests
from benchmarks.gpu.stream_client import CompletionsClient
from benchmarks.gpu.stream_outputs import BrokenStream, ComparisonResult, StreamOutput
from benchmarks.harness.serving import ServeProcess
from onward.bench.model_shapes import SHAPES, write_config, write_tokenizer

DEVICE_FLAGS = {
    "cuda": ["--deterministic", "--max-num-batched-tokens", "16384", "--max-num-seqs", "256", "--api-processes", "4"],
    "cpu": ["--quantization", "int8", "--max-num-batched-tokens", "1024", "--api-processes", "2"],
}
OTHER_BUDGET = {"cuda": 777, "cpu": 72}
"""`--max-num-batched-tokens` of the second server. Multiples of no block or tile size, so prompts are cut elsewhere."""
BASE = "base"
AT_OTHER_SERVER = ("budget",)

Results = dict[tuple[str, str], ComparisonResult]
"""By the kind of the streams and the name of the line."""


@dataclass(frozen=True, slots=True)
class Setup:
    folder: Path
    device: str
    flags: list[str]
    requests: Requests

    @property
    def num_blocks(self) -> int:
        """Room for the compared streams and those beside them, and not for much more: urgent requests can fill it."""
        neighbours = self.requests.neighbours("")
        tokens = sum((len(body["prompt"]) + body["max_tokens"]) * body.get("n", 1) for body in neighbours)
        return self.requests.num_blocks(BLOCK_SIZE) * 5 // 4 + tokens // BLOCK_SIZE + len(neighbours) + 16

    def start(self, *more: str) -> ServeProcess:
        return ServeProcess(
            str(self.folder), "--device", self.device, "--served-model-name", "m", "--log-level", "error",
            "--max-model-len", str(self.requests.max_len), "--block-size", str(BLOCK_SIZE),
            "--num-kv-blocks", str(self.num_blocks), "--max-queue-tokens", str(1 << 24),
            *DEVICE_FLAGS[self.device], *self.flags, *more,
        )  # fmt: skip


async def _attempt(line: Line, name: str, run: ComparisonRun) -> ComparisonResult:
    """A stream that breaks fails its line, and no other."""
    try:
        return await line(run)
    except* (BrokenStream, aiohttp.ClientError, TimeoutError) as broken:
        faults = "; ".join(sorted({f"{type(one).__name__}: {one}" for one in _leaves(broken)})[:3])
    return ComparisonResult(name, run.requests.num_streams, [], problem=faults)


def _leaves(group: BaseExceptionGroup) -> Iterator[BaseException]:
    for one in group.exceptions:
        if isinstance(one, BaseExceptionGroup):
            yield from _leaves(one)
        else:
            yield one


async def _run_lines(
    setup: Setup, server: ServeProcess, kind: str, base: list[StreamOutput], lines: dict[str, Line]
) -> tuple[list[StreamOutput], Results]:
    results: Results = {}
    async with CompletionsClient(server.url) as client:
        run = ComparisonRun(setup.requests, kind, server, client, base)
        for name, line in lines.items():
            began_s = time.perf_counter()
            results[kind, name] = result = await _attempt(line, name, run)
            took_s = time.perf_counter() - began_s
            print(f"{kind}, prompts of {setup.requests.prompt_len}, {took_s:.1f} s: {result}", flush=True)
            if name == BASE and not result.passed:
                break
    return run.base, results


@contextmanager
def _started_beside(start: Callable[[], ServeProcess]) -> Iterator["Future[ServeProcess]"]:
    """Starts a server while something else goes on, and stops it in the end."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(start)
        try:
            yield future
        finally:
            if future.exception() is None:
                future.result().stop()


def check_exactness(setup: Setup, kinds: Sequence[str], lines: Sequence[str]) -> Results:
    """Runs the lines for each kind of streams, and the base run before them. Two servers at most: one for nearly all
    lines, and one with another budget, which starts while the first one works."""
    here = {BASE: compute_base} | {name: LINES[name] for name in lines if name not in AT_OTHER_SERVER}
    there = {name: LINES[name] for name in lines if name in AT_OTHER_SERVER}
    results: Results = {}
    bases: dict[str, list[StreamOutput]] = {}
    with ExitStack() as servers:
        first = servers.enter_context(setup.start())
        other = None
        if there:
            flags = ("--max-num-batched-tokens", str(OTHER_BUDGET[setup.device]))
            other = servers.enter_context(_started_beside(lambda: setup.start(*flags)))
        for kind in kinds:
            base, found = asyncio.run(_run_lines(setup, first, kind, [], here))
            results |= found
            if results[kind, BASE].passed:
                bases[kind] = base
        if other is not None:
            for kind, base in bases.items():
                results |= asyncio.run(_run_lines(setup, other.result(), kind, base, there))[1]
    return results


@contextmanager
def dummy_model(shape: str) -> Iterator[Path]:
    """A folder to serve with `--load-format dummy`. Those weights are seeded, so a restarted worker has the same."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder, shape)
        write_tokenizer(folder, SHAPES[shape]["vocab_size"])
        yield folder


def main() -> int:
    ours, flags = sys.argv[1:], []
    if "--" in ours:
        ours, flags = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", choices=list(SHAPES))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", nargs="+", type=int, default=[200, 1000, 3000], help="lengths [%(default)s]")
    parser.add_argument("--tokens", type=int, default=128, help="of each output [%(default)s]")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["plain"])
    parser.add_argument("--lines", nargs="+", choices=list(LINES), default=list(LINES))
    parser.add_argument("--device", choices=list(DEVICE_FLAGS), default="cuda")
    parser.add_argument("--model", type=Path, help="folder of a model, instead of a shape")
    args = parser.parse_args(ours)
    if (args.shape is None) == (args.model is None):
        parser.error("either a shape or --model FOLDER is needed")
    with ExitStack() as stack:
        folder = args.model
        if folder is None:
            folder = stack.enter_context(dummy_model(args.shape))
            flags = ["--load-format", "dummy", *flags]
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        results: list[ComparisonResult] = []
        for prompt_len in args.prompt:
            requests = Requests(args.streams, prompt_len, args.tokens, vocab_size)
            began_s = time.perf_counter()
            results += check_exactness(Setup(folder, args.device, flags, requests), args.kinds, args.lines).values()
            print(f"prompts of {prompt_len}: {time.perf_counter() - began_s:.0f} s in all", flush=True)
    failed = [result for result in results if not result.passed]
    print(f"{len(results) - len(failed)} of {len(results)} lines passed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
