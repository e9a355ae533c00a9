"""One line for each step, and what becomes of the steps that end otherwise."""

import json
import logging
from pathlib import Path

import pytest

from onward.errors import StartupError
from onward.obs.step_log import StepLog, StepLogFile
from onward.proto.step import StepPlan


def finished() -> list:
    steps = StepLog()
    steps.planned(StepPlan(1), 0.0, overlapped=False)
    steps.result(1, 0.5)
    return steps.take_finished()


def test_each_step_is_a_line(tmp_path: Path) -> None:
    file = StepLogFile(str(tmp_path / "steps"))
    file.write(finished())
    file.write([])
    file.write(finished())
    lines = (tmp_path / "steps").read_text().splitlines()
    assert [json.loads(line)["result_s"] for line in lines] == [0.5, 0.5]


def test_a_full_disk_ends_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    file = StepLogFile("/dev/full")
    with caplog.at_level(logging.WARNING):
        file.write(finished())
        file.write(finished())
    assert caplog.text.count("step log ended") == 1
    assert "No space left" in caplog.text


def test_a_folder_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot write steps to .*missing"):
        StepLogFile(str(tmp_path / "missing" / "steps"))


def test_steps_that_died_with_their_worker_are_forgotten() -> None:
    steps = StepLog()
    steps.planned(StepPlan(1), 0.0, overlapped=False)
    steps.lost()
    assert not steps._open
