"""Draws `docs/stream-survives-kill.svg` from a real run: a stream whose worker is killed, token by token at its own times.

    .venv/bin/python scripts/animate_kill.py record docs/stream-survives-kill.json
    .venv/bin/python scripts/animate_kill.py draw docs/stream-survives-kill.json docs/stream-survives-kill.svg

`record` starts a server, reads an answer undisturbed, reads it again and kills the worker meanwhile; the standby
worker takes over. It fails unless both texts are equal. `draw` depends on the recording alone.
"""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from onward.client import ResumingClient  # noqa: E402
from tests.e2e.server import Server  # noqa: E402
from tests.e2e.test_standby import wait_for_standby  # noqa: E402

MODEL, QUESTION = "smollm2-135m-instruct", "Why is the sky blue?"
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 96,
    "temperature": 0,
}
KILL_AFTER = 36
"""Events with text before the kill."""
IN_FLIGHT = 3
"""Events with text that may be under way when the worker is killed, at most."""

COLUMNS, LINE_HEIGHT, LEFT, FONT_SIZE, CHAR_WIDTH = 78, 23, 24, 15, 9.03
START_S, HOLD_S = 1.0, 5.0
"""Before the first token, and after the last one, of each round."""
COLORS = {"text": "#e2e8f0", "resumed": "#86efac", "prompt": "#7dd3fc", "killed": "#fca5a5", "status": "#94a3b8"}


@dataclass
class Run:
    """Times count from the request."""

    pieces: list[tuple[float, str]]
    killed_at_s: float
    old_pid: int
    new_pid: int

    @property
    def resumed_at_s(self) -> float:
        return self._pause()[1]

    @property
    def pause_s(self) -> float:
        return self._pause()[0]

    def _pause(self) -> tuple[float, float]:
        """The longest of the first silences after the kill, and its end: some tokens that were computed before arrive."""
        times = [at_s for at_s, _ in self.pieces]
        gaps = [gap for gap in pairwise(times) if gap[1] > self.killed_at_s]
        return max((after_s - max(before_s, self.killed_at_s), after_s) for before_s, after_s in gaps[:IN_FLIGHT])


def record() -> Run:
    with Server("--standby-worker", "on") as server, ResumingClient(server.url) as client:
        expected = "".join(text_of(chunk) for chunk in client.stream("/v1/chat/completions", BODY))
        new_pid = wait_for_standby(server)
        old_pid, killed_at_s = server.pid("worker"), 0.0
        pieces: list[tuple[float, str]] = []
        started_s = time.monotonic()
        for chunk in client.stream("/v1/chat/completions", BODY):
            if text := text_of(chunk):
                pieces.append((round(time.monotonic() - started_s, 3), text))
            if len(pieces) == KILL_AFTER and not killed_at_s:
                os.kill(old_pid, signal.SIGKILL)
                killed_at_s = round(time.monotonic() - started_s, 3)
        assert killed_at_s, "the answer was too short to kill its worker"
        if "".join(text for _, text in pieces) != expected:
            raise SystemExit("the stream differs from the undisturbed one")
        assert server.pid("worker") == new_pid, "the standby has taken over"
        return Run(pieces, killed_at_s, old_pid, new_pid)


def text_of(chunk: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def lines_of(pieces: list[tuple[float, str]]) -> list[list[tuple[float, str]]]:
    """The pieces wrapped at spaces. A word that begins in one piece may end in the next one."""
    text = "".join(piece for _, piece in pieces)
    times = [at_s for at_s, piece in pieces for _ in piece]
    lines: list[list[tuple[float, str]]] = []
    start = 0
    while start < len(text):
        newline = text.find("\n", start, start + COLUMNS + 1)
        end = newline if newline >= 0 else len(text) if len(text) - start <= COLUMNS else -1
        if end < 0:
            space = text.rfind(" ", start, start + COLUMNS + 1)
            end = space if space > start else start + COLUMNS
        line: list[tuple[float, str]] = []
        for at in range(start, end):
            if line and line[-1][0] == times[at]:
                line[-1] = (times[at], line[-1][1] + text[at])
            else:
                line.append((times[at], text[at]))
        lines.append(line)
        start = end + (end < len(text) and text[end] in " \n")
    return lines


class Drawing:
    """Elements that appear at one time, and disappear at another, in a loop. Without animation its end is shown."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._moments: dict[tuple[float, float | None], str] = {}

    def css_class(self, at_s: float, until_s: float | None = None) -> str:
        return self._moments.setdefault((at_s, until_s), f"m{len(self._moments)}")

    def styles(self) -> str:
        rules: list[str] = []
        for (at_s, until_s), name in self._moments.items():
            frames = f"0%{{fill-opacity:0}}{self._percent(at_s)}{{fill-opacity:1}}"
            if until_s is not None:
                frames += f"{self._percent(until_s)}{{fill-opacity:0}}"
            last = 0 if until_s is not None else 1
            rules.append(f"@keyframes {name}{{{frames}}}.{name}{{fill-opacity:{last};animation-name:{name}}}")
        names = ",".join(f".{name}" for name in self._moments.values())
        rules.append(f"{names}{{animation-duration:{self._length_s:.2f}s;animation-timing-function:step-end}}")
        rules.append(f"{names}{{animation-iteration-count:infinite}}")
        rules.append(f"@media (prefers-reduced-motion:reduce){{{names}{{animation:none}}}}")
        return "".join(rules)

    def _percent(self, at_s: float) -> str:
        return f"{100 * (START_S + at_s) / self._length_s:.2f}%"


def draw(run: Run) -> str:
    lines = lines_of(run.pieces)
    last_s = run.pieces[-1][0]
    drawing = Drawing(START_S + last_s + HOLD_S)
    top = 66
    request = f"POST /v1/chat/completions   “{QUESTION}”"
    rows = [_row(top, [f'<tspan fill="{COLORS["prompt"]}">{escape(request)}</tspan>'])]
    for number, line in enumerate(lines, 1):
        spans = [
            f'<tspan class="{drawing.css_class(at_s)}"{_resumed(run, at_s)}>{escape(text)}</tspan>'
            for at_s, text in line
        ]
        rows.append(_row(top + number * LINE_HEIGHT, spans))
    bottom = top + (len(lines) + 1) * LINE_HEIGHT + 20
    same = "the text equals that of an undisturbed run"
    rows += [
        _status(bottom, f"worker {run.old_pid} computes the tokens", "text", drawing.css_class(0, run.killed_at_s)),
        _status(bottom, f"$ kill -9 {run.old_pid}", "killed", drawing.css_class(run.killed_at_s)),
        _status(
            bottom + LINE_HEIGHT,
            f"worker {run.new_pid} continues after {run.pause_s:.2f} s",
            "resumed",
            drawing.css_class(run.resumed_at_s),
        ),
        _status(bottom + 2 * LINE_HEIGHT, f"[DONE], and {same}", "status", drawing.css_class(last_s)),
    ]
    width, height = round(2 * LEFT + COLUMNS * CHAR_WIDTH), bottom + 2 * LINE_HEIGHT + 22
    description = (
        f"A terminal in which an answer to “{QUESTION}” appears word by word. In the middle, kill -9 ends the worker "
        f"process that computes it. The text pauses for {run.pause_s:.2f} s, then another worker continues it, in green, "
        f"to its end. At the end {same}."
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" \
role="img" aria-labelledby="title desc">
<title id="title">A stream that survives the death of its worker</title>
<desc id="desc">{escape(description)}</desc>
<style>text{{font:{FONT_SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;\
fill:{COLORS["text"]};white-space:pre}}{drawing.styles()}</style>
<rect x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10" fill="#0f172a" stroke="#64748b" stroke-width="1.5"/>
<path d="M1 40H{width - 1}M1 {bottom - LINE_HEIGHT - 3}H{width - 1}" stroke="#334155"/>
<circle cx="24" cy="21" r="6" fill="#f87171"/><circle cx="44" cy="21" r="6" fill="#fbbf24"/>\
<circle cx="64" cy="21" r="6" fill="#4ade80"/>
{chr(10).join(rows)}
</svg>
"""


def _resumed(run: Run, at_s: float) -> str:
    return f' fill="{COLORS["resumed"]}"' if at_s >= run.resumed_at_s else ""


def _row(y: float, spans: list[str]) -> str:
    return f'<text x="{LEFT}" y="{y}">{"".join(spans)}</text>'


def _status(y: float, text: str, color: str, css_class: str) -> str:
    return f'<text x="{LEFT}" y="{y}"><tspan class="{css_class}" fill="{COLORS[color]}">{escape(text)}</tspan></text>'


def main(command: str, source: str, target: str = "") -> None:
    if command == "record":
        run = record()
        Path(source).write_text(json.dumps(vars(run), indent=0) + "\n")
        print(f"{len(run.pieces)} pieces, a pause of {run.pause_s:.2f} s")
    elif command == "draw":
        Path(target).write_text(draw(Run(**json.loads(Path(source).read_text()))))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
