"""Draws what went on second by second as an SVG: panels one above the other, with a common time axis from zero."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, PANEL_HEIGHT = 720, 150
_LEFT, _RIGHT, _TOP, _BOTTOM, _GAP = 78, 24, 44, 46, 34
_STEPS = (1, 2, 5)
_MOST_MARKS = 8


@dataclass(frozen=True, slots=True)
class PlotLine:
    name: str
    values: Sequence[float]
    color: str
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class PlotPanel:
    title: str
    lines: Sequence[PlotLine]


def step_for(most: float) -> float:
    """Between two marks of an axis from 0: 1, 2 or 5 times a power of ten, for a few marks."""
    power = 1.0
    while True:
        for step in _STEPS:
            if most / (step * power) <= _MOST_MARKS / 2:
                return step * power
        power *= 10


def draw(title: str, panels: Sequence[PlotPanel], shaded: tuple[float, float] | None = None) -> str:
    """One value a second. `shaded`: seconds that are something else."""
    seconds = max(len(line.values) for panel in panels for line in panel.lines)
    height = _TOP + len(panels) * (PANEL_HEIGHT + _GAP) - _GAP + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title" font-family="system-ui, sans-serif" font-size="13" fill="#334155">',
        f'<title id="title">{escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#f8fafc"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, _TOP + number * (PANEL_HEIGHT + _GAP), seconds, shaded)
    bottom, step = height - _BOTTOM, step_for(seconds)
    marks = [step * number for number in range(int(seconds / step) + 1)]
    parts += [f'<text x="{_x(at_s, seconds)}" y="{bottom + 18}" text-anchor="middle">{at_s:g}</text>' for at_s in marks]
    parts.append(f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{height - 10}" text-anchor="middle">seconds</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(at_s: float, seconds: int) -> float:
    return round(_LEFT + at_s / seconds * (WIDTH - _LEFT - _RIGHT), 1)


def _panel(panel: PlotPanel, top: float, seconds: int, shaded: tuple[float, float] | None) -> list[str]:
    top += 20
    inner = PANEL_HEIGHT - 20
    step = step_for(max(max(line.values, default=0.0) for line in panel.lines) or 1.0)
    most = step * (int(max(max(line.values, default=0.0) for line in panel.lines) / step) + 1)
    parts = [f'<text x="{_LEFT}" y="{top - 8}" font-size="12" font-weight="600">{escape(panel.title)}</text>']
    if shaded is not None:
        left, right = _x(shaded[0], seconds), _x(shaded[1], seconds)
        parts.append(f'<rect x="{left}" y="{top}" width="{right - left}" height="{inner}" fill="#fee2e2"/>')
    for number in range(int(most / step) + 1):
        y = round(top + inner * (1 - number * step / most), 1)
        parts.append(f'<path d="M{_LEFT} {y}H{WIDTH - _RIGHT}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{number * step:g}</text>')
    for line in panel.lines:
        points = " ".join(
            f"{_x(second + 0.5, seconds)},{round(top + inner * (1 - value / most), 1)}"
            for second, value in enumerate(line.values)
        )
        parts.append(f'<polyline points="{points}" fill="none" {_stroke(line)}/>')
    return parts + _legend(panel.lines, top - 12)


def _legend(lines: Sequence[PlotLine], y: float) -> list[str]:
    parts: list[str] = []
    x = WIDTH - _RIGHT
    for line in reversed(lines):
        x -= 34 + 7 * len(line.name)
        parts.append(f'<path d="M{x} {y}h18" {_stroke(line)}/>')
        parts.append(f'<text x="{x + 23}" y="{y + 4}" font-size="12">{escape(line.name)}</text>')
    return parts


def _stroke(line: PlotLine) -> str:
    dashes = ' stroke-dasharray="5 4"' if line.is_dashed else ""
    return f'stroke="{line.color}" stroke-width="2"{dashes}'
