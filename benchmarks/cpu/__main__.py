"""`make bench-cpu`: Onward, over HTTP, beside OpenVINO GenAI, offline, from the same GGUF file, in alternation.

Both sides are loaded once and sleep while the other is measured. They get the same prompts, which no cache has.
A machine's speed changes from minute to minute, so the result is the median of the pairs' ratios. Absolute figures stand
beside a calibration line taken before and after each pair, and what other programs took meanwhile. Before anything is
measured both sides must answer a simple question: a fast model that talks nonsense is not fast.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import ROOT
from benchmarks.cpu.openvino_process import OpenVinoPeer, peer_python
from benchmarks.harness import benchmark_command
from benchmarks.harness.calibration import Calibration, calibrate
from benchmarks.harness.processes import BackgroundLoad, ServerProcess
from onward import config
from onward.bench import environment, load
from onward.bench.load import BenchRequest, BenchTarget
from onward.bench.prompts import random_words
from onward.bench.report import summarize
from onward.models.loader import default_model, model_store
from onward.text.chat_template import ChatTemplate
from onward.text.tokenizer import Tokenizer

BAR = {1: 0.8, 8: 0.8, 32: 1.0}
GOAL = 1.3
WARM_UP_TOKENS = 16
# One that any good quantization of the model answers; many others hang on a near tie.
QUESTION, ANSWER, ANSWER_TOKENS = "Name three colors.", "blue", 64

Conversation = list[dict[str, str]]


class CpuPair(msgspec.Struct, frozen=True):
    streams: int
    onward_tokens_per_s: float
    peer_tokens_per_s: float
    ratio: float
    onward_ttft_p50_s: float
    prompt_tokens_mean: float
    onward_cached_tokens: int
    idle_onward_cpu_s: float
    idle_peer_cpu_s: float
    other_programs_cores: float
    before: Calibration
    after: Calibration


@dataclass(slots=True)
class CpuPrompts:
    """Conversations of about a length, and the token ids that they are."""

    tokenizer: Tokenizer
    template: ChatTemplate
    num_tokens: int

    def conversation(self, seed: str) -> Conversation:
        # The system prompt differs too: the template's own would be a common beginning, and a cache hit.
        def ask(num_words: int) -> Conversation:
            return [
                {"role": "system", "content": random_words(6, f"{seed} system")},
                {"role": "user", "content": random_words(num_words, f"{seed} user")},
            ]

        short_of = self.num_tokens - len(self.token_ids(ask(1)))
        return ask(1 + max(0, short_of))

    def token_ids(self, conversation: Conversation) -> list[int]:
        return self.tokenizer.encode_chat(self.template.render(conversation, created_s=0))


class CpuBenchmark:
    def __init__(self, onward: ServerProcess, peer: OpenVinoPeer, prompts: CpuPrompts, model: str) -> None:
        self._onward, self._peer, self._prompts = onward, peer, prompts
        self._target = BenchTarget(onward.url, model)

    def check_sense(self) -> None:
        conversation = [{"role": "user", "content": QUESTION}]
        [token_ids], _ = self._peer.generate([self._prompts.token_ids(conversation)], ANSWER_TOKENS)
        answers = {
            "the peer": self._prompts.tokenizer.decode(token_ids),
            "Onward": asyncio.run(self._answer(conversation)),
        }
        for name, text in answers.items():
            if ANSWER not in text.lower():
                raise SystemExit(f"{name} does not talk sense: {QUESTION} {text!r}")

    def warm_up(self, streams: int) -> None:
        conversations = self._conversations(streams, "warm-up")
        self._peer.tokens_per_s([self._prompts.token_ids(one) for one in conversations], WARM_UP_TOKENS)
        asyncio.run(self._ask(conversations, WARM_UP_TOKENS))

    def pair(self, streams: int, output_tokens: int, seed: str, *, peer_first: bool) -> CpuPair:
        conversations = self._conversations(streams, seed)
        token_lists = [self._prompts.token_ids(one) for one in conversations]
        before = calibrate()
        others = BackgroundLoad([self._onward, self._peer])
        figures: dict[str, Any] = {}

        def measure_peer() -> None:
            with_idle = _cpu_used_by(self._onward.cpu_s)
            figures["peer"] = self._peer.tokens_per_s(token_lists, output_tokens)
            figures["idle_onward"] = with_idle()

        def measure_onward() -> None:
            with_idle = _cpu_used_by(self._peer.cpu_s)
            figures["onward"] = summarize(asyncio.run(self._ask(conversations, output_tokens)))
            figures["idle_peer"] = with_idle()

        for measure in (measure_peer, measure_onward) if peer_first else (measure_onward, measure_peer):
            measure()
        figures["others"] = others.cores()
        summary = figures["onward"]
        if summary.num_failed or summary.output_tokens != streams * output_tokens:
            raise SystemExit(f"Onward wrote {summary.output_tokens} tokens; failed: {summary.errors}")
        return CpuPair(
            streams,
            summary.output_tokens_per_s,
            figures["peer"],
            summary.output_tokens_per_s / figures["peer"],
            summary.ttft_s.p50,
            summary.prompt_tokens / streams,
            summary.cached_tokens,
            figures["idle_onward"],
            figures["idle_peer"],
            figures["others"],
            before,
            calibrate(),
        )

    def _conversations(self, streams: int, seed: str) -> list[Conversation]:
        return [self._prompts.conversation(f"{seed} {streams} {n}") for n in range(streams)]

    async def _answer(self, conversation: Conversation) -> str:
        body = {"model": self._target.model, "messages": conversation, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        url = self._target.url + load.PATHS["chat"]
        async with load.new_session(self._target) as session, session.post(url, json=body) as response:
            return (await response.json())["choices"][0]["message"]["content"]

    async def _ask(self, conversations: list[Conversation], output_tokens: int) -> list[load.RequestTiming]:
        jobs = [BenchRequest(conversation, output_tokens) for conversation in conversations]
        async with load.new_session(self._target) as session:
            return await load.run(session, self._target, jobs, len(jobs))


def _cpu_used_by(read: Callable[[], float]) -> Callable[[], float]:
    """Starts a count; calling the result ends it."""
    began_s = read()
    return lambda: read() - began_s


def main() -> int:
    args = _arguments()
    benchmark_command.begin(args.out)
    model = model_store.prepare(config.DEFAULT_MODEL, progress=_say_once())
    gguf = default_model.fetch(config.cache_dir(), _say_once())
    assert model.tokenizer is not None and model.chat_template is not None, "the default model has both"
    prompts = CpuPrompts(
        Tokenizer.from_file(Path(model.folder) / model.tokenizer),
        ChatTemplate(model.chat_template, model.bos_token, model.eos_token),
        args.prompt_tokens,
    )
    peer = OpenVinoPeer(args.peer_python or peer_python(ROOT / ".venv-peer"), gguf)
    try:
        onward = ServerProcess(args.serve_argument, args.out / "onward-serve.log")
        try:
            print(f"ready: Onward in {onward.start_s:.1f} s; OpenVINO {peer.hello['version']} in {peer.start_s:.1f} s")
            pairs = _measure(CpuBenchmark(onward, peer, prompts, model.name), args)
        finally:
            onward.stop()
    finally:
        peer.stop()
    medians = {n: statistics.median(pair.ratio for pair in pairs if pair.streams == n) for n in args.streams}
    for streams, ratio in medians.items():
        bar = f" (at least {BAR[streams]}, goal {GOAL})" if streams in BAR else ""
        print(f"{streams:3} streams: median ratio {ratio:.2f}{bar}")
    file = benchmark_command.write("bench-cpu", _document(args, onward, peer, pairs, medians), args.out)
    print(f"written to {file}")
    is_met = all(medians[n] >= bar for n, bar in BAR.items() if n in medians)
    return 1 if args.check and not is_met else 0


def _measure(bench: CpuBenchmark, args: argparse.Namespace) -> list[CpuPair]:
    bench.check_sense()
    for streams in args.streams:
        bench.warm_up(streams)
    pairs: list[CpuPair] = []
    for number in range(args.pairs):
        for streams in args.streams:
            pair = bench.pair(streams, args.output_tokens, f"{args.seed} {number}", peer_first=number % 2 == 0)
            pairs.append(pair)
            _show(number, pair)
    return pairs


def _show(number: int, pair: CpuPair) -> None:
    print(f"  {pair.before.line()}")
    print(
        f"pair {number + 1}, {pair.streams:2} streams: Onward {pair.onward_tokens_per_s:6.1f} tok/s, "
        f"OpenVINO {pair.peer_tokens_per_s:6.1f} tok/s, ratio {pair.ratio:.2f}"
    )
    print(
        f"  first token {pair.onward_ttft_p50_s:.2f} s; {pair.prompt_tokens_mean:.0f} prompt tokens, "
        f"{pair.onward_cached_tokens} cached; CPU of the idle side {pair.idle_onward_cpu_s:.2f} s (Onward), "
        f"{pair.idle_peer_cpu_s:.2f} s (peer); other programs {pair.other_programs_cores:.2f} cores"
    )
    print(f"  {pair.after.line()}", flush=True)


def _document(
    args: argparse.Namespace, onward: ServerProcess, peer: OpenVinoPeer, pairs: list[CpuPair], medians: dict[int, float]
) -> dict[str, Any]:
    return {
        "schema": 1,
        "environment": environment.describe_machine(),
        "asked": {"output_tokens": args.output_tokens, "prompt_tokens": args.prompt_tokens, "seed": args.seed},
        "onward_start_s": onward.start_s,
        "peer": {"name": "OpenVINO GenAI", "version": peer.hello["version"], "start_s": peer.start_s},
        "pairs": pairs,
        "median_ratio": {str(streams): ratio for streams, ratio in medians.items()},
    }


def _say_once() -> Callable[[str, float | None], None]:
    said: set[str] = set()

    def progress(message: str, _: float | None) -> None:
        if message not in said:
            said.add(message)
            print(message, flush=True)

    return progress


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-cpu", description="Onward beside OpenVINO GenAI, in alternation.")
    parser.add_argument("--pairs", type=int, default=3, metavar="N", help="for each number of streams [%(default)s]")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="[1 8 32]")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N", help="[%(default)s]")
    parser.add_argument("--prompt-tokens", type=int, default=110, metavar="N", help="about [%(default)s]")
    parser.add_argument("--seed", default=str(time.time_ns()), metavar="TEXT", help="chooses the prompts")
    parser.add_argument("--check", action="store_true", help="fail if a median is below the bar")
    benchmark_command.add_out(parser)
    parser.add_argument("--peer-python", type=Path, metavar="PATH", help="an interpreter that has openvino-genai")
    parser.add_argument("--serve-argument", action="append", default=[], metavar="FLAG", help="for `onward serve`")
    args = parser.parse_args()
    if min([args.pairs, args.output_tokens, args.prompt_tokens, *args.streams]) < 1:
        parser.error("--pairs, --streams, --output-tokens and --prompt-tokens must be at least 1")
    return args


if __name__ == "__main__":
    benchmark_command.run("bench-cpu", main)
