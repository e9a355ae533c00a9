"""`onward sim`, as a person calls it."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from onward.cli.main import run
from onward.sim import batch
from onward.sim.fault_kinds import FAULT_KINDS
from onward.sim.scenario import RunResult, Scenario
from tests.sim.broken import break_restarts

BROKEN = ("sim", "--shape", "engine", "--jobs", "1", "--only", "kill-worker")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


Shown = pytest.CaptureFixture[str]


def test_one_seed_is_shown_with_its_trace_summary_and_verdict(capsys: Shown) -> None:
    assert run(["sim", "--seed", "3", "--only", "kill-engine"]) == 0
    shown = capsys.readouterr().out
    assert "kill-engine m0 for" in shown
    assert "ends: complete" in shown
    assert "digest" in shown
    assert "StepPlan" not in shown
    assert shown.rstrip().endswith("no invariant is violated")


def test_messages_are_shown_when_asked_for_and_long_lines_stay_whole(capsys: Shown) -> None:
    assert run(["sim", "--seed", "3", "--shape", "pd", "--messages"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("StepPlan" in line for line in lines) > 10
    end = lines.index("")
    assert all(line[:9].strip().replace(".", "").isdigit() for line in lines[:end]), "each line begins with its time"


def test_the_same_seed_prints_the_same(capsys: Shown) -> None:
    run(["sim", "--seed", "5", "--shape", "cluster"])
    first = capsys.readouterr().out
    run(["sim", "--seed", "5", "--shape", "cluster"])
    assert capsys.readouterr().out == first


def test_a_batch_tells_rates_faults_and_the_distribution(capsys: Shown, tmp_path: Path) -> None:
    assert (
        run(["sim", "--runs", "12", "--shape", "engine", "--jobs", "1", "--json", "a/b.json", "--markdown", "c.md"])
        == 0
    )
    shown = capsys.readouterr().out
    assert "12 runs in" in shown and "tokens checked/s" in shown
    assert "delivered tokens" in shown
    assert "no invariant is violated" in shown
    figures = json.loads((tmp_path / "a" / "b.json").read_text())
    assert figures["shapes"]["engine"]["num_runs"] == 12
    assert "| engine | 12 |" in (tmp_path / "c.md").read_text()


def test_a_violation_stops_the_batch_and_what_it_prints_replays_it(
    capsys: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_restarts(monkeypatch, priority=0)
    assert run([*BROKEN, "--runs", "40"]) == 1
    shown = capsys.readouterr().out
    assert "invariant 2 is violated" in shown
    assert "What the client got equals" in shown
    assert "1 request and 1 fault" in shown
    replay, again = (line.split("onward ", 1)[1].split() for line in shown.splitlines() if "onward sim" in line)
    assert Path(replay[-1]).exists()
    assert run(replay) == 1
    assert "kill-worker m0" in capsys.readouterr().out
    assert run(again) == 1
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert run(replay) == 0, "without the bug it is well"


def test_a_violation_is_saved_where_asked_and_not_made_smaller_when_not_wanted(
    capsys: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_restarts(monkeypatch, priority=0)
    assert run([*BROKEN, "--runs", "40", "--no-shrink", "--save", "deep/found.json"]) == 1
    assert "smaller:" not in capsys.readouterr().out
    assert len(json.loads((tmp_path / "deep" / "found.json").read_text())["asks"]) > 1


def test_violations_are_collected_and_grouped_when_it_keeps_going(
    capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_restarts(monkeypatch, priority=0)
    assert run([*BROKEN, "--runs", "12", "--keep-going"]) == 1
    shown = capsys.readouterr().out
    assert "violations" in shown and "seeds " in shown
    assert "12 runs in" in shown


def test_a_second_call_goes_on_where_the_first_one_ended(capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    call = ["sim", "--shape", "engine", "--jobs", "1", "--state", "state.json", "--runs"]
    assert run([*call, "4"]) == 0
    ran: list[int] = []
    original = batch.run_scenario

    def noted(scenario: Scenario) -> RunResult:
        ran.append(scenario.seed)
        return original(scenario)

    monkeypatch.setattr(batch, "run_scenario", noted)
    assert run([*call, "7"]) == 0
    assert ran == [4, 5, 6]
    assert "7 runs in" in capsys.readouterr().out


def test_a_violation_is_met_again_by_the_next_call(capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    call = [*BROKEN, "--runs", "40", "--state", "state.json", "--no-shrink"]
    with monkeypatch.context() as patch:
        break_restarts(patch, priority=0)
        assert run(call) == 1
        first = capsys.readouterr().out.splitlines()[-1]
        assert run(call) == 1
        assert capsys.readouterr().out.splitlines()[-1] == first


def test_an_interrupt_keeps_what_is_done(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "onward.cli.main",
        "sim",
        "--runs",
        "100000",
        "--jobs",
        "2",
        "--state",
        "state.json",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"TERM": "dumb"})
    assert process.stdout is not None
    while not (tmp_path / "state.json").exists():
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate()
    assert process.returncode == 130
    assert "what is done is in state.json" in shown
    done = json.loads((tmp_path / "state.json").read_text())["done"]
    assert sum(one["tally"]["num_runs"] for one in done) > 0


def test_a_kind_that_never_struck_fails_its_run(capsys: Shown) -> None:
    """Its deadline is long enough."""
    exits = {seed: run(["sim", "--seed", str(seed), "--only", "deadline"]) for seed in range(6)}
    shown = capsys.readouterr().out
    assert set(exits.values()) == {0, 3}
    assert "never struck: deadline" in shown
    assert "no invariant is violated, but not all that was asked for was tested: exit status 3" in shown


def test_a_kind_that_struck_in_some_runs_only_fails_the_batch_which_says_what_that_means(capsys: Shown) -> None:
    assert run(["sim", "--runs", "6", "--shape", "engine", "--only", "deadline", "--jobs", "1"]) == 3
    shown = capsys.readouterr().out
    assert re.search(r"deadline never struck in \d+ runs, as seed \d", shown)
    assert "no invariant is violated, but not all that was asked for was tested: exit status 3" in shown


def test_only_narrows_the_faults_of_a_run(capsys: Shown) -> None:
    assert run(["sim", "--seed", "1", "--only", "kill-api"]) == 0
    shown = capsys.readouterr().out
    assert "kill-api" in shown
    struck = next(line for line in shown.splitlines() if line.startswith("faults"))
    assert [kind for kind in FAULT_KINDS if kind in struck] == ["kill-api"]


def test_a_rate_makes_a_kind_more_or_less_likely(capsys: Shown) -> None:
    assert run(["sim", "--seed", "1", "--shape", "pd", "--fault", "delay=100000", "--fault", "kill-api=0"]) == 0
    shown = capsys.readouterr().out
    assert "delay on" in shown
    assert "kill-api" not in shown


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--only", "kill-moon"], ["--only", "kill-moon", "kill-worker", "deadline"]),
        (["--fault", "kill-moon=2"], ["--fault", "kill-moon", "kill-worker"]),
        (["--fault", "lose"], ["--fault lose", "KIND=RATE"]),
        (["--fault", "lose=-1"], ["--fault lose=-1", "from 0 on"]),
        (["--fault", "lose=nan"], ["--fault lose=nan"]),
        (["--only", "drain", "--shape", "engine"], ["--shape engine", "drain"]),
        (["--runs", "0"], ["--runs"]),
        (["--jobs", "0"], ["--jobs"]),
        (["--start", "-1"], ["--start"]),
        (["--replay", "none.json"], ["--replay", "none.json"]),
        (["--scenario", "F99"], ["--scenario", "F99", "F20"]),
    ],
)
def test_what_nobody_knows_is_one_line_with_its_name(capsys: Shown, flags: list[str], names: list[str]) -> None:
    assert run(["sim", *flags]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert all(name in told for name in names), told


def test_a_replayed_file_must_be_a_scenario(capsys: Shown, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"seed": 1}')
    assert run(["sim", "--replay", "x.json"]) == 1
    assert "shape" in capsys.readouterr().err


def test_faults_and_scenarios_are_listed(capsys: Shown) -> None:
    assert run(["sim", "--list-faults"]) == 0
    shown = capsys.readouterr().out
    assert all(kind in shown for kind in FAULT_KINDS)
    assert run(["sim", "--list-scenarios"]) == 0
    assert "F20" in capsys.readouterr().out


def test_a_failure_of_the_simulator_itself_is_never_taken_for_a_finding(
    capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(scenario: Scenario) -> RunResult:
        raise RuntimeError("the simulator has a bug")

    monkeypatch.setattr(batch, "run_scenario", fail)
    assert run(["sim", "--runs", "3", "--shape", "engine", "--jobs", "1"]) == 4
    shown = capsys.readouterr().out
    assert "the simulator itself failed" in shown
    assert "Traceback" in shown and "the simulator has a bug" in shown
