"""Figures of a benchmark run: rates and percentiles, and how they are printed and written. Pure arithmetic.

Token counts are those that the server reports as usage. `tpot_s` has one value for each request: its mean time per
output token after the first. `inter_token_s` has one value for each pair of successive events with text. If a server
puts several tokens into an event, `tokens_per_event` shows it. docs/benchmarking.md compares these definitions with
those of other programs.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import msgspec
from rich.table import Table

from onward.bench.load import RequestTiming


class Percentiles(msgspec.Struct, frozen=True):
    p50: float
    p99: float
    mean: float
    max: float


class Summary(msgspec.Struct, frozen=True):
    num_requests: int
    num_failed: int
    errors: dict[str, int]
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    tokens_per_event: float | None
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    inter_token_s: Percentiles | None
    request_s: Percentiles | None


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that at least `percent` per cent of the values do not exceed (nearest rank)."""
    assert values and 0 < percent <= 100
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def percentiles(values: Sequence[float]) -> Percentiles | None:
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    return Percentiles(percentile(values, 50), percentile(values, 99), mean, max(values))


def summarize(records: Sequence[RequestTiming]) -> Summary:
    """Returns the figures of a run. Rates count complete answers only, over the time from the first request to the last
    end."""
    good = [record for record in records if record.is_ok]
    usages = [record.usage for record in good if record.usage is not None]
    duration_s = max((r.ended_s for r in records), default=0.0) - min((r.started_s for r in records), default=0.0)
    output_tokens = sum(usage.completion_tokens for usage in usages)
    num_events = sum(len(record.text_at_s) for record in good)
    return Summary(
        num_requests=len(records),
        num_failed=len(records) - len(good),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        duration_s=duration_s,
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / duration_s if duration_s else 0.0,
        requests_per_s=len(good) / duration_s if duration_s else 0.0,
        tokens_per_event=output_tokens / num_events if num_events else None,
        ttft_s=percentiles([record.text_at_s[0] - record.started_s for record in good if record.text_at_s]),
        tpot_s=percentiles([tpot_s for record in good if (tpot_s := time_per_output_token_s(record)) is not None]),
        inter_token_s=percentiles([b - a for record in good for a, b in pairwise(record.text_at_s)]),
        request_s=percentiles([record.ended_s - record.started_s for record in good]),
    )


def time_per_output_token_s(record: RequestTiming) -> float | None:
    """Returns the mean time between tokens of one request, by the server's count of tokens. None with fewer than two
    tokens or fewer than two events."""
    if record.usage is None or record.usage.completion_tokens < 2 or len(record.text_at_s) < 2:
        return None
    return (record.text_at_s[-1] - record.text_at_s[0]) / (record.usage.completion_tokens - 1)


def table_of(summary: Summary, title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in _rows_of(summary):
        table.add_row(name, value)
    for error, count in summary.errors.items():
        table.add_row(f"failed, {count} times", error[:100], style="red")
    return table


def lines_of(summary: Summary) -> list[str]:
    return [f"{name}: {value}" for name, value in _rows_of(summary)]


def _rows_of(summary: Summary) -> list[tuple[str, str]]:
    return [
        ("output tokens/s", f"{summary.output_tokens_per_s:.1f}"),
        ("requests/s", f"{summary.requests_per_s:.2f}"),
        ("time to first token, p50 / p99", _in_ms(summary.ttft_s)),
        ("time per output token, p50 / p99", _in_ms(summary.tpot_s)),
        ("between tokens, p50 / p99", _in_ms(summary.inter_token_s)),
        ("whole request, p50 / p99", _in_ms(summary.request_s)),
        ("prompt tokens (cached)", f"{summary.prompt_tokens} ({summary.cached_tokens})"),
        ("output tokens", str(summary.output_tokens)),
        ("duration", f"{summary.duration_s:.1f} s"),
        ("requests (failed)", f"{summary.num_requests} ({summary.num_failed})"),
    ]


def _in_ms(values: Percentiles | None) -> str:
    return "–" if values is None else f"{values.p50 * 1000:.1f} / {values.p99 * 1000:.1f} ms"
