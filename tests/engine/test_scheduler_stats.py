"""The engine's log lines: functions of what was counted and of the time."""

import logging

import pytest

from onward.engine.scheduler_stats import SchedulerStatLogger, SchedulerStats, format_scheduler_line
from tests.engine.harness import Harness

IDLE = SchedulerStats(0, 0, 0, 0, 100, 0, 0, 0, 0)


def fields(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def lines(caplog: pytest.LogCaptureFixture, begin: str) -> list[dict[str, str]]:
    return [fields(record.message) for record in caplog.records if record.message.startswith(begin)]


def test_rates_are_those_of_the_interval() -> None:
    before = SchedulerStats(1, 0, 0, 10, 100, 1000, 200, 300, 1)
    now = SchedulerStats(3, 2, 1, 50, 100, 1400, 300, 800, 4, waiting_tokens=77)
    assert fields(format_scheduler_line(before, now, 5.0)) == {
        "running": "3",
        "waiting": "2",
        "waiting_tokens": "77",
        "preempting": "1",
        "kv_blocks": "50/100",
        "kv_use": "50.0%",
        "prompt_tokens_per_s": "80.0",
        "output_tokens_per_s": "100.0",
        "cache_hit": "25.0%",
        "preemptions": "3",
    }


def test_without_new_prompts_there_is_no_hit_rate() -> None:
    assert fields(format_scheduler_line(IDLE, IDLE, 5.0))["cache_hit"] == "-"


def test_idle_engines_are_silent_and_the_last_work_is_told_once() -> None:
    log = SchedulerStatLogger(5.0)
    worked = SchedulerStats(0, 0, 0, 0, 100, 50, 0, 10, 0)
    assert log.line(IDLE, 0.0) is None
    assert log.line(IDLE, 5.0) is None
    assert fields(log.line(worked, 10.0) or "")["output_tokens_per_s"] == "2.0"
    assert log.line(worked, 15.0) is None


def test_an_engine_that_has_work_and_makes_no_progress_still_says_so() -> None:
    log = SchedulerStatLogger(5.0)
    stuck = SchedulerStats(4, 2, 0, 60, 100, 50, 0, 10, 0)
    log.line(stuck, 0.0)
    assert fields(log.line(stuck, 5.0) or "")["output_tokens_per_s"] == "0.0"


def test_a_line_is_due_once_in_an_interval_and_never_with_none() -> None:
    log = SchedulerStatLogger(5.0)
    assert log.is_due(100.0)
    log.line(IDLE, 100.0)
    assert not log.is_due(104.9)
    assert log.is_due(105.0)
    assert not SchedulerStatLogger(0.0).is_due(100.0)


def test_the_core_tells_what_its_scheduler_does(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(log_interval_s=5.0, num_blocks=64, block_size=4)
    harness.core.tick(0.0)
    for index in range(2):
        harness.submit(f"r{index}", [7] * 9, max_tokens=4)
        harness.run_until_idle()
    running = harness.submit("r2", list(range(9)), max_tokens=40)
    harness.plan()
    harness.answer()
    with caplog.at_level(logging.INFO):
        harness.core.tick(4.9)
        harness.core.tick(5.0)
        harness.core.tick(6.0)
    [line] = lines(caplog, "scheduler")
    assert len(running.tokens) == 1
    assert (line["running"], line["waiting"], line["preempting"], line["kv_blocks"]) == ("1", "0", "0", "3/64")
    assert (line["prompt_tokens_per_s"], line["output_tokens_per_s"]) == ("5.4", "1.8")
    assert line["cache_hit"] == "29.6%", "8 of the second prompt's 9 tokens, of 27 in all"


def test_a_request_tells_at_its_end_how_it_went(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(max_num_seqs=1)
    with caplog.at_level(logging.INFO):
        harness.submit("first", [1, 2, 3, 4, 5], max_tokens=4)
        harness.submit("second", [1, 2, 3, 4, 5], max_tokens=2)
        harness.now_s = 1.0
        harness.run_until_idle()
    first, second = lines(caplog, "request finished")
    assert first == {
        "id": "first",
        "role": "mixed",
        "reason": "length",
        "prompt": "5",
        "output": "4",
        "cached": "0",
        "prefill": "0.010",
        "ttft": "1.010",
        "seconds": "1.040",
        "preemptions": "0",
    }
    assert second["cached"] == "4"
    assert float(second["ttft"]) > float(second["prefill"]), "it had to wait"


def test_requests_that_never_had_a_token_have_no_time_to_it(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    with caplog.at_level(logging.INFO):
        harness.submit("gone", [1, 2, 3])
        harness.abort("gone")
        harness.submit("late", [1, 2, 3], deadline_in_s=0.5)
        harness.core.tick(1.0)
        harness.submit("resumed", [1, 2, 3], epoch=2, generated=[4, 5], max_tokens=3)
        harness.run_until_idle()
        harness.submit("huge", [1] * 9, max_tokens=10_000)
    gone, late, resumed = lines(caplog, "request finished")
    assert (gone["reason"], gone["prefill"], gone["ttft"], gone["output"]) == ("abort", "-", "-", "0")
    assert (late["reason"], late["error"]) == ("error", "deadline_exceeded")
    assert (resumed["reason"], resumed["output"], resumed["ttft"]) == ("length", "3", "-")
    [refused] = lines(caplog, "request refused")
    assert (refused["id"], refused["error"]) == ("huge", "context_length_exceeded")
