"""A checkpoint folder in Hugging Face's layout: its config, its safetensors files, and that they belong together.

Pickled weights (`.bin`, `.pt`) are never opened: reading them can run code. Tensors are not read here, only the files'
heads.
"""

from pathlib import Path

from onward.errors import StartupError
from onward.models import tensor_names
from onward.models.families.registry import is_ignored, tensor_sources
from onward.models.loader.bounded_read import read_json
from onward.models.loader.safetensors_header import read_header
from onward.proto.model import ModelConfig

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files in the order of their names, all of which exist."""
    if (folder / _INDEX).exists():
        return _indexed_files(folder)
    files = [folder / _SINGLE] if (folder / _SINGLE).exists() else sorted(folder.glob("*.safetensors"))
    if files:
        return files
    if pickled := [path.name for pattern in _PICKLED for path in folder.glob(pattern)]:
        raise StartupError(
            f"{folder} has pickled weights only ({pickled[0]}), which are never loaded; convert them to safetensors"
        )
    raise StartupError(f"{folder} has no weights: no {_SINGLE} and no {_INDEX}")


def _indexed_files(folder: Path) -> list[Path]:
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{folder / _INDEX} is not valid: it has no `weight_map`")
    files = sorted({str(name) for name in weight_map.values()})
    for name in files:
        if name != Path(name).name or not name.endswith(".safetensors"):
            raise StartupError(f"{folder / _INDEX} is not valid: {name!r} is not a safetensors file of the folder")
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise StartupError(f"{folder} lacks {', '.join(missing)}, which {_INDEX} names")
    return [folder / name for name in files]


def check_checkpoint(files: list[Path], config: ModelConfig, source: str) -> None:
    """Raises unless the files together hold exactly the model's tensors."""
    shapes: dict[str, tensor_names.Shape] = {}
    for path in files:
        for name, location in read_header(path).items():
            if name in shapes:
                raise StartupError(f"{source} has the tensor {name} twice")
            shapes[name] = location.shape
    counted = {name: shape for name, shape in shapes.items() if not is_ignored(name, config)}
    expected = {stored.name: stored.shape for stored in tensor_sources(config, shapes).values()}
    tensor_names.check_tensors(counted, expected, source)
