import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from onward.errors import StartupError
from onward.models.loader.model_store import prepare
from onward.models.loader.safetensors_file import write_file
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


def half_outputs(array: np.ndarray) -> np.ndarray:
    return array[: len(array) // 2]


def half_inputs(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array[:, : array.shape[1] // 2])


def other_type(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float16)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("layers.1.down", half_outputs),
        ("layers.1.down", half_inputs),
        ("layers.0.qkv", half_outputs),
        ("layers.0.gate_up", np.ravel),
        ("layers.0.input_norm", half_outputs),
        ("norm", other_type),
        ("embed", half_outputs),
        ("embed", lambda array: array[..., 1:]),
    ],
)
def test_an_int8_array_of_another_size_is_refused_by_file_and_name(
    tmp_path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    """The kernels trust the config: they would read beyond the end of a smaller array."""
    config = tiny_config(hidden_size=64, intermediate_size=128, head_dim=32)
    folder = write_folder(tmp_path / "m", config, random_tensors(config))
    model = prepare(str(folder), quantization="int8", cache_dir=tmp_path / "cache")
    file = Path(model.folder) / model.weights[0]
    arrays = {key: np.array(array) for key, array in open_weights(model).items()}
    write_file(file, arrays | {name: np.ascontiguousarray(change(arrays[name]))})
    with pytest.raises(StartupError, match=rf"{file}: {name} is .*expected"):
        open_weights(model)
    del arrays[name]
    write_file(file, arrays)
    with pytest.raises(StartupError, match=f"lacks the array {name};"):
        open_weights(model)


def test_an_int8_embedding_in_two_arrays_is_refused(tmp_path: Path) -> None:
    """The kernels would read beyond the end of the first one."""
    config = tiny_config(hidden_size=64, intermediate_size=128, head_dim=32)
    folder = write_folder(tmp_path / "m", config, random_tensors(config))
    model = prepare(str(folder), quantization="int8", cache_dir=tmp_path / "cache")
    arrays = {key: np.array(array) for key, array in open_weights(model).items()}
    first, second = np.split(arrays["embed"], [2])
    write_file(Path(model.folder) / model.weights[0], arrays | {"embed": first, "embed.1": second})
    with pytest.raises(StartupError, match=f"embed is .*expected the packed weights of {config.vocab_size} outputs"):
        open_weights(model)


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
