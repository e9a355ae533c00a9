"""Reads the header of a GGUF file: metadata as plain Python values, and the location of each tensor.

The `gguf` package has a reader too. It builds an array object per value (seconds for a vocabulary) and does not check
lengths, so a damaged count can keep it busy forever. Here each length is checked against the file's size before it is
used. It is also checked against a fixed bound, because a file can have any size without having content. This module
does not interpret the bytes of tensors.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.errors import StartupError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LFS_POINTER = b"vers"
_MAX_DIMS = 4
_MAX_NESTING = 4
_MAX_TENSORS = 1 << 18
_MAX_FIELDS = 1 << 16
_MAX_VALUES = 1 << 23
"""Bound for all metadata arrays together. A vocabulary of a million tokens with types, scores and merges has half of
it."""
_MAX_STRING_BYTES = 64 << 20
"""Some files have a whole `tokenizer.json` in one field."""
_MAX_NAME_BYTES = 256
_MAX_HEAD_BYTES = 1 << 30
_MAX_DIM = 1 << 48
_MAX_ALIGNMENT = 1 << 16
_SMALLEST_FIELD_BYTES = 8 + 4 + 1
_SMALLEST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as everywhere but in GGUF."""
    type_id: int
    offset: int
    """Byte offset from the beginning of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _InvalidHeader(Exception):
    pass


def read_header(path: Path) -> GgufHeader:
    try:
        if path.stat().st_size == 0:
            raise _InvalidHeader("it is empty")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data))
    except _InvalidHeader as fault:
        raise StartupError(f"{path} is not a usable GGUF file: {fault}") from None
    except (OSError, ValueError) as fault:
        raise StartupError(f"cannot read {path}: {fault}") from None


class _Cursor:
    """Reads the file in order, never past its end. `field` is the field that is being read, for error messages."""

    __slots__ = ("data", "field", "num_values", "offset", "size")

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.size, self.offset, self.num_values, self.field = data, len(data), 0, 0, "its head"

    def take(self, num_bytes: int) -> bytes:
        end = self.offset + num_bytes
        if end > self.size:
            raise _InvalidHeader(f"it ends at byte {self.size}, but {self.field} needs byte {end}")
        if end > _MAX_HEAD_BYTES:
            raise _InvalidHeader(f"its head is larger than {_MAX_HEAD_BYTES} bytes, at {self.field}")
        piece = self.data[self.offset : end]
        self.offset = end
        return piece

    def scalar(self, code: str) -> Any:
        code = "<" + code
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self, max_bytes: int = _MAX_STRING_BYTES) -> str:
        length = self.scalar("Q")
        if length > max_bytes:
            raise _InvalidHeader(f"{self.field} has a text of {length} bytes, more than {max_bytes}")
        try:
            return str(self.take(length), "utf-8")
        except UnicodeDecodeError as fault:
            raise _InvalidHeader(f"{self.field} is not valid UTF-8: {fault.reason}") from None

    def name(self, kind: str) -> str:
        """Reads a name, which must be short and printable because names appear in messages and logs."""
        name = self.string(_MAX_NAME_BYTES)
        if not name.isprintable():
            raise _InvalidHeader(f"{kind} has the impossible name {name!a}")
        self.field = f"{kind} {name}"
        return name

    def count(self, smallest_bytes: int, kind: str, max_count: int) -> int:
        """Reads the number of items that follow, each of at least `smallest_bytes`."""
        count = self.scalar("Q")
        if count * smallest_bytes > self.size - self.offset:
            raise _InvalidHeader(f"{self.field} claims {count} {kind}, more than the file can hold")
        if count > max_count:
            raise _InvalidHeader(f"{self.field} claims {count} {kind}, more than {max_count}")
        return count

    def num_elements(self, smallest_bytes: int) -> int:
        count = self.count(smallest_bytes, "array elements", _MAX_VALUES - self.num_values)
        self.num_values += count
        return count

    def value(self, type_id: int, nesting: int = 0) -> Any:
        if (code := _SCALARS.get(type_id)) is not None:
            return self.scalar(code)
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY and nesting < _MAX_NESTING:
            return self.array(nesting + 1)
        raise _InvalidHeader(f"{self.field} has the unknown type {type_id}")

    def array(self, nesting: int) -> list[Any]:
        type_id = self.scalar("I")
        if (code := _SCALARS.get(type_id)) is not None:
            count = self.num_elements(struct.calcsize("<" + code))
            layout = f"<{count}{code}"
            return list(struct.unpack(layout, self.take(struct.calcsize(layout))))
        count = self.num_elements(8)
        return [self.value(type_id, nesting) for _ in range(count)]


def _parse(cursor: _Cursor) -> GgufHeader:
    beginning = cursor.take(4)
    if beginning == _LFS_POINTER:
        raise _InvalidHeader("it is a pointer of Git LFS; fetch the file itself with `git lfs pull`")
    if beginning != b"GGUF":
        raise _InvalidHeader("it does not begin with the letters GGUF")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise _InvalidHeader(
            f"its format version is {version}, and only little-endian files of version 2 and 3 are supported"
        )
    num_tensors = cursor.count(_SMALLEST_TENSOR_BYTES, "tensors", _MAX_TENSORS)
    num_fields = cursor.count(_SMALLEST_FIELD_BYTES, "metadata fields", _MAX_FIELDS)
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.name("the metadata field")
        if key in metadata:
            raise _InvalidHeader(f"the metadata field {key} occurs twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    return GgufHeader(metadata, _with_file_offsets(infos, metadata, cursor))


def _tensor_info(cursor: _Cursor) -> TensorInfo:
    name, num_dims = cursor.name("the tensor"), cursor.scalar("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise _InvalidHeader(f"the tensor {name} has {num_dims} dimensions")
    dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims))
    if not all(0 < dim <= _MAX_DIM for dim in dims):
        raise _InvalidHeader(f"the tensor {name} has the impossible shape {list(dims[::-1])}")
    return TensorInfo(name, dims[::-1], type_id=cursor.scalar("I"), offset=cursor.scalar("Q"))


def _with_file_offsets(infos: list[TensorInfo], metadata: dict[str, Any], cursor: _Cursor) -> dict[str, TensorInfo]:
    """Returns the tensors with offsets from the beginning of the file. Stored offsets count from the end of the header,
    rounded up to the alignment."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise _InvalidHeader(f"general.alignment is {str(alignment)[:40]}, not a power of two up to {_MAX_ALIGNMENT}")
    start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in tensors:
            raise _InvalidHeader(f"the tensor {info.name} occurs twice")
        if start + info.offset >= cursor.size:
            raise _InvalidHeader(f"the tensor {info.name} begins beyond the end of the file, which may be cut short")
        tensors[info.name] = TensorInfo(info.name, info.shape, info.type_id, start + info.offset)
    return tensors
