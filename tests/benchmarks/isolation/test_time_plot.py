from xml.etree import ElementTree

import pytest

from benchmarks.isolation.time_plot import WIDTH, PlotLine, PlotPanel, draw, step_for

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("most, step", [(1.0, 1.0), (4.0, 1.0), (7.0, 2.0), (600.0, 200.0), (1000.0, 500.0)])
def test_an_axis_has_few_round_marks(most: float, step: float) -> None:
    assert step_for(most) == step


def test_every_line_is_drawn_within_the_picture_and_named() -> None:
    panels = [
        PlotPanel(
            "rate & more",
            [PlotLine("measured", [0.0, 50.0, 100.0], "#111"), PlotLine("best", [90.0] * 3, "#222", True)],
        ),
        PlotPanel("nothing", [PlotLine("none", [0.0] * 3, "#333")]),
    ]
    picture = ElementTree.fromstring(draw("Second by second", panels, (1.0, 2.0)))
    texts = {element.text for element in picture.iter(f"{SVG}text")}
    assert {"Second by second", "rate & more", "measured", "best", "nothing", "seconds"} <= texts
    lines = list(picture.iter(f"{SVG}polyline"))
    assert len(lines) == 3
    height = float(picture.attrib["height"])
    for line in lines:
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 < x < WIDTH and 0 < y < height
