"""What rounds of `make bench-isolation` come to: rates by the second, pairs that are compared, bars. Pure arithmetic."""

import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

from benchmarks.isolation.lean_streams import MeasuredStream
from onward.bench.report import Percentiles, percentiles

LEAST_RATIO = 0.9
"""Smallest ratio of the throughput of others, and of goodput under overload."""
MOST_GROWTH = 1.1
"""Largest growth of a process's memory while a load stays the same."""


class HostilePair(msgspec.Struct, frozen=True):
    """Tokens a second of the same load."""

    calm: float
    """Alone: the mean of the rounds before and after."""
    hostile: float
    hostile_cpu_cores: float
    """What the hostile process itself took of the machine."""

    @property
    def ratio(self) -> float:
        return self.hostile / self.calm


class MemorySample(msgspec.Struct, frozen=True):
    """Memory of every process, by its role, in MB."""

    at_s: float
    mb: dict[str, float]


class OverloadFigures(msgspec.Struct, frozen=True):
    best_before_tokens_per_s: float
    """At saturation, at the number of streams that gave most."""
    best_after_tokens_per_s: float
    offered_per_s: float
    goodput_tokens_per_s: float
    num_offered: int
    num_whole: int
    statuses: dict[str, int]
    ttft_s: Percentiles | None
    request_s: Percentiles | None
    refusal_s: Percentiles | None
    calm_before: Percentiles | None
    calm_after: Percentiles | None
    calm_before_tokens_per_s: float
    calm_after_tokens_per_s: float
    memory: list[MemorySample]
    tokens_by_second: list[int]
    refusals_by_second: list[int]

    @property
    def best_tokens_per_s(self) -> float:
        """A machine's speed moves from minute to minute: the mean of before and after."""
        return (self.best_before_tokens_per_s + self.best_after_tokens_per_s) / 2

    @property
    def ratio(self) -> float:
        return self.goodput_tokens_per_s / self.best_tokens_per_s

    @property
    def growth(self) -> float:
        """The most of any process, from the end of the first quarter to the end: by then it has what it needs."""
        first, last = self.memory[len(self.memory) // 4].mb, self.memory[-1].mb
        return max(last[role] / first[role] for role in first if role in last)


def tokens_per_s(streams: Sequence[MeasuredStream], from_s: float, seconds: int) -> float:
    """Tokens a second, of streams that were not refused."""
    return sum(by_second(streams, from_s, seconds)) / seconds


def by_second(streams: Sequence[MeasuredStream], from_s: float, seconds: int) -> list[int]:
    total: Counter[int] = sum((stream.tokens for stream in streams if stream.status == 200), Counter())
    return [total[int(from_s) + number] for number in range(seconds)]


def refusals_by_second(streams: Sequence[MeasuredStream], from_s: float, seconds: int) -> list[int]:
    ends = Counter(int(s.ended_s) for s in streams if s.ended_s is not None and s.status not in (0, 200))
    return [ends[int(from_s) + number] for number in range(seconds)]


def ttft(streams: Sequence[MeasuredStream]) -> Percentiles | None:
    return percentiles([stream.ttft_s for stream in streams if stream.first_s is not None])


def durations(streams: Sequence[MeasuredStream], *, whole: bool) -> Percentiles | None:
    """Returns the durations of complete streams, or of refused ones."""
    chosen = [one for one in streams if one.ended_s is not None and one.is_whole == whole and one.status != 0]
    return percentiles([one.ended_s - one.started_s for one in chosen if one.ended_s is not None])


def median_ratio(pairs: Sequence[HostilePair]) -> float:
    return statistics.median(pair.ratio for pair in pairs)


def markdown(pairs: Sequence[HostilePair], left_s: float | None, overload: OverloadFigures | None) -> str:
    """Two tables, as they stand in the documentation."""
    parts: list[str] = []
    if pairs:
        parts += ["| pair | alone, tok/s | with hostile connections, tok/s | ratio | the hostile process, cores |",
                  "|---|---|---|---|---|"]  # fmt: skip
        parts += [
            f"| {number + 1} | {pair.calm:.0f} | {pair.hostile:.0f} | {pair.ratio:.3f} | {pair.hostile_cpu_cores:.2f} |"
            for number, pair in enumerate(pairs)
        ]
        parts.append(f"| median | | | **{median_ratio(pairs):.3f}** | |")
    if left_s is not None:
        parts.append(f"\nAll hostile connections were gone {left_s:.0f} s after the last had come.")
    if overload is not None:
        parts += ["", "| overload | |", "|---|---|", *(f"| {name} | {said} |" for name, said in _rows(overload))]
    return "\n".join(parts) + "\n"


def _rows(one: OverloadFigures) -> list[tuple[str, str]]:
    first, last = one.memory[len(one.memory) // 4].mb, one.memory[-1].mb
    return [
        (
            "best at saturation, before / after",
            f"{one.best_before_tokens_per_s:.0f} / {one.best_after_tokens_per_s:.0f} tok/s",
        ),
        ("offered", f"{one.offered_per_s:.1f} requests/s, {one.num_offered} in all"),
        ("goodput", f"{one.goodput_tokens_per_s:.0f} tok/s, **{one.ratio:.3f}** of the mean of these"),
        ("answered", ", ".join(f"{count} with {status}" for status, count in one.statuses.items())),
        ("first token of those let in, p50 / p99", _seconds(one.ttft_s)),
        ("whole answer of those let in, p50 / p99", _seconds(one.request_s)),
        ("refusal, p50 / p99", _seconds(one.refusal_s)),
        ("memory, first quarter to end", ", ".join(f"{r} {first[r]:.0f} to {last[r]:.0f} MB" for r in first)),
        ("a calm load before / after", f"{one.calm_before_tokens_per_s:.0f} / {one.calm_after_tokens_per_s:.0f} tok/s"),
        ("its first tokens before / after, p50 / p99", f"{_seconds(one.calm_before)}; {_seconds(one.calm_after)}"),
    ]


def _seconds(values: Percentiles | None) -> str:
    return "–" if values is None else f"{values.p50:.3g} / {values.p99:.3g} s"
