import io

import pytest
from rich.console import Console

from benchmarks.router.chats import ChatFigures
from benchmarks.router.router_cost import RouterCost, RouterCostSample, RouterMeasurement
from benchmarks.router.router_report import RouterReportRow, chat_rows, cost_rows, median_ratio, table


def measured(side: str, number: int, us_per_event: float, ms_per_request: float = 1.0) -> RouterMeasurement:
    sample = RouterCostSample(8, 10, 80, cpu_s=0.1, tokenizing_s=0.02 if side == "prefix" else 0.0)
    return RouterMeasurement(side, "32 streams", number, sample, sample, RouterCost(us_per_event, ms_per_request), 0.0)


def test_a_ratio_is_the_median_of_the_pairs_not_the_ratio_of_the_medians() -> None:
    assert median_ratio({0: 10, 1: 40, 2: 30}, {0: 10, 1: 10, 2: 15}) == 2
    assert median_ratio({0: 10, 1: 40}, {0: 5}) == 2
    assert median_ratio({0: 10}, {}) is None
    assert median_ratio({0: 10}, {0: 0}) is None


def test_each_load_has_its_costs_beside_nginx_and_what_it_may_cost() -> None:
    rounds = [
        one for number in range(3) for one in (measured("least_loaded", number, 40), measured("nginx", number, 10))
    ]
    events, requests = cost_rows(rounds)
    assert (events.figure, events.load, events.values) == ("µs/event", "32 streams", {"least_loaded": 40, "nginx": 10})
    assert (events.ratio, events.bar, events.is_over) == (4, 50, False)
    assert (requests.figure, requests.ratio, requests.bar) == ("ms/request", 1, 1.5)


def test_only_the_judged_side_can_be_over_its_bar() -> None:
    assert cost_rows([measured("least_loaded", 0, 51)])[0].is_over
    assert not cost_rows([measured("prefix", 0, 51)])[0].is_over


def test_tokenizing_is_told_apart() -> None:
    *_, tokenizing = cost_rows([measured("prefix", 0, 40)])
    assert tokenizing.values == {"prefix": pytest.approx(2.0)}


def test_chats_are_compared_pair_by_pair() -> None:
    found = {"prefix": [ChatFigures(0.8, 0.1, 0.2, 9)] * 2, "round_robin": [ChatFigures(0.4, 0.4, 0.4, 9)] * 2}
    cached, p50, p90 = chat_rows(found)
    assert (cached.values, cached.ratio) == ({"prefix": 80, "round_robin": 40}, 2)
    assert (p50.values["prefix"], p50.ratio, p90.ratio) == (100, 0.25, 0.5)


def test_the_table_has_a_line_for_each_row() -> None:
    rows = [
        RouterReportRow("µs/event", "a load", {"least_loaded": 41.239, "nginx": 9.876}, 4.2, 50.0),
        RouterReportRow("ms to first token", "chats", {"prefix": 123.4, "round_robin": 250.0}, 0.49),
    ]
    console = Console(file=io.StringIO(), width=130)
    console.print(table(rows))
    lines = [line.split() for line in console.file.getvalue().splitlines()]  # pyright: ignore[reportAttributeAccessIssue]
    assert ["µs/event", "a", "load", "41.2", "9.88", "4.20", "50.0"] in lines
    assert ["ms", "to", "first", "token", "chats", "123", "250", "0.49"] in lines
