"""Reads the header of a safetensors file: its tensors and their locations. Needs no numpy, which keeps a start light.

Every value of the header is checked against the file before it is used: an impossible count, size or location is
refused by the tensor's name. The tensors must be contiguous from the end of the header to the end of the file, as the
format requires.
"""

import math
import os
from pathlib import Path
from typing import Annotated

import msgspec

from onward.errors import StartupError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1,
}  # fmt: skip
FLOAT_TYPES = ("F16", "BF16", "F32", "F64")
"""Types of tensors whose values are used as they are stored."""

_LFS_POINTER = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_MAX_TENSORS = 1 << 18
_MAX_NAME_CHARS = 512
_MAX_DIMS = 8
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class TensorLocation(msgspec.Struct, frozen=True):
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Byte of the file at which the tensor begins."""
    end: int


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Size, _Size]


def read_header(path: Path) -> dict[str, TensorLocation]:
    """Returns the tensors by name. Raises `StartupError` if the file is cut short or its header does not describe
    it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            beginning = file.read(8)
            if not beginning:
                raise _unusable(path, "it is empty")
            if _LFS_POINTER.startswith(beginning):
                raise _unusable(path, "it is a pointer of Git LFS; fetch the file itself with `git lfs pull`")
            length = int.from_bytes(beginning, "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise _unusable(path, f"its head of {length} bytes does not fit into it")
            raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    except OSError as fault:
        raise StartupError(f"cannot read {path}: {fault.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise _unusable(path, str(fault)) from None
    except RecursionError:
        raise _unusable(path, "its head is nested too deeply") from None
    raw.pop("__metadata__", None)
    if len(raw) > _MAX_TENSORS:
        raise _unusable(path, f"it claims {len(raw)} tensors, more than {_MAX_TENSORS}")
    locations = {name: _location(path, name, entry, start=8 + length, size=size) for name, entry in raw.items()}
    _check_contiguous(path, locations, start=8 + length, size=size)
    return locations


def _location(path: Path, name: str, raw: msgspec.Raw, start: int, size: int) -> TensorLocation:
    if len(name) > _MAX_NAME_CHARS or not name.isprintable():
        raise _unusable(path, f"it has a tensor with the impossible name {name[:80]!a}")
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise _unusable(path, f"{name}: {fault}") from None
    if entry.dtype not in ITEM_BYTES:
        raise StartupError(f"{path}: {name} has the type {entry.dtype[:40]!a}, which is not supported")
    begin, end = entry.data_offsets
    if end - begin != math.prod(entry.shape) * ITEM_BYTES[entry.dtype]:
        raise _unusable(path, f"the location of {name} does not fit its shape")
    if start + end > size:
        raise StartupError(f"{path} is cut short: {name} lies beyond its end")
    return TensorLocation(path, entry.dtype, entry.shape, start + begin, start + end)


def _check_contiguous(path: Path, locations: dict[str, TensorLocation], start: int, size: int) -> None:
    """Raises if tensors overlap or have gaps. With an overlap, two tensors would share bytes; a gap could contain data
    that nothing has checked."""
    end = start
    for name, location in sorted(locations.items(), key=lambda item: (item[1].begin, item[1].end)):
        if location.begin != end:
            raise _unusable(
                path, f"{name} {'overlaps another tensor' if location.begin < end else 'lies behind a gap'}"
            )
        end = location.end
    if end != size:
        raise _unusable(path, f"{size - end} bytes behind the last tensor belong to none")


def _unusable(path: Path, fault: str) -> StartupError:
    return StartupError(f"{path} is not a usable safetensors file: {fault}")
