"""`--chat-template` and `--revision` reach the model, from the command line and from Python."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from onward.cli.progress import ProgressDisplay
from onward.cli.serve import check, check_ranks, prepare_model
from onward.config import ServeConfig
from onward.errors import InvalidRequest, StartupError
from onward.models.loader import cuda_probe
from onward.offline.inputs import build_config
from tests.models.checkpoints import GPT2_TOKENIZER, random_tensors, tiny_config, write_gguf
from tests.worker.driver import prepared

CONFIG = tiny_config()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    return str(write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG), fields=GPT2_TOKENIZER))


def test_a_template_file_is_read(model: str, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own")
    config = ServeConfig(model=model, chat_template=str(tmp_path / "own.jinja"))
    check(config)
    with ProgressDisplay(Console(stderr=True)) as progress:
        assert prepare_model(config, progress).chat_template == "own"


def test_a_revision_of_a_file_is_refused(model: str) -> None:
    with ProgressDisplay(Console(stderr=True)) as progress, pytest.raises(StartupError, match="--revision v1"):
        prepare_model(ServeConfig(model=model, revision="v1"), progress)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (ServeConfig(tensor_parallel=0), "--tensor-parallel 0 is not within 1 to 64"),
        (ServeConfig(tensor_parallel=65), "--tensor-parallel 65 is not within 1 to 64"),
    ],
    ids=["none", "too many"],
)
def test_ranks_that_cannot_be_started_are_refused_by_the_flag(config: ServeConfig, problem: str) -> None:
    with pytest.raises(StartupError, match=problem):
        check(config)


@pytest.mark.parametrize("flags", [{"role": "decode"}, {"prefill_peers": "tcp://127.0.0.1:1"}, {"handoff_port": 0}])
def test_ranks_of_a_float_model_do_not_exchange_kv(flags: dict[str, Any]) -> None:
    floats, int8 = prepared(CONFIG), prepared(CONFIG, quantization="int8")
    with pytest.raises(StartupError, match=r"--tensor-parallel 2: .* cannot exchange with other instances"):
        check_ranks(ServeConfig(tensor_parallel=2, **flags), floats)
    check_ranks(ServeConfig(tensor_parallel=2), floats)
    check_ranks(ServeConfig(**flags), floats)
    check_ranks(ServeConfig(tensor_parallel=2, **flags), int8)


@pytest.mark.parametrize("field", ["revision", "chat_template"])
def test_empty_values_are_refused_by_the_flag(field: str) -> None:
    with pytest.raises(StartupError, match=f"--{field.replace('_', '-')} must not be empty"):
        check(ServeConfig(**{field: ""}))
    for wrong in ("", 7):
        with pytest.raises(InvalidRequest, match=f"{field}: must be a text"):
            build_config("some-model", {field: wrong})
    assert getattr(build_config("some-model", {field: "x"}), field) == "x"


@pytest.mark.parametrize(
    ("printed", "code", "reason"),
    [
        ("devices 0 status 100", 0, "finds no device here (status 100)"),
        ("devices 0 status 0", 0, "finds no device here (status 0)"),
        ("devices 1 status 0", 0, None),
        ("", 0, "no CUDA driver"),
        ("", 1, None),
        ("something else", 0, None),
    ],
)
def test_a_device_is_refused_only_where_the_driver_says_so(
    monkeypatch: pytest.MonkeyPatch, printed: str, code: int, reason: str | None
) -> None:
    """What the driver's answers mean, with a program in its place that gives them."""
    monkeypatch.setattr(cuda_probe, "_ASK_DRIVER", f"import sys; print({printed!r}); sys.exit({code})")
    problem = cuda_probe._driver_problem()
    assert (reason is None) == (problem is None)
    assert reason is None or reason in (problem or "")
