"""Charts as SVG: well-formed whatever they show, with every number inside the image."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.bench.svg_chart import HEIGHT, MAX_POINTS, WIDTH, Chart, ChartLine, render, thinned

SVG = "{http://www.w3.org/2000/svg}"
sizes = st.floats(1e-2, 1e6)
points = st.lists(st.tuples(sizes, sizes), max_size=60).map(sorted)


def parsed(*charts: Chart, title: str = "a title") -> ElementTree.Element:
    return ElementTree.fromstring(render(charts, title))


def texts(image: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in image.iter(f"{SVG}text")]


@settings(max_examples=60, deadline=None)
@given(st.lists(points, min_size=1, max_size=2), st.booleans())
def test_every_line_lies_within_its_chart(lines: list[list[tuple[float, float]]], is_log_x: bool) -> None:
    image = parsed(Chart("t", "x", "y", [ChartLine("n", line) for line in lines], is_log_x))
    for path in image.iter(f"{SVG}path"):
        for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.attrib["d"]):
            assert 0 <= float(x) <= WIDTH and 0 <= float(y) <= HEIGHT


def test_axes_have_round_numbers() -> None:
    linear = parsed(Chart("t", "x", "y", [ChartLine("n", [(0.0, 0.0), (9.7, 430.0)])]))
    assert {"0", "2", "4", "6", "8", "100", "400"} <= set(texts(linear))
    log = parsed(Chart("t", "x", "y", [ChartLine("n", [(0.8, 0.0), (90.0, 1.0)])], is_log_x=True))
    assert [text for text in texts(log) if text in ("0.5", "1", "10", "100")][:1] == ["0.5"]
    assert "100" in texts(log) and "200" not in texts(log)


def test_what_is_not_ours_is_escaped() -> None:
    hostile = '</text><script>alert("x")</script>&'
    chart = Chart(hostile, hostile, hostile, [ChartLine(hostile, [(1.0, 1.0)])] * 2, y_marks=[(0.5, hostile)])
    image = parsed(chart, title=hostile)
    assert not list(image.iter(f"{SVG}script"))
    assert hostile in texts(image)


def test_a_chart_without_values_says_so() -> None:
    assert "nothing was measured" in texts(parsed(Chart("t", "x", "y", [ChartLine("n", [])])))
    assert parsed(Chart("t", "x", "y", [ChartLine("n", [(3.0, 0.0)])], is_log_x=True)) is not None


def test_both_schemes_have_colours_of_their_own() -> None:
    image = render([Chart("t", "x", "y", [ChartLine("n", [(1.0, 1.0)])])], "t")
    light, dark = re.split("prefers-color-scheme: dark", image)
    for name in ("--back", "--text", "--dim", "--grid", "--line-0", "--line-1"):
        [a], [b] = (re.findall(rf"{name}: (#\w+)", part) for part in (light, dark))
        assert a != b


@pytest.mark.parametrize("count", [1, MAX_POINTS, MAX_POINTS + 1, 100_000])
def test_a_long_line_keeps_its_ends_and_is_bounded(count: int) -> None:
    line = [(float(number), float(number)) for number in range(count)]
    kept = thinned(line)
    assert len(kept) <= MAX_POINTS and (kept[0], kept[-1]) == (line[0], line[-1])
