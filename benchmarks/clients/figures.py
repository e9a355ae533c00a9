"""Figures of one load as different programs report them, with one name and one unit for each. Pure arithmetic.

Each `of_…` reads the file that a program writes. A run in which a request failed, or that had fewer tokens than asked for,
is another load: `check` refuses it.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

ALLOWED = 0.10
"""How far a figure may be from that of another program."""


@dataclass(frozen=True, slots=True)
class Figures:
    num_requests: int
    prompt_tokens: float
    """Per request, as the server counts them."""
    output_tokens: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    request_p50_s: float
    inter_token_p50_s: float | None = None
    """Over all pairs of successive events; not every program reports it."""

    def check(self, num_requests: int, output_tokens: int) -> None:
        if (self.num_requests, self.output_tokens) != (num_requests, output_tokens):
            raise ValueError(
                f"{self.num_requests} requests of {self.output_tokens} tokens succeeded, "
                f"not {num_requests} of {output_tokens}"
            )


COMPARED: dict[str, Callable[[Figures], float | None]] = {
    "requests/s": lambda f: f.requests_per_s,
    "output tokens/s": lambda f: f.output_tokens_per_s,
    "time to first token, p50 (ms)": lambda f: f.ttft_p50_s * 1000,
    "time to first token, p99 (ms)": lambda f: f.ttft_p99_s * 1000,
    "time per output token, p50 (ms)": lambda f: f.tpot_p50_s * 1000,
    "between tokens, p50 (ms)": lambda f: None if f.inter_token_p50_s is None else f.inter_token_p50_s * 1000,
    "whole request, p50 (ms)": lambda f: f.request_p50_s * 1000,
}


def of_onward(document: Any) -> Figures:
    """The file of `onward bench --json`."""
    summary = document["summary"]
    num_good = summary["num_requests"] - summary["num_failed"]
    return Figures(
        num_requests=num_good,
        prompt_tokens=summary["prompt_tokens"] / num_good,
        output_tokens=summary["output_tokens"] / num_good,
        requests_per_s=summary["requests_per_s"],
        output_tokens_per_s=summary["output_tokens_per_s"],
        ttft_p50_s=summary["ttft_s"]["p50"],
        ttft_p99_s=summary["ttft_s"]["p99"],
        tpot_p50_s=summary["tpot_s"]["p50"],
        request_p50_s=summary["request_s"]["p50"],
        inter_token_p50_s=summary["inter_token_s"]["p50"],
    )


def of_guidellm(document: Any) -> Figures:
    """The file of `--output kind=json`. What it calls ITL leaves the first token out; what it calls TPOT does not."""
    metrics = document["benchmarks"][0]["metrics"]

    def good(name: str) -> Any:
        return metrics[name]["successful"]

    return Figures(
        num_requests=metrics["request_totals"]["successful"],
        prompt_tokens=good("prompt_token_count")["mean"],
        output_tokens=good("output_token_count")["mean"],
        requests_per_s=good("requests_per_second")["mean"],
        output_tokens_per_s=good("output_tokens_per_second")["mean"],
        ttft_p50_s=good("time_to_first_token_ms")["percentiles"]["p50"] / 1000,
        ttft_p99_s=good("time_to_first_token_ms")["percentiles"]["p99"] / 1000,
        tpot_p50_s=good("inter_token_latency_ms")["percentiles"]["p50"] / 1000,
        request_p50_s=good("request_latency")["percentiles"]["p50"],
    )


def of_aiperf(document: Any) -> Figures:
    """`profile_export_aiperf.json`. What it calls inter token latency is a mean for each request."""
    return Figures(
        num_requests=round(document["request_count"]["avg"]),
        prompt_tokens=document["input_sequence_length"]["avg"],
        output_tokens=document["output_sequence_length"]["avg"],
        requests_per_s=document["request_throughput"]["avg"],
        output_tokens_per_s=document["output_token_throughput"]["avg"],
        ttft_p50_s=document["time_to_first_token"]["p50"] / 1000,
        ttft_p99_s=document["time_to_first_token"]["p99"] / 1000,
        tpot_p50_s=document["inter_token_latency"]["p50"] / 1000,
        request_p50_s=document["request_latency"]["p50"] / 1000,
        inter_token_p50_s=document["inter_chunk_latency"]["p50"] / 1000,
    )


def of_evalscope(summary: Any, percentiles: Any) -> Figures:
    """`benchmark_summary.json` and `benchmark_percentile.json`."""
    at = {row["Percentiles"]: row for row in percentiles}
    return Figures(
        num_requests=summary["Success Requests"],
        prompt_tokens=summary["Avg Input Tokens"],
        output_tokens=summary["Avg Output Tokens"],
        requests_per_s=summary["Req Throughput (req/s)"],
        output_tokens_per_s=summary["Output Throughput (tok/s)"],
        ttft_p50_s=at["50%"]["TTFT (ms)"] / 1000,
        ttft_p99_s=at["99%"]["TTFT (ms)"] / 1000,
        tpot_p50_s=at["50%"]["TPOT (ms)"] / 1000,
        request_p50_s=at["50%"]["Latency (s)"],
        inter_token_p50_s=at["50%"]["ITL (ms)"] / 1000,
    )


@dataclass(frozen=True, slots=True)
class Pair:
    peer: str
    ours: Figures
    theirs: Figures


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure over all pairs with one program."""

    ours: float
    theirs: float
    ratio: float
    """Median of the pairs' ratios, ours to theirs."""
    lowest: float
    highest: float

    @property
    def agrees(self) -> bool:
        return abs(self.ratio - 1) <= ALLOWED


def compare(pairs: Sequence[Pair], figure: Callable[[Figures], float | None]) -> Comparison | None:
    """None where the program does not report the figure."""
    both = [(figure(pair.ours), figure(pair.theirs)) for pair in pairs]
    known = [(ours, theirs) for ours, theirs in both if ours is not None and theirs is not None]
    if not known:
        return None
    ratios = [ours / theirs for ours, theirs in known]
    return Comparison(
        statistics.median(ours for ours, _ in known),
        statistics.median(theirs for _, theirs in known),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


def all_agree(pairs: Sequence[Pair]) -> bool:
    """Whether each figure agrees with that of each program which reports it."""
    of_peer = [[pair for pair in pairs if pair.peer == peer] for peer in {pair.peer for pair in pairs}]
    found = [compare(some, figure) for some in of_peer for figure in COMPARED.values()]
    return all(one is None or one.agrees for one in found)


def table(pairs: Sequence[Pair]) -> str:
    """One row for each figure, one column for each program: medians of both sides, median of the ratios and their range."""
    peers = list(dict.fromkeys(pair.peer for pair in pairs))
    lines = [f"| `onward bench` : other | {' | '.join(peers)} |", "|---|" + "---|" * len(peers)]
    for name, figure in COMPARED.items():
        cells = [compare([pair for pair in pairs if pair.peer == peer], figure) for peer in peers]
        lines.append(f"| {name} | {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines)


def _cell(one: Comparison | None) -> str:
    if one is None:
        return "–"
    ratio = f"{one.ratio:.2f}" if one.agrees else f"**{one.ratio:.2f}**"
    return f"{_short(one.ours)} : {_short(one.theirs)} = {ratio} ({one.lowest:.2f} to {one.highest:.2f})"


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
