"""The animated image of the README is what its script draws from its recording, and can be read without animation."""

import json
import re
from itertools import pairwise
from xml.etree import ElementTree

from scripts import animate_kill

DOCS = animate_kill.ROOT / "docs"
RUN = animate_kill.Run(**json.loads((DOCS / "stream-survives-kill.json").read_text()))
IMAGE = (DOCS / "stream-survives-kill.svg").read_text()
SVG = "{http://www.w3.org/2000/svg}"


def test_the_image_is_drawn_from_the_recording() -> None:
    assert animate_kill.draw(RUN) == IMAGE


def test_the_image_is_small_and_loads_nothing() -> None:
    assert len(IMAGE.encode()) < 100_000
    assert not re.search(r"url\(|href|@import|<script", IMAGE)


def test_all_of_the_text_is_in_the_image_and_in_order() -> None:
    spans = ElementTree.fromstring(IMAGE).iter(f"{SVG}text")
    shown = " ".join("".join(text.itertext()) for text in spans)
    said = "".join(text for _, text in RUN.pieces)
    assert " ".join(said.split()) in " ".join(shown.split())


def test_the_image_has_a_text_alternative() -> None:
    root = ElementTree.fromstring(IMAGE)
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None and title.text and description is not None and description.text
    assert root.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
    assert "prefers-reduced-motion" in IMAGE


def test_the_stream_was_killed_in_the_middle() -> None:
    times = [at_s for at_s, _ in RUN.pieces]
    assert all(before <= after for before, after in pairwise(times))
    assert times[0] < RUN.killed_at_s < RUN.resumed_at_s < times[-1]
    assert RUN.old_pid != RUN.new_pid


def test_lines_are_wrapped_at_spaces_and_lose_no_letter() -> None:
    pieces = [(float(number), f" word{number}") for number in range(60)] + [(60.0, "x" * 200), (61.0, "\n\nend")]
    lines = ["".join(text for _, text in line) for line in animate_kill.lines_of(pieces)]
    assert max(map(len, lines)) <= animate_kill.COLUMNS
    assert "".join(lines).replace(" ", "") == "".join(text for _, text in pieces).replace(" ", "").replace("\n", "")
