import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from onward.models.loader.model_store import prepare
from onward.models.loader.weights import open_weights
from tests.models.checkpoints import random_tensors, tiny_config, write_folder

CONFIG = tiny_config()
TENSORS = random_tensors(CONFIG)


def test_bfloat16_comes_as_torch_tensors_over_the_mapped_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, TENSORS)
    narrow = {name: torch.from_numpy(array).to(torch.bfloat16) for name, array in TENSORS.items()}
    save_file(narrow, folder / "model.safetensors")
    weights = open_weights(prepare(str(folder), cache_dir=tmp_path / "cache"))
    for name, tensor in narrow.items():
        found = weights[name]
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, tensor)
    assert weights["model.norm.weight"].data_ptr() == weights["model.norm.weight"].data_ptr()  # pyright: ignore


def test_only_the_models_tensors_are_shown(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, TENSORS | {"lm_head.weight": np.zeros((48, 32), dtype=np.float32)})
    weights = open_weights(prepare(str(folder), cache_dir=tmp_path / "cache"))
    assert set(weights) == set(TENSORS)
    with pytest.raises(KeyError):
        weights["lm_head.weight"]


def test_quantized_names_are_shown_as_they_were_written(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, TENSORS)
    model = prepare(str(folder), cache_dir=tmp_path / "cache")
    np_save = {"model.norm.weight": TENSORS["model.norm.weight"], "a.weight.q": np.ones((2, 2), dtype=np.int8)}
    save_file({name: torch.from_numpy(array) for name, array in np_save.items()}, folder / "model.safetensors")
    weights = open_weights(msgspec.structs.replace(model, quantization="int8"))
    assert set(weights) == set(np_save)


def test_numpy_weights_are_opened_without_torch(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", CONFIG, TENSORS)
    cache = tmp_path / "cache"
    script = (
        "import sys; from pathlib import Path;"
        "from onward.models.loader.model_store import prepare; from onward.models.loader.weights import open_weights;"
        f"weights = open_weights(prepare({str(folder)!r}, cache_dir=Path({str(cache)!r})));"
        "print(sum(array.nbytes for array in weights.values()), 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == [str(sum(array.nbytes for array in TENSORS.values())), "False"]
