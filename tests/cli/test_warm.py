"""`onward warm`: which of a server's knobs it has."""

import dataclasses

import pytest

from onward.cli.main import run
from onward.config import ServeConfig

MATTERS = {
    *(
        "--model",
        "--revision",
        "--device",
        "--deterministic",
        "--dtype",
        "--quantization",
        "--load-format",
        "--speculative",
    ),
    *("--max-model-len", "--block-size", "--num-kv-blocks", "--max-num-seqs", "--max-num-batched-tokens"),
    *("--gpu-memory-utilization", "--threads"),
}
"""What is fetched, converted and compiled, and what has to fit into memory meanwhile."""


def test_its_help_shows_the_knobs_that_decide_what_is_prepared_and_no_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        run(["warm", "--help"])
    shown = set(capsys.readouterr().out.replace("[", " ").replace("]", " ").replace(",", " ").split())
    of_serve = {"--" + knob.name.replace("_", "-") for knob in dataclasses.fields(ServeConfig)}
    assert shown & of_serve == MATTERS


def test_a_servers_other_knobs_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["warm", "--port", "8001"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("onward warm: there is no flag --port")


def test_a_value_that_cannot_work_is_named_before_anything_is_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["warm", "--block-size", "0"]) == 1
    assert "onward warm: --block-size" in capsys.readouterr().err
