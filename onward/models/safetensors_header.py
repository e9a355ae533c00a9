"""The head of a safetensors file: which tensors it holds, and where. Light enough for a start without numpy."""

import math
import os
from pathlib import Path

import msgspec

from onward.errors import StartupError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip

_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


class TensorPlace(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Byte of the file at which the tensor begins."""
    end: int


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, TensorPlace]:
    """Raises if the file is cut short or its head does not describe it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise StartupError(f"{path} is not a usable safetensors file: its head does not fit into it")
            raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    except OSError as fault:
        raise StartupError(f"cannot read {path}: {fault.strerror}") from None
    except msgspec.DecodeError as fault:
        raise StartupError(f"{path} is not a usable safetensors file: {fault}") from None
    raw.pop("__metadata__", None)
    return {name: _place(path, name, entry, start=8 + length, size=size) for name, entry in raw.items()}


def _place(path: Path, name: str, raw: msgspec.Raw, start: int, size: int) -> TensorPlace:
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except msgspec.ValidationError as fault:
        raise StartupError(f"{path} is not a usable safetensors file: {name}: {fault}") from None
    if entry.dtype not in ITEM_BYTES:
        raise StartupError(f"{path}: {name} has the type {entry.dtype}, which is not supported")
    begin, end = entry.data_offsets
    if begin < 0 or end - begin != math.prod(entry.shape) * ITEM_BYTES[entry.dtype]:
        raise StartupError(f"{path} is not a usable safetensors file: the place of {name} does not fit its shape")
    if start + end > size:
        raise StartupError(f"{path} is cut short: {name} lies beyond its end")
    return TensorPlace(entry.dtype, entry.shape, start + begin, start + end)
