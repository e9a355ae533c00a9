import pytest

from onward.bench.load import RequestTiming
from onward.bench.openai_chunks import ChunkUsage
from onward.bench.plot import MIN_SHOWN_MS, charts_of, distribution, render_file, tokens_per_s


def timing(started_s: float, *text_at_s: float, tokens: int | None = None, error: str | None = None) -> RequestTiming:
    num_tokens = len(text_at_s) if tokens is None else tokens
    return RequestTiming(started_s, list(text_at_s), started_s + 1, ChunkUsage(5, num_tokens, 0), error)


def test_a_distribution_ends_at_one() -> None:
    assert distribution([3.0, 1.0, 2.0, 2.0]) == [(1.0, 0.25), (2.0, 0.5), (2.0, 0.75), (3.0, 1.0)]


def test_tokens_per_second_add_up_to_all_tokens() -> None:
    run = [timing(100.0, 100.5, 101.0, 109.9, tokens=6), timing(101.0, 103.0)]
    bins = tokens_per_s([run])
    width_s = bins[1][0] - bins[0][0]
    assert sum(rate for _, rate in bins) * width_s == pytest.approx(7)
    assert bins[-1][0] <= 10.0
    twice = tokens_per_s([run, run])
    assert sum(rate for _, rate in twice) * width_s == pytest.approx(7), "the mean of two equal runs"


def test_charts_show_what_was_measured_of_whole_answers() -> None:
    good, bad = timing(0.0, 0.2, 0.25, 0.35), timing(0.0, 0.9, error="broken")
    first_token, between, throughput = charts_of({"A": [[good, bad]]})
    assert [x for x, _ in first_token.lines[0].points] == pytest.approx([200.0])
    assert [x for x, _ in between.lines[0].points] == pytest.approx([50.0, 100.0])
    assert throughput.lines[0].points


def test_events_that_come_at_once_are_shown_at_the_end_of_the_axis() -> None:
    _, between, _ = charts_of({"A": [[timing(0.0, 0.1, 0.1)]]})
    assert between.lines[0].points == [(MIN_SHOWN_MS, 1.0)]
    assert "<svg" in render_file(".svg", "t", {"A": [[timing(0.0, 0.1, 0.1)]]}, [])


def test_a_run_without_any_text_can_be_drawn() -> None:
    image = render_file(".svg", "t", {"A": [[timing(0.0, error="refused")]]}, [])
    assert image.count("nothing was measured") == 3


def test_a_page_has_the_charts_and_the_figures() -> None:
    page = render_file(".html", "a <b> title", {"A": [[timing(0.0, 0.1, 0.2)]]}, ["requests/s: <3>"])
    assert page.startswith("<!doctype html>") and "<svg" in page
    assert "<li>requests/s: &lt;3&gt;</li>" in page and "<b>" not in page
