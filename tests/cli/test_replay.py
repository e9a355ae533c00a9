"""`onward replay`, on what a core and on what a real server have written."""

import subprocess
import sys
from pathlib import Path

import pytest

from onward.cli.main import run
from onward.engine.recording.recording_file import RecordingReader
from onward.engine.step_result_processor import StepResultProcessor
from tests.e2e.server import Server
from tests.e2e.streams import chat_body, run_streams
from tests.engine.test_recording import eventful_run


def test_equal_answers_are_counted_and_exit_with_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eventful_run(tmp_path / "run")
    assert run(["replay", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "answers are equal" in shown
    assert "token ids disguised" in shown


def test_a_difference_is_shown_with_both_sides_and_exits_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    eventful_run(tmp_path / "run")
    monkeypatch.setattr(StepResultProcessor, "charge_crash", lambda self, request, now_s: False)
    assert run(["replay", str(tmp_path / "run")]) == 1
    shown = capsys.readouterr().out
    assert "differs" in shown
    assert "recorded  " in shown
    assert "replayed  " in shown


def test_a_file_cut_short_is_fine_and_a_damaged_one_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    eventful_run(tmp_path / "run")
    whole = (tmp_path / "run").read_bytes()
    (tmp_path / "cut").write_bytes(whole + b"\7")
    assert run(["replay", str(tmp_path / "cut")]) == 0
    assert "ends in the middle" in capsys.readouterr().out
    (tmp_path / "damaged").write_bytes(whole + b"\1\0\0\0\0\0\0\0x")
    assert run(["replay", str(tmp_path / "damaged")]) == 1
    assert "is damaged" in capsys.readouterr().out


def test_a_file_that_is_no_recording_is_one_line_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "poem").write_text("Roses are red")
    assert run(["replay", str(tmp_path / "poem")]) == 1
    shown = capsys.readouterr().err
    assert "poem is not a recording" in shown
    assert shown.count("\n") == 1


def test_a_real_server_records_itself_and_the_recording_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pool that is too small for all of them at once."""
    path = tmp_path / "run"
    with Server(
        "--record", str(path), "--num-kv-blocks", "24", "--max-model-len", "256", "--log-interval-s", "0.05"
    ) as server:
        streams = run_streams(server.url, [chat_body(index, 40) for index in range(6)])
        assert all(len(stream.token_ids) == 40 for stream in streams)
        assert server.stop() == 0
        log = server.log()
    reader = RecordingReader(path)
    assert sum(1 for _ in reader) > 40
    assert reader.fault is None, "it was closed properly"
    assert run(["replay", str(path)]) == 0
    assert "answers are equal" in capsys.readouterr().out
    assert log.count("request finished") == 6
    assert " ttft=" in log
    assert "scheduler running=" in log


def test_a_file_that_cannot_be_written_stops_the_start_with_one_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "onward.cli.main",
        "serve",
        "--port",
        "0",
        "--record",
        str(tmp_path / "missing" / "run"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "cannot record to" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
