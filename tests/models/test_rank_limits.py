"""Numbers of ranks that do not fit a model are refused before its weights are fetched, hashed or converted."""

import json
from pathlib import Path

import msgspec
import pytest

from onward.config import ServeConfig
from onward.errors import StartupError
from onward.models.loader.model_store import check_local_model, check_raw_config, prepare
from onward.models.rank_limits import check_num_ranks
from onward.proto.model import Experts, LayerKind
from tests.models.checkpoints import GPT2_TOKENIZER, random_tensors, tiny_config, write_folder, write_gguf

CONFIG = msgspec.structs.replace(tiny_config(), hidden_size=64)


@pytest.mark.parametrize(("num_ranks", "is_allowed"), [(1, True), (2, True), (3, False)])
def test_a_rank_must_have_something_to_compute(num_ranks: int, is_allowed: bool) -> None:
    if is_allowed:
        check_num_ranks(num_ranks, "m", CONFIG, "int8")
    else:
        with pytest.raises(StartupError, match=r"--tensor-parallel 3: .* at most 2 ranks"):
            check_num_ranks(num_ranks, "m", CONFIG, "int8")


@pytest.mark.parametrize(("num_ranks", "is_allowed"), [(1, True), (2, True), (3, False)])
def test_a_rank_of_a_float_model_must_have_a_kv_head(num_ranks: int, is_allowed: bool) -> None:
    if is_allowed:
        check_num_ranks(num_ranks, "m", CONFIG, "none")
    else:
        with pytest.raises(StartupError, match=r"--tensor-parallel 3: m has parts for at most 2 ranks"):
            check_num_ranks(num_ranks, "m", CONFIG, "none")


def test_a_rank_of_a_float_model_must_have_a_part_of_each_mlp() -> None:
    narrow = msgspec.structs.replace(CONFIG, intermediate_size=16)
    with pytest.raises(StartupError, match="at most 1 ranks"):
        check_num_ranks(2, "m", narrow, "none")
    experts = msgspec.structs.replace(CONFIG, intermediate_size=16, experts=Experts(4, 2, 64))
    check_num_ranks(2, "m", experts, "none")
    with pytest.raises(StartupError, match="at most 1 ranks"):
        check_num_ranks(
            2, "m", msgspec.structs.replace(experts, layers=(LayerKind(is_dense=True), LayerKind())), "none"
        )


def test_float8_weights_are_refused_by_the_flag() -> None:
    with pytest.raises(StartupError, match="--tensor-parallel 2 is for int8 or unquantized weights"):
        check_num_ranks(2, "m", CONFIG, "fp8")


def test_norms_over_all_heads_are_refused_by_their_name() -> None:
    whole = msgspec.structs.replace(CONFIG, qk_norm=True, qk_norm_is_whole=True)
    with pytest.raises(StartupError, match="qk_norm_is_whole"):
        check_num_ranks(2, "m", whole, "none")
    check_num_ranks(2, "m", whole, "int8")


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


def test_the_fingerprint_of_a_float_model_depends_on_the_number_of_ranks_and_that_of_an_int8_model_does_not(
    tmp_path: Path,
) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, random_tensors(CONFIG))

    def fingerprint(quantization: str, num_ranks: int) -> str:
        cache = tmp_path / "cache"
        return prepare(str(folder), quantization=quantization, tensor_parallel=num_ranks, cache_dir=cache).fingerprint

    assert fingerprint("none", 1) != fingerprint("none", 2)
    assert fingerprint("none", 2) == fingerprint("none", 2)
    assert fingerprint("int8", 1) == fingerprint("int8", 2)
