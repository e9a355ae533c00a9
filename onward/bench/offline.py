"""Throughput of a model in this process without HTTP: the engine core, the worker and the text pipeline of a server.

    "256"     256 requests at once: prompts of 100 to 1024 random ids, outputs of 100 to 1024 tokens, temperature 0.6
    "single"  one request: milliseconds from token to token
    "prompt"  one long prompt: seconds to its first token

Each run has prompts of its own, so that no run finds another one's in the prefix cache.
"""

import os
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from onward.llm import LLM, SamplingOptions

_HIGHEST_ID = 10_000


@dataclass(frozen=True, slots=True)
class OfflineBenchRequest:
    prompt: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class OfflineFigures:
    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    runs_s: list[float]
    tokens_per_s: float
    """Output tokens per second of the median run."""
    ms_per_token: float | None = None
    """Milliseconds per token of a single stream, from its first token to its last, in the median run."""
    first_token_s: float | None = None
    """Seconds to the first token of a long prompt, in the median run."""


def workload_256(count: int = 256, low: int = 100, high: int = 1024) -> list[OfflineBenchRequest]:
    """Returns the workload of the reference engines' measurements, token for token."""
    generator = random.Random(0)
    prompts = [[generator.randint(0, _HIGHEST_ID) for _ in range(generator.randint(low, high))] for _ in range(count)]
    return [OfflineBenchRequest(prompt, generator.randint(low, high)) for prompt in prompts]


def shifted(requests: list[OfflineBenchRequest], by: int, vocab_size: int) -> list[OfflineBenchRequest]:
    """Returns requests of the same lengths with other tokens."""
    limit = min(_HIGHEST_ID + 1, vocab_size)
    return [
        OfflineBenchRequest([(token + by) % limit for token in one.prompt], one.num_output_tokens) for one in requests
    ]


def measure_batch(
    llm: LLM, requests: list[OfflineBenchRequest], *, num_runs: int, temperature: float = 0.6
) -> OfflineFigures:
    """Measures `num_runs` runs, after one run that is not counted."""
    vocab_size = llm.model.config.vocab_size
    runs_s = [
        _run_batch(llm, shifted(requests, number + 1, vocab_size), temperature) for number in range(num_runs + 1)
    ][1:]
    num_tokens = sum(request.num_output_tokens for request in requests)
    return OfflineFigures(
        str(len(requests)), sum(len(one.prompt) for one in requests), num_tokens, runs_s,
        num_tokens / statistics.median(runs_s),
    )  # fmt: skip


def _run_batch(llm: LLM, requests: list[OfflineBenchRequest], temperature: float) -> float:
    options = [
        SamplingOptions(max_tokens=one.num_output_tokens, temperature=temperature, ignore_eos=True, seed=number)
        for number, one in enumerate(requests)
    ]
    started_s = time.perf_counter()
    completions = llm.generate([one.prompt for one in requests], options)
    took_s = time.perf_counter() - started_s
    for completion, one in zip(completions, requests, strict=True):
        assert completion.error is None, completion.error
        assert len(completion.token_ids) == one.num_output_tokens
    return took_s


def measure_single(
    llm: LLM, *, num_runs: int, prompt_tokens: int = 512, output_tokens: int = 512, temperature: float = 0.6
) -> OfflineFigures:
    generator = random.Random(1)
    limit = min(_HIGHEST_ID, llm.model.config.vocab_size - 1)
    whole_s, between_s = [], []
    for number in range(num_runs + 1):
        prompt = [generator.randint(0, limit) for _ in range(prompt_tokens)]
        options = SamplingOptions(max_tokens=output_tokens, temperature=temperature, ignore_eos=True, seed=number)
        started_s = time.perf_counter()
        times = [time.perf_counter() for _ in llm.stream(prompt, options)]
        whole_s.append(times[-1] - started_s)
        between_s.append((times[-1] - times[0]) / (output_tokens - 1))
    return OfflineFigures(
        "single", prompt_tokens, output_tokens, whole_s[1:], output_tokens / statistics.median(whole_s[1:]),
        1000 * statistics.median(between_s[1:]),
    )  # fmt: skip


def measure_prompt(llm: LLM, *, num_runs: int, prompt_tokens: int) -> OfflineFigures:
    generator = random.Random(2)
    limit = min(_HIGHEST_ID, llm.model.config.vocab_size - 1)
    runs_s = []
    for number in range(num_runs + 1):
        prompt = [generator.randint(0, limit) for _ in range(prompt_tokens)]
        started_s = time.perf_counter()
        for _ in llm.stream(prompt, SamplingOptions(max_tokens=1, temperature=0.6, ignore_eos=True, seed=number)):
            pass
        runs_s.append(time.perf_counter() - started_s)
    first_token_s = statistics.median(runs_s[1:])
    return OfflineFigures(
        "prompt", prompt_tokens, 1, runs_s[1:], 1 / first_token_s, first_token_s=first_token_s
    )  # fmt: skip


def process_age_s() -> float:
    """Returns how long ago this process was started, imports included."""
    started = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return float(Path("/proc/uptime").read_text().split()[0]) - started
