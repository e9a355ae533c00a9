"""The arithmetic of `onward bench --compare`, which measures two servers in turn, A B A B ….

Other load of the machine affects both servers of a pair, so a ratio within a pair is more reliable than two figures
that were measured at different times. The median of the ratios is the result, and their range shows its reliability.
"""

from collections.abc import Callable, Sequence
from statistics import median

import msgspec
from rich.table import Table

from onward.bench.report import Percentiles, Summary

MIN_PAIRS = 5
"""With fewer, the range says little."""

Figure = Callable[[Summary], float | None]


def _p50(name: str) -> Figure:
    return lambda summary: _in_ms(getattr(summary, name), "p50")


def _p99(name: str) -> Figure:
    return lambda summary: _in_ms(getattr(summary, name), "p99")


def _in_ms(values: Percentiles | None, percentile: str) -> float | None:
    return None if values is None else 1e3 * getattr(values, percentile)


FIGURES: dict[str, Figure] = {
    "output tokens/s": lambda summary: summary.output_tokens_per_s,
    "requests/s": lambda summary: summary.requests_per_s,
    "time to first token, p50 (ms)": _p50("ttft_s"),
    "time to first token, p99 (ms)": _p99("ttft_s"),
    "time per output token, p50 (ms)": _p50("tpot_s"),
    "between tokens, p50 (ms)": _p50("inter_token_s"),
    "between tokens, p99 (ms)": _p99("inter_token_s"),
    "whole request, p50 (ms)": _p50("request_s"),
}


class SummaryPair(msgspec.Struct, frozen=True):
    first: Summary
    second: Summary


class FigureComparison(msgspec.Struct, frozen=True):
    figure: str
    first: float
    second: float
    """The median of each server's runs."""
    ratio: float
    """The median of the ratios of the pairs, first : second."""
    lowest: float
    highest: float


def compare(pairs: Sequence[SummaryPair]) -> list[FigureComparison]:
    """Returns one row for each figure that all runs have. A figure of 0 has no ratio."""
    rows: list[FigureComparison] = []
    for name, figure in FIGURES.items():
        values = [(a, b) for pair in pairs if (a := figure(pair.first)) and (b := figure(pair.second))]
        if len(values) < len(pairs) or not values:
            continue
        ratios = [a / b for a, b in values]
        medians = median(a for a, _ in values), median(b for _, b in values)
        rows.append(FigureComparison(name, *medians, median_ratio(values), min(ratios), max(ratios)))
    return rows


def median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the median of the ratios of the pairs. The ratio of the medians would compare runs that did not follow
    each other."""
    return median(a / b for a, b in pairs)


def table_of_comparison(rows: Sequence[FigureComparison], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("median of the runs", style="dim")
    for name in ("A", "B", "A : B", "lowest", "highest"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = [
            f"{row.first:.4g}",
            f"{row.second:.4g}",
            f"{row.ratio:.3f}",
            f"{row.lowest:.3f}",
            f"{row.highest:.3f}",
        ]
        table.add_row(row.figure, *numbers)
    return table


def lines_of_comparison(rows: Sequence[FigureComparison]) -> list[str]:
    return [
        f"{row.figure}: A {row.first:.4g}, B {row.second:.4g}, A : B = {row.ratio:.3f} "
        f"({row.lowest:.3f} to {row.highest:.3f})"
        for row in rows
    ]
