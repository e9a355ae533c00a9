"""A model that is not what `--model` takes: one line says what is wrong and what to do, at a start and in the doctor."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from onward.cli.main import run
from tests.models.checkpoints import random_tensors, tiny_config, write_folder, write_gguf

CONFIG = tiny_config(hidden_size=64, intermediate_size=128, head_dim=32)
TENSORS = random_tensors(CONFIG)
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def checkpoint(folder: Path, num_shards: int = 1) -> Path:
    return write_folder(folder / "m", CONFIG, TENSORS, num_shards)


def without(name: str, num_shards: int = 1) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (checkpoint(folder, num_shards) / name).unlink()
        return folder / "m"

    return make


def with_content(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (checkpoint(folder) / name).write_bytes(content)
        return folder / "m"

    return make


def a_folder_of_other_files(folder: Path) -> Path:
    (folder / "notes.md").touch()
    return folder


def the_folder_above(folder: Path) -> Path:
    checkpoint(folder)
    return folder


def pickled_weights(folder: Path) -> Path:
    (checkpoint(folder) / "model.safetensors").rename(folder / "m" / "pytorch_model.bin")
    return folder / "m"


def an_adapter(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (folder / "adapter_model.safetensors").touch()
    return folder


def a_vision_model(folder: Path) -> Path:
    raw = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "vision_config": {}}
    (checkpoint(folder) / "config.json").write_text(json.dumps(raw))
    return folder / "m"


def a_file_of_the_folder(folder: Path) -> Path:
    return checkpoint(folder) / "model.safetensors"


def a_gguf_file(folder: Path) -> Path:
    return write_gguf(folder / "m.gguf", CONFIG, TENSORS)


def a_folder_with_a_gguf_file(folder: Path) -> Path:
    a_gguf_file(folder)
    return folder


def a_gguf_file_of_another_architecture(folder: Path) -> Path:
    writer = gguf.GGUFWriter(folder / "m.gguf", "mamba")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "m.gguf"


def half_a_gguf_file(folder: Path) -> Path:
    path = a_gguf_file(folder)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def half_a_safetensors_file(folder: Path) -> Path:
    path = checkpoint(folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return folder / "m"


def gguf_content(content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "m.gguf").write_bytes(content)
        return folder / "m.gguf"

    return make


MISTAKES: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "a folder of other files": (a_folder_of_other_files, "no config.json", "give the folder that has config.json"),
    "the folder above": (the_folder_above, "no config.json", "give {folder}/m"),
    "pickled weights": (pickled_weights, "pytorch_model.bin", "convert them to safetensors"),
    "a LoRA adapter": (an_adapter, "adapter (LoRA)", "merge it into its base model"),
    "a vision model": (a_vision_model, "Qwen2_5_VLForConditionalGeneration", "supported are LlamaForCausalLM"),
    "a file of the folder": (a_file_of_the_folder, "model.safetensors is a file", "give the folder"),
    "a folder with a GGUF file": (a_folder_with_a_gguf_file, "no config.json", "give the file itself, {folder}/m.gguf"),
    "a GGUF file of another architecture": (a_gguf_file_of_another_architecture, "'mamba'", "supported are llama"),
    "half a GGUF file": (half_a_gguf_file, "m.gguf", "may be cut short"),
    "an empty GGUF file": (gguf_content(b""), "m.gguf", "it is empty"),
    "a GGUF pointer of Git LFS": (gguf_content(LFS_POINTER), "m.gguf", "git lfs pull"),
    "no config": (without("config.json"), "no config.json", "give the folder that has config.json"),
    "no weights": (without("model.safetensors"), "has no weights", "no model.safetensors"),
    "a missing shard": (without("model-00002-of-00003.safetensors", 3), "model-00002-of-00003", "fetch the rest"),
    "half a shard": (half_a_safetensors_file, "model.safetensors", "is cut short"),
    "a pointer of Git LFS": (with_content("model.safetensors", LFS_POINTER), "model.safetensors", "git lfs pull"),
    "an empty weight file": (with_content("model.safetensors", b""), "model.safetensors", "it is empty"),
    "a broken config": (with_content("config.json", b"{"), "config.json", "is not valid"),
    "a broken tokenizer": (with_content("tokenizer.json", b"{}"), "tokenizer.json", "the tokenizer of"),
    "a path that does not exist": (lambda folder: folder / "nothing", "nothing does not exist", "a Hugging Face id"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    make, *expected = MISTAKES[mistake]
    model = make(tmp_path / "folder")
    words = [word.format(folder=tmp_path / "folder") for word in expected]
    assert run(["warm", "--model", str(model)]) == 1
    [line] = capsys.readouterr().err.strip().splitlines()
    assert not [word for word in words if word not in line], line
    assert run(["doctor", "--json", "--port", "0", "--model", str(model)]) == 1
    [problem] = [check for check in json.loads(capsys.readouterr().out)["checks"] if check["level"] == "problem"]
    assert not [word for word in words if word not in problem["message"]], problem
    assert not (tmp_path / "cache" / "models").exists()


def test_a_folder_without_a_tokenizer_is_served_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path / "cache"))
    assert run(["doctor", "--port", "0", "--model", str(checkpoint(tmp_path))]) == 0
    assert "requests can send token ids only" in capsys.readouterr().out
