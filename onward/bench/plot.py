"""`onward bench --plot`: distributions of times to the first token and between tokens, and tokens per second."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from onward.bench import svg_chart
from onward.bench.load import RequestTiming
from onward.bench.svg_chart import Chart, ChartLine

MIN_SHOWN_MS = 0.01
"""A logarithmic axis has no zero."""
NUM_BINS = 60
MIN_BIN_S = 0.1
_MARKS = ((0.5, "p50"), (0.99, "p99"))

Runs = Sequence[Sequence[RequestTiming]]
"""The requests of each run against one server."""


def charts_of(runs_by_name: Mapping[str, Runs]) -> list[Chart]:
    """Returns the charts of the runs, which are given by the name of their server."""
    return [
        _distribution("time to first token", {name: _first_token_ms(runs) for name, runs in runs_by_name.items()}),
        _distribution("between tokens", {name: _between_tokens_ms(runs) for name, runs in runs_by_name.items()}),
        Chart(
            "output tokens per second" + (", mean of all runs" if _num_runs(runs_by_name) > 1 else ""),
            "seconds since the first request",
            "tokens/s",
            [ChartLine(name, tokens_per_s(runs)) for name, runs in runs_by_name.items()],
        ),
    ]


def render_file(suffix: str, title: str, runs_by_name: Mapping[str, Runs], lines: Sequence[str]) -> str:
    """Returns the contents of a file. `suffix` is `.svg`, or `.html` for a page with `lines` below the charts."""
    image = svg_chart.render(charts_of(runs_by_name), title)
    if suffix == ".svg":
        return image
    assert suffix == ".html", "the suffix was checked before"
    rows = "\n".join(f"<li>{escape(line)}</li>" for line in lines)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width">\n'
        "<style>body { color-scheme: light dark; background: Canvas; color: CanvasText; font: 15px system-ui, sans-serif; "
        "max-width: 720px; margin: 1em auto; padding: 0 1em; } svg { max-width: 100%; height: auto; }</style></head>\n"
        f"<body>\n{image}<ul>\n{rows}\n</ul>\n</body></html>\n"
    )


def distribution(values: Sequence[float]) -> list[tuple[float, float]]:
    """Returns each value, and the share of all values that are not above it."""
    return [(value, (index + 1) / len(values)) for index, value in enumerate(sorted(values))]


def tokens_per_s(runs: Runs) -> list[tuple[float, float]]:
    """Returns tokens per second in bins of equal length, from the first request of a run on, as the mean of all runs. A
    request's tokens are divided evenly among its events, because a server may put several tokens into one event."""
    moments = [moment for run in runs for moment in _token_moments(run)]
    if not moments:
        return []
    end_s = max(at_s for at_s, _ in moments)
    bin_s = max(MIN_BIN_S, end_s / NUM_BINS)
    totals = [0.0] * (math.floor(end_s / bin_s) + 1)
    for at_s, num_tokens in moments:
        totals[math.floor(at_s / bin_s)] += num_tokens
    return [((index + 0.5) * bin_s, total / bin_s / len(runs)) for index, total in enumerate(totals)]


def _token_moments(run: Sequence[RequestTiming]) -> list[tuple[float, float]]:
    started_s = min((record.started_s for record in run), default=0.0)
    return [
        (at_s - started_s, record.usage.completion_tokens / len(record.text_at_s))
        for record in run
        if record.usage is not None
        for at_s in record.text_at_s
    ]


def _first_token_ms(runs: Runs) -> list[float]:
    return [
        1e3 * (record.text_at_s[0] - record.started_s)
        for run in runs
        for record in run
        if record.is_ok and record.text_at_s
    ]


def _between_tokens_ms(runs: Runs) -> list[float]:
    return [1e3 * (b - a) for run in runs for record in run if record.is_ok for a, b in pairwise(record.text_at_s)]


def _distribution(title: str, values_by_name: Mapping[str, Sequence[float]]) -> Chart:
    lines = [
        ChartLine(name, distribution([max(MIN_SHOWN_MS, value) for value in values]))
        for name, values in values_by_name.items()
    ]
    return Chart(title, "milliseconds", "share of all", lines, is_log_x=True, y_max=1.0, y_marks=_MARKS)


def _num_runs(runs_by_name: Mapping[str, Runs]) -> int:
    return max(len(runs) for runs in runs_by_name.values())
