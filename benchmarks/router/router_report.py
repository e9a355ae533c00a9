"""What was measured of a router as the rows of one table: the sides beside each other, and how they compare pair by pair.

A ratio is the median of the pairs' ratios, each of two runs that followed on one another, so that a machine that is slow
for a while is slow for both. Pure arithmetic and text.
"""

from collections.abc import Callable, Sequence
from statistics import median

import msgspec
from rich import box
from rich.table import Table

from benchmarks.router.chats import ChatFigures
from benchmarks.router.router_cost import MAX_MS_PER_REQUEST, MAX_US_PER_EVENT, RouterMeasurement
from benchmarks.router.tokenizing_cost import TokenizingCost

SIDES = ("least_loaded", "prefix", "round_robin", "nginx")
JUDGED = "least_loaded"


class RouterReportRow(msgspec.Struct, frozen=True):
    figure: str
    load: str
    values: dict[str, float]
    """Medians by side."""
    ratio: float | None = None
    """For costs: the judged proxy to nginx. For chats: `prefix` to `round_robin`."""
    bar: float | None = None
    """The most that the judged side may have."""

    @property
    def is_over(self) -> bool:
        return self.bar is not None and self.values.get(JUDGED, 0.0) > self.bar


def cost_rows(measured: Sequence[RouterMeasurement]) -> list[RouterReportRow]:
    settings = list(dict.fromkeys(one.setting for one in measured))
    rows = [
        _cost_row("µs/event", setting, measured, lambda one: one.cost.us_per_event, MAX_US_PER_EVENT)
        for setting in settings
    ]
    rows += [
        _cost_row("ms/request", setting, measured, lambda one: one.cost.ms_per_request, MAX_MS_PER_REQUEST)
        for setting in settings
    ]
    tokenizing = [one.tokenizing_ms for one in measured if one.side == "prefix"]
    if tokenizing:
        rows.append(RouterReportRow("ms/request for token ids", "all of these", {"prefix": median(tokenizing)}))
    return rows


def _cost_row(
    figure: str,
    setting: str,
    measured: Sequence[RouterMeasurement],
    value: Callable[[RouterMeasurement], float],
    bar: float,
) -> RouterReportRow:
    same = [one for one in measured if one.setting == setting]
    sides: dict[str, dict[int, float]] = {}
    for one in same:
        sides.setdefault(one.side, {})[one.round] = value(one)
    medians = {side: median(rounds.values()) for side, rounds in sides.items()}
    ratio = median_ratio(sides.get(JUDGED, {}), sides.get("nginx", {}))
    return RouterReportRow(figure, setting, medians, ratio, bar)


def median_ratio(these: dict[int, float], those: dict[int, float]) -> float | None:
    """By rounds. None where there is no pair, or one whose second half is too small to be measured."""
    pairs = [(these[number], those[number]) for number in these.keys() & those.keys()]
    if not pairs or any(divisor <= 0 for _, divisor in pairs):
        return None
    return median(value / divisor for value, divisor in pairs)


def tokenizing_rows(costs: Sequence[TokenizingCost]) -> list[RouterReportRow]:
    return [
        RouterReportRow(figure, f"a chat of {one.num_tokens} tokens", {"prefix": value})
        for one in costs
        for figure, value in (
            ("ms for the template", one.template_ms),
            ("ms for token ids", one.tokens_ms),
            ("ms for block names", one.block_names_ms),
        )
    ]


def chat_rows(found: dict[str, list[ChatFigures]]) -> list[RouterReportRow]:
    figures: list[tuple[str, Callable[[ChatFigures], float]]] = [
        ("% of prompt tokens cached", lambda one: one.hit_rate * 100),
        ("ms to first token, p50", lambda one: one.ttft_p50_s * 1000),
        ("ms to first token, p90", lambda one: one.ttft_p90_s * 1000),
    ]
    return [_chat_row(name, value, found) for name, value in figures]


def _chat_row(
    figure: str, value: Callable[[ChatFigures], float], found: dict[str, list[ChatFigures]]
) -> RouterReportRow:
    sides = {side: dict(enumerate(map(value, rounds))) for side, rounds in found.items()}
    ratio = median_ratio(sides["prefix"], sides["round_robin"])
    medians = {side: median(rounds.values()) for side, rounds in sides.items()}
    return RouterReportRow(figure, "later turns of chats", medians, ratio)


def table(rows: Sequence[RouterReportRow]) -> Table:
    """Costs are processor time. A ratio: `least_loaded` to nginx, or `prefix` to `round_robin`."""
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("median of", no_wrap=True)
    shown.add_column("load", no_wrap=True)
    for name in (*SIDES, "ratio", "at most"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row.figure,
            row.load,
            *(_number(row.values.get(side)) for side in SIDES),
            _number(row.ratio),
            _number(row.bar),
            style="yellow" if row.is_over else None,
        )
    return shown


def _number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
