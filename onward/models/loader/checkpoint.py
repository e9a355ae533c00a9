"""A checkpoint folder in Hugging Face's layout: finds its safetensors files, and checks that they fit its config.

Pickled weights (`.bin`, `.pt`) are never opened, because reading them can run code. Only the headers of files are read
here, no tensors.
"""

from pathlib import Path

from onward.errors import StartupError
from onward.models import tensor_names
from onward.models.checkpoint_quantization import CheckpointScheme
from onward.models.families.registry import is_ignored, tensor_sources
from onward.models.loader.bounded_read import read_json
from onward.models.loader.quantized_layout import is_part, logical_shapes
from onward.models.loader.safetensors_header import FLOAT_TYPES, TensorLocation, read_header
from onward.proto.model import ModelConfig

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOAT8 = "F8_E4M3"
_PACKED_TYPES = ("U8",)
"""Types of tensors that a family converts to floats itself, such as the blocks and scales of MXFP4."""
_PICKLED = ("*.bin", "*.pt", "*.pth")


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files in the order of their names. Raises `StartupError` if one is missing."""
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
        raise StartupError(
            f"{folder} lacks {', '.join(missing)}, which {_INDEX} names; fetch the rest of the checkpoint"
        )
    return [folder / name for name in files]


def check_checkpoint(
    files: list[Path], config: ModelConfig, source: str, scheme: CheckpointScheme | None = None
) -> None:
    """Raises unless the files together have exactly the model's tensors, as floats or quantized by the scheme."""
    stored: dict[str, TensorLocation] = {}
    for path in files:
        for name, location in read_header(path).items():
            if name in stored:
                raise StartupError(f"{source} has the tensor {name} twice")
            if scheme is None and location.dtype == _FLOAT8:
                raise StartupError(f"{source}: {name} is stored in fp8, but config.json has no quantization_config")
            stored[name] = location
    if scheme is None:
        shapes = {name: location.shape for name, location in stored.items()}
    else:
        shapes = logical_shapes(stored, scheme)
    counted = {name: shape for name, shape in shapes.items() if not is_ignored(name, config)}
    expected: dict[str, tensor_names.Shape] = {}
    packed: set[str] = set()
    for found in tensor_sources(config, shapes).values():
        expected |= {found.name: found.shape, **dict(found.others)}
        if found.others:
            packed |= {found.name, *dict(found.others)}
    tensor_names.check_tensors(counted, expected, source)
    for name in expected:
        if name in stored and (scheme is None or not is_part(name, stored, scheme)):
            check_type(stored[name], name, _PACKED_TYPES if name in packed else FLOAT_TYPES)


def check_type(location: TensorLocation, name: str, types: tuple[str, ...]) -> None:
    """Raises `StartupError`, which names the file and the tensor, unless the tensor has one of the types."""
    if location.dtype not in types:
        raise StartupError(f"{location.path}: {name} has the type {location.dtype}, expected {' or '.join(types)}")
