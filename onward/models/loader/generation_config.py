"""Reads the sampling defaults of a checkpoint's `generation_config.json`, for requests that do not set these fields.

`text_metadata` reads its end tokens. `do_sample` is ignored, because a request's temperature decides whether to sample.
"""

from pathlib import Path
from typing import Any

from onward.errors import StartupError
from onward.models.loader.bounded_read import read_json
from onward.proto.model import SamplingDefaults

FILE = "generation_config.json"
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0, 10),
}
_ABOVE_ZERO = ("top_p", "repetition_penalty")


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    path = folder / FILE
    values = read_json(path) if path.is_file() else {}
    return SamplingDefaults(**{name: _checked(path, name, values.get(name)) for name in _RANGES})


def _checked(path: Path, name: str, value: Any) -> Any:
    if value is None:
        return None
    low, high = _RANGES[name]
    kinds = int if name == "top_k" else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (value == 0 and name in _ABOVE_ZERO):
        raise StartupError(
            f"{path}: {name}: must be a number between {low} and {high}, not {str(value)[:80]}; "
            "--generation-config none does without"
        )
    return value
