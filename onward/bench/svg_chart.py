"""Charts as SVG, written by hand: lines over a linear or logarithmic axis. Readable in light and dark, without scripts.

Takes numbers and returns text. All text in the input is escaped.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 40, 44
"""Margins around the area of the lines, for numbers and titles."""
MAX_POINTS = 400
"""Points of one line. More could not be distinguished, and would make a large file."""
MAX_TICKS = 8
MAX_TITLE_CHARS, TITLE_LINE = 84, 18
"""Title of the whole image: characters per line, and the height of a line."""

STYLE = """
svg { color-scheme: light dark; --back: #ffffff; --text: #1f2328; --dim: #59636e; --grid: #d8dee4;
  --line-0: #0969da; --line-1: #bc4c00; font: 13px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --back: #0d1117; --text: #e6edf3; --dim: #9198a1; --grid: #2f353d; --line-0: #58a6ff; --line-1: #f0883e; }
}
.back { fill: var(--back); } text { fill: var(--text); } .dim { fill: var(--dim); }
.grid { stroke: var(--grid); fill: none; } .mark { stroke-dasharray: 3 3; }
.line-0 { stroke: var(--line-0); } .line-1 { stroke: var(--line-1); }
.fill-0 { fill: var(--line-0); } .fill-1 { fill: var(--line-1); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
"""


@dataclass(frozen=True, slots=True)
class ChartLine:
    name: str
    points: Sequence[tuple[float, float]]
    """Sorted by x."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x_title: str
    y_title: str
    lines: Sequence[ChartLine]
    is_log_x: bool = False
    y_max: float | None = None
    """None: the maximum of all lines."""
    y_marks: Sequence[tuple[float, str]] = field(default_factory=tuple)
    """Dashed lines across the chart, each with its name."""


def render(charts: Sequence[Chart], title: str) -> str:
    """Returns one SVG image with the charts below each other."""
    assert charts, "an image has at least one chart"
    title_lines = textwrap.wrap(title, MAX_TITLE_CHARS) or [""]
    head = 18 + TITLE_LINE * len(title_lines)
    height = head + HEIGHT * len(charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}"/>',
    ]
    for index, line in enumerate(title_lines):
        parts.append(f'<text x="{LEFT}" y="{24 + TITLE_LINE * index}" font-weight="600">{escape(line)}</text>')
    for index, chart in enumerate(charts):
        parts.append(f'<g transform="translate(0 {head + index * HEIGHT})">{_render_chart(chart)}</g>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _render_chart(chart: Chart) -> str:
    parts = [f'<text x="{LEFT}" y="22">{escape(chart.title)}</text>']
    points = [point for line in chart.lines for point in line.points]
    if not points:
        return "".join([*parts, f'<text class="dim" x="{LEFT}" y="{HEIGHT / 2:g}">nothing was measured</text>'])
    x_axis = _LogAxis.over([x for x, _ in points]) if chart.is_log_x else _LinearAxis(0.0, max(x for x, _ in points))
    y_axis = _LinearAxis(0.0, chart.y_max or max(y for _, y in points))
    for value in x_axis.ticks():
        place = _x(x_axis.share(value))
        parts.append(f'<path class="grid" d="M{place:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="dim" x="{place:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>'
        )
    for value in y_axis.ticks():
        place = _y(y_axis.share(value))
        parts.append(f'<path class="grid" d="M{LEFT} {place:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="dim" x="{LEFT - 6}" y="{place + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value, name in chart.y_marks:
        place = _y(y_axis.share(value))
        parts.append(f'<path class="grid mark" d="M{LEFT} {place:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text class="dim" x="{WIDTH - RIGHT - 4}" y="{place + 14:.1f}" text-anchor="end">{escape(name)}</text>'
        )
    for index, line in enumerate(chart.lines):
        places = [f"{_x(x_axis.share(x)):.1f} {_y(y_axis.share(y)):.1f}" for x, y in thinned(line.points)]
        if places:
            parts.append(f'<path class="line line-{index % 2}" d="M{"L".join(places)}"/>')
        if len(chart.lines) > 1:
            parts.append(_legend(index, line.name))
    bottom = HEIGHT - BOTTOM + 34
    parts.append(f'<text class="dim" x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{bottom}" text-anchor="middle">')
    parts.append(f"{escape(chart.x_title)}</text>")
    parts.append(f'<text class="dim" x="{LEFT}" y="{TOP - 4}">{escape(chart.y_title)}</text>')
    return "".join(parts)


def _legend(index: int, name: str) -> str:
    x = WIDTH - RIGHT - 340 + 170 * index
    return (
        f'<rect class="fill-{index % 2}" x="{x}" y="12" width="14" height="4"/>'
        f'<text x="{x + 20}" y="18">{escape(name[:20])}</text>'
    )


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most `MAX_POINTS` of the points, with the first and the last."""
    if len(points) <= MAX_POINTS:
        return list(points)
    step = (len(points) - 1) / (MAX_POINTS - 1)
    return [points[round(number * step)] for number in range(MAX_POINTS)]


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


@dataclass(frozen=True, slots=True)
class _LinearAxis:
    low: float
    high: float

    def share(self, value: float) -> float:
        """Returns the position of a value on the axis: 0 at the low end, 1 at the high end."""
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0

    def ticks(self) -> list[float]:
        if self.high <= self.low:
            return [self.low]
        step = _round_step((self.high - self.low) / MAX_TICKS)
        # The index times the step, not a sum: 0.1 three times is not 0.3.
        return [round(number * step, 10) for number in range(math.floor(self.high / step + 1e-9) + 1)]


def _round_step(at_least: float) -> float:
    """Returns the smallest number from `at_least` on that is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= at_least * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class _LogAxis:
    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float]) -> "_LogAxis":
        """Returns an axis from a round number below the values to one above them."""
        assert min(values) > 0, "a logarithmic axis has no zero"
        numbers = _log_numbers(min(values) / 10, max(values) * 10)
        low = max(number for number in numbers if number <= min(values))
        return cls(low, min(number for number in numbers if number >= max(values) and number > low))

    def share(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        numbers = _log_numbers(self.low, self.high)
        every_power = [number for number in numbers if round(math.log10(number), 9).is_integer()]
        return numbers if len(numbers) <= 2 * MAX_TICKS else every_power


def _log_numbers(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 times each power of ten, from `low` to `high`."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    numbers = (float(f"{factor}e{power}") for power in powers for factor in (1, 2, 5))
    return [number for number in numbers if low * (1 - 1e-9) <= number <= high * (1 + 1e-9)]
