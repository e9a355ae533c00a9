"""What an operator sees who starts the server on a file made to do harm: one line, at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.checkpoints import random_tensors, tiny_config, write_folder


def _lying_gguf(folder: Path) -> tuple[str, str]:
    path = folder / "model.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + (3).to_bytes(4, "little") + (1 << 30).to_bytes(8, "little") + bytes(8))
        file.truncate(1 << 40)
    return str(path), "claims 1073741824 tensors"


def _overlapping_safetensors(folder: Path) -> tuple[str, str]:
    config = tiny_config()
    path = write_folder(folder / "model", config, random_tensors(config)) / "model.safetensors"
    path.write_bytes(path.read_bytes() + bytes(8))
    return str(path.parent), "8 bytes behind the last tensor"


@pytest.mark.parametrize("command", ["warm", "serve"])
@pytest.mark.parametrize("write", [_lying_gguf, _overlapping_safetensors])
def test_a_file_made_to_do_harm_is_refused_in_one_line(tmp_path: Path, command: str, write: object) -> None:
    assert callable(write)
    model, reason = write(tmp_path)
    line = [sys.executable, "-m", "onward.cli.main", command, "--model", model]
    line += ["--quantization", "none"] if command == "serve" else []
    ended = subprocess.run(
        line, capture_output=True, text=True, timeout=60, env=os.environ | {"ONWARD_CACHE": str(tmp_path / "cache")}
    )
    assert ended.returncode == 1
    assert reason in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len([text for text in ended.stderr.splitlines() if "model" in text]) == 1, ended.stderr
