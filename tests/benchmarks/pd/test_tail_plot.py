from xml.etree import ElementTree

import pytest

from benchmarks.pd.tail_plot import HEIGHT, WIDTH, TailCurve, draw, tail, ticks


def test_a_tail_says_which_share_of_values_is_at_least_as_large() -> None:
    assert tail([3.0, 1.0, 2.0, 2.0]) == [(1.0, 1.0), (2.0, 0.75), (3.0, 0.25)]
    assert tail([3.0, 1.0, 2.0, 2.0], lowest_share=0.5) == [(1.0, 1.0), (2.0, 0.75)]


@pytest.mark.parametrize(
    "low, high, marks", [(12.0, 80.0, [10, 20, 50, 100]), (1.0, 2.0, [1, 2, 5]), (0.4, 0.6, [0.2, 0.5, 1])]
)
def test_ticks_enclose_the_values(low: float, high: float, marks: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(marks)


def test_every_curve_is_drawn_within_the_picture_and_named() -> None:
    curves = [
        TailCurve("a < b", [0.0, *[5.0] * 90, 7.0, 300.0], "#111"),
        TailCurve("flat", [20.0] * 2000, "#222", is_dashed=True),
    ]
    picture = ElementTree.fromstring(draw("Waits & tails", curves))
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "flat", "Waits & tails", "0.1 %"} <= set(texts)
    lines = list(picture.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 2
    for line in lines:
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 < x < WIDTH and 0 < y < HEIGHT
