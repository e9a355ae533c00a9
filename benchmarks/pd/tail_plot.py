"""Draws how many waits were longer than a given time, as an SVG: the tail that a median hides. Both axes logarithmic."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from onward.bench.report import percentile

WIDTH, HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 24, 84, 58
_SHARES = (1.0, 0.1, 0.01, 0.001)
_STEPS = (1, 2, 5)
_PERCENT_AT_LEFT = 2
"""The shortest waits, of tokens that were read together, would take most of the width. They lie on the left edge."""
_NOT_ZERO = 1e-6
_LEAST_MOVE = 1.0
"""Points that are closer to the one before, in pixels, are left out."""


@dataclass(frozen=True, slots=True)
class TailCurve:
    name: str
    values_ms: Sequence[float]
    color: str
    is_dashed: bool = False


def tail(values: Sequence[float], lowest_share: float = _SHARES[-1]) -> list[tuple[float, float]]:
    """Each value, and the share of values that are at least as large, down to a share. Equal values once."""
    ordered = sorted(values)
    points: list[tuple[float, float]] = []
    for index, value in enumerate(ordered):
        share = (len(ordered) - index) / len(ordered)
        if share >= lowest_share and (not points or value > points[-1][0]):
            points.append((value, share))
    return points


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from the last that is not above `low` to the first above `high`."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    marks = [step * 10.0**power for power in range(first, last + 1) for step in _STEPS]
    start = max(mark for mark in marks if mark <= low)
    end = min(mark for mark in marks if mark > high)
    return [mark for mark in marks if start <= mark <= end]


class _Axes:
    def __init__(self, marks: list[float]) -> None:
        self._low, self._high = math.log10(marks[0]), math.log10(marks[-1])

    def x(self, ms: float) -> float:
        across = (max(math.log10(max(ms, _NOT_ZERO)), self._low) - self._low) / (self._high - self._low)
        return round(_LEFT + across * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, share: float) -> float:
        down = math.log10(share) / math.log10(_SHARES[-1])
        return round(_TOP + down * (HEIGHT - _TOP - _BOTTOM), 1)


def draw(title: str, curves: Sequence[TailCurve]) -> str:
    lines = [(curve, tail(curve.values_ms)) for curve in curves]
    marks = ticks(
        min(percentile(curve.values_ms, _PERCENT_AT_LEFT) for curve in curves), max(line[-1][0] for _, line in lines)
    )
    axes = _Axes(marks)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-labelledby="title" font-family="system-ui, sans-serif" font-size="13" fill="#334155">',
        f'<title id="title">{escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#f8fafc"/>',
        f'<text x="{_LEFT}" y="26" font-size="15" font-weight="600">{escape(title)}</text>',
        *_grid(axes, marks),
        *(_curve(axes, curve, line) for curve, line in lines),
        *_legend(curves),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _grid(axes: _Axes, marks: list[float]) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = [f'<path d="M{axes.x(ms)} {_TOP}V{bottom}" stroke="#e2e8f0"/>' for ms in marks]
    parts += [f'<path d="M{_LEFT} {axes.y(share)}H{right}" stroke="#e2e8f0"/>' for share in _SHARES]
    parts += [f'<text x="{axes.x(ms)}" y="{bottom + 18}" text-anchor="middle">{ms:g}</text>' for ms in marks]
    parts += [
        f'<text x="{_LEFT - 8}" y="{axes.y(share) + 4}" text-anchor="end">{share * 100:g} %</text>' for share in _SHARES
    ]
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">time between two tokens, ms</text>')
    parts.append(f'<text x="18" y="{(_TOP + bottom) / 2}" text-anchor="middle" '
                 f'transform="rotate(-90 18 {(_TOP + bottom) / 2})">share of waits at least as long</text>')  # fmt: skip
    return parts


def _curve(axes: _Axes, curve: TailCurve, line: list[tuple[float, float]]) -> str:
    points: list[tuple[float, float]] = []
    for ms, share in line:
        point = (axes.x(ms), axes.y(share))
        if not points or math.dist(point, points[-1]) >= _LEAST_MOVE:
            points.append(point)
    drawn = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{drawn}" fill="none" {_stroke(curve)}/>'


def _legend(curves: Sequence[TailCurve]) -> list[str]:
    parts: list[str] = []
    for number, curve in enumerate(curves):
        x, y = _LEFT + number % 2 * (WIDTH - _LEFT - _RIGHT) // 2, 46 + number // 2 * 18
        parts.append(f'<path d="M{x} {y}h22" {_stroke(curve)}/>')
        parts.append(f'<text x="{x + 28}" y="{y + 4}" font-size="12">{escape(curve.name)}</text>')
    return parts


def _stroke(curve: TailCurve) -> str:
    dashes = ' stroke-dasharray="5 4"' if curve.is_dashed else ""
    return f'stroke="{curve.color}" stroke-width="2"{dashes}'
