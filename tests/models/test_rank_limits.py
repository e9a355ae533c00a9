"""Numbers of ranks that do not fit a model are refused before its weights are fetched, hashed or converted."""

import json
from pathlib import Path

import msgspec
import pytest

from onward.config import ServeConfig
from onward.errors import StartupError
from onward.models.loader.model_store import check_local_model, check_raw_config, prepare
from onward.models.rank_limits import check_num_ranks
from tests.models.checkpoints import GPT2_TOKENIZER, random_tensors, tiny_config, write_folder, write_gguf

CONFIG = msgspec.structs.replace(tiny_config(), hidden_size=64)


@pytest.mark.parametrize(("num_ranks", "is_allowed"), [(1, True), (2, True), (3, False)])
def test_a_rank_must_have_something_to_compute(num_ranks: int, is_allowed: bool) -> None:
    if is_allowed:
        check_num_ranks(num_ranks, "m", CONFIG, "int8")
    else:
        with pytest.raises(StartupError, match=r"--tensor-parallel 3: .* at most 2 ranks"):
            check_num_ranks(num_ranks, "m", CONFIG, "int8")


def test_weights_that_are_not_int8_are_refused_by_the_flag() -> None:
    with pytest.raises(StartupError, match="--tensor-parallel 2 is for int8 weights"):
        check_num_ranks(2, "m", CONFIG, "none")


def test_a_number_of_ranks_is_refused_before_anything_is_converted(tmp_path: Path) -> None:
    config = tiny_config()
    model = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), fields=GPT2_TOKENIZER)
    steps: list[str] = []
    with pytest.raises(StartupError, match="--tensor-parallel 64"):
        prepare(
            str(model), quantization="int8", tensor_parallel=64, cache_dir=tmp_path / "cache",
            progress=lambda message, fraction: steps.append(message),
        )  # fmt: skip
    assert not steps
    assert not (tmp_path / "cache" / "models").exists()


def test_a_number_of_ranks_is_refused_by_the_config_of_a_checkpoint_alone(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_folder(tmp_path / "m", config, random_tensors(config))
    raw = json.loads((folder / "config.json").read_text())
    check_raw_config("m", raw, "cpu", "int8", None, 1)
    with pytest.raises(StartupError, match="--tensor-parallel 64"):
        check_raw_config("m", raw, "cpu", "int8", None, 64)


def test_the_check_of_a_local_model_refuses_a_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    config = tiny_config()
    model = str(write_gguf(tmp_path / "m.gguf", config, random_tensors(config), fields=GPT2_TOKENIZER))
    with pytest.raises(StartupError, match="--tensor-parallel 64"):
        check_local_model(ServeConfig(model=model, quantization="int8", tensor_parallel=64))
