from collections import Counter

import pytest

from benchmarks.isolation.isolation_figures import (
    HostilePair,
    MemorySample,
    OverloadFigures,
    by_second,
    durations,
    markdown,
    median_ratio,
    refusals_by_second,
    tokens_per_s,
    ttft,
)
from benchmarks.isolation.lean_streams import MeasuredStream

WHOLE = MeasuredStream(10.0, 200, 10.5, 12.0, 4, Counter({10: 1, 11: 2, 12: 1}))
RUNNING = MeasuredStream(10.0, 200, 11.5, None, 0, Counter({11: 4}))
REFUSED = MeasuredStream(11.0, 429, None, 11.25)
LOST = MeasuredStream(11.0, 0, None, 11.5)
ALL = [WHOLE, RUNNING, REFUSED, LOST]


def test_text_is_counted_in_the_second_in_which_it_came() -> None:
    assert by_second(ALL, 10.9, 4) == [1, 6, 1, 0]
    assert tokens_per_s(ALL, 11.0, 2) == 3.5
    assert refusals_by_second(ALL, 10.0, 3) == [0, 1, 0]


def test_those_let_in_and_those_refused_are_told_apart() -> None:
    first, whole, refused = ttft(ALL), durations(ALL, whole=True), durations(ALL, whole=False)
    assert first is not None and whole is not None and refused is not None
    assert (first.p50, first.max) == (0.5, 1.5)
    assert (whole.p50, refused.p50) == (2.0, 0.25)


def overload(memory: list[MemorySample]) -> OverloadFigures:
    first = ttft(ALL)
    return OverloadFigures(
        best_before_tokens_per_s=90.0, best_after_tokens_per_s=110.0, offered_per_s=10.0,
        goodput_tokens_per_s=95.0, num_offered=600, num_whole=60,
        statuses={"200": 60, "429": 540}, ttft_s=first, request_s=first, refusal_s=None, calm_before=first,
        calm_after=first, calm_before_tokens_per_s=50.0, calm_after_tokens_per_s=51.0, memory=memory,
        tokens_by_second=[95], refusals_by_second=[9],
    )  # fmt: skip


def test_memory_grows_by_as_much_as_that_of_the_process_that_grows_most() -> None:
    looks = [MemorySample(float(n), {"api": 50.0 + n, "engine": 20.0 + 2 * n, "worker": 80.0}) for n in range(9)]
    assert overload(looks).growth == pytest.approx(36 / 24)
    assert overload(looks).ratio == 0.95


def test_the_tables_name_the_median_of_the_pairs_and_what_became_of_the_requests() -> None:
    pairs = [HostilePair(100.0, 90.0, 0.1), HostilePair(100.0, 95.0, 0.1), HostilePair(100.0, 99.0, 0.1)]
    assert median_ratio(pairs) == 0.95
    told = markdown(pairs, 77.0, overload([MemorySample(0.0, {"api": 50.0})]))
    for said in (
        "| median | | | **0.950** | |",
        "gone 77 s after",
        "**0.950** of the mean",
        "540 with 429",
        "0.5 / 1.5 s",
    ):
        assert said in told
