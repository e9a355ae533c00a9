import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from onward.errors import StartupError
from onward.models.loader.checkpoint import check_checkpoint, weight_files
from onward.models.tensor_names import LM_HEAD
from tests.models.checkpoints import VARIANTS, random_tensors, tiny_config, write_folder

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(("architecture", "tied"), VARIANTS)
def test_complete_checkpoints_are_accepted(tmp_path: Path, architecture: str, tied: bool, num_shards: int) -> None:
    config = tiny_config(architecture, tie_word_embeddings=tied)
    folder = write_folder(tmp_path, config, random_tensors(config), num_shards)
    files = weight_files(folder)
    assert len(files) == num_shards
    check_checkpoint(files, config, source="it")


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    config = tiny_config("qwen2")
    tensors = random_tensors(config)
    bias = "model.layers.0.self_attn.k_proj.bias"

    def refusal(name: str, changed: dict[str, np.ndarray]) -> str:
        with pytest.raises(StartupError) as refused:
            check_checkpoint(weight_files(write_folder(tmp_path / name, config, changed)), config, source=name)
        return str(refused.value)

    assert bias in refusal("lacking", {name: array for name, array in tensors.items() if name != bias})
    assert "model.extra.weight" in refusal("extra", tensors | {"model.extra.weight": np.zeros(3)})
    assert "[5], expected [16]" in refusal("misshapen", tensors | {bias: np.zeros(5, dtype=np.float32)})


def test_copies_of_what_is_known_are_ignored(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = random_tensors(config)
    tensors[LM_HEAD] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, dtype=np.float32)
    check_checkpoint(weight_files(write_folder(tmp_path, config, tensors)), config, source="it")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_folder(tmp_path, config, random_tensors(config), num_shards=2)
    save_file(random_tensors(config), folder / "model-00002-of-00002.safetensors")
    with pytest.raises(StartupError, match="twice"):
        check_checkpoint(weight_files(folder), config, source="it")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_folder(tmp_path, config, random_tensors(config), num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(StartupError, match="model-00002-of-00003"):
        weight_files(folder)


def test_an_index_cannot_point_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").touch()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(StartupError, match="secret"):
        weight_files(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(StartupError, match=INDEX):
        weight_files(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(StartupError, match=r"pytorch_model\.bin.*never loaded"):
        weight_files(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no weights"):
        weight_files(tmp_path)
