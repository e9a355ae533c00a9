"""One line for each step, and what becomes of the steps that end otherwise."""

import json
from pathlib import Path

import pytest

from onward.errors import StartupError
from onward.obs.step_log import StepLog, StepLogFile, StepRecord, check_step_log
from onward.proto.step import StepPlan

RECORD = StepRecord(7, 1.0, True, 2, 3, 0, 0, 1.5)


def test_each_step_is_a_line_of_json(tmp_path: Path) -> None:
    log_file = StepLogFile(str(tmp_path / "steps"))
    log_file.write([RECORD, RECORD])
    log_file.write([RECORD])
    assert [json.loads(line)["step"] for line in (tmp_path / "steps").read_text().splitlines()] == [7, 7, 7]


def test_a_disk_that_fails_ends_the_log_and_not_the_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_file = StepLogFile(str(tmp_path / "gone" / "steps"))
    log_file.write([RECORD])
    log_file.write([RECORD])
    [line] = caplog.messages
    assert "step log ended" in line and "No such file or directory" in line


def test_a_file_that_cannot_be_written_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--step-log .*steps: No such file or directory"):
        check_step_log(str(tmp_path / "gone" / "steps"))


def test_a_full_disk_ends_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    log_file = StepLogFile("/dev/full")
    log_file.write([RECORD])
    log_file.write([RECORD])
    [line] = caplog.messages
    assert "step log ended" in line and "No space left" in line


def test_steps_that_died_with_their_worker_are_forgotten() -> None:
    steps = StepLog()
    steps.record_plan(StepPlan(1), 0.0, overlapped=False)
    steps.discard_in_flight()
    assert not steps._open
