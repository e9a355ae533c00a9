"""What rounds of `pd_load` come to: times between tokens, times to first tokens, and pairs of rounds that are compared.

A machine's speed moves from minute to minute, so a pair's two rounds follow each other, and what counts is the median of
the pairs' ratios. Pure arithmetic.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import msgspec

from benchmarks.pd.pd_load import PdLoadResult
from onward.bench.load import RequestTiming
from onward.bench.report import percentile

TOGETHER_S = 0.0002
QUANTILES = (*range(1, 100), 99.5, 99.9, 100)


class GapPercentiles(msgspec.Struct, frozen=True):
    p50: float
    p90: float
    p99: float
    max: float


class PdRound(msgspec.Struct, frozen=True):
    """One side, once. Times in seconds."""

    side: str
    quiet_gaps_s: list[float]
    """Between a running stream's tokens, while no long prompt was there."""
    gaps_s: list[float]
    """While long prompts came."""
    ttft_s: list[float]
    """Times to the first token of the long prompts."""
    stream_tokens_per_s: float
    """All streams together, while long prompts came."""
    prompt_tokens: int
    cached_tokens: int


class PdPair(msgspec.Struct, frozen=True):
    split: PdRound
    """Prefill and decode on two instances."""
    mixed: PdRound


def spread(values: Sequence[float]) -> GapPercentiles:
    return GapPercentiles(*(percentile(values, percent) for percent in (50, 90, 99, 100)))


def share_together(values: Sequence[float]) -> float:
    """Tokens that came in one read with the one before: late by a step, with a wait of nothing. Where these are many, the
    reader or the api was kept from running, and the median says little."""
    return sum(value < TOGETHER_S for value in values) / len(values)


def gaps_s(records: Iterable[RequestTiming], from_s: float, to_s: float) -> list[float]:
    """Times between events that began within the span, also those that outlast it: the longest waits do."""
    return [b - a for record in records for a, b in pairwise(record.text_at_s) if from_s <= a < to_s]


def round_of(side: str, observed: PdLoadResult) -> PdRound:
    loaded = gaps_s(observed.streams, observed.loaded_from_s, observed.ended_s)
    usages = [record.usage for record in observed.prompts if record.usage is not None]
    return PdRound(
        side,
        gaps_s(observed.streams, observed.quiet_from_s, observed.loaded_from_s),
        loaded,
        [record.text_at_s[0] - record.started_s for record in observed.prompts if record.text_at_s],
        len(loaded) / (observed.ended_s - observed.loaded_from_s),
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )


def median_ratio(pairs: Sequence[PdPair], figure: Callable[[PdRound], float]) -> float:
    """Split to mixed: below 1, the split side waits less."""
    return statistics.median(figure(pair.split) / figure(pair.mixed) for pair in pairs)


def quantiles_ms(values: Sequence[float]) -> dict[str, float]:
    """A distribution in few numbers, with its tail."""
    ordered = sorted(values)
    return {str(percent): round(percentile(ordered, percent) * 1000, 3) for percent in QUANTILES}


def serve_flags(role: str, threads: int, common: Sequence[str], handoff_port: int | None = None) -> list[str]:
    """Returns the flags of one instance: all are equal except those of its role and its share of the cores."""
    flags = ["--role", role, "--threads", str(threads), *common]
    match role:
        case "prefill":
            return [*flags, "--handoff-port", str(handoff_port)]
        case "decode":
            return [*flags, "--prefill-peers", f"tcp://127.0.0.1:{handoff_port}"]
        case _:
            return flags
