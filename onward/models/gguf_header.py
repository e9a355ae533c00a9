"""The head of a GGUF file: metadata as plain Python values, and where each tensor lies.

The `gguf` package has a reader too. It builds an array object per value (seconds for a vocabulary) and does not check
lengths, so a damaged count can keep it busy forever. Here no length is believed before it is held against the file's
size. What the tensors' bytes mean is not known here.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.errors import StartupError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_NESTING = 4
_SMALLEST_FIELD_BYTES = 8 + 4 + 1
_SMALLEST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    """Slowest dimension first, as everywhere but in GGUF."""
    type_id: int
    offset: int
    """From the beginning of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Damaged(Exception):
    pass


def read_header(path: Path) -> GgufHeader:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data))
    except (_Damaged, UnicodeDecodeError) as fault:
        raise StartupError(f"{path} is not a usable GGUF file: {fault}") from None
    except (OSError, ValueError) as fault:
        raise StartupError(f"cannot read {path}: {fault}") from None


class _Cursor:
    """Reads on through the file, never past its end."""

    __slots__ = ("data", "offset", "size")

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.size, self.offset = data, len(data), 0

    def take(self, num_bytes: int) -> bytes:
        end = self.offset + num_bytes
        if end > self.size:
            raise _Damaged(f"it ends at byte {self.size}, but byte {end} is needed")
        piece = self.data[self.offset : end]
        self.offset = end
        return piece

    def scalar(self, code: str) -> Any:
        code = "<" + code
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return str(self.take(self.scalar("Q")), "utf-8")

    def count(self, smallest_bytes: int, what: str) -> int:
        """A number of things still to come, each of at least so many bytes."""
        count = self.scalar("Q")
        if count * smallest_bytes > self.size - self.offset:
            raise _Damaged(f"it claims {count} {what}, more than the file can hold")
        return count

    def value(self, type_id: int, nesting: int = 0) -> Any:
        if (code := _SCALARS.get(type_id)) is not None:
            return self.scalar(code)
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY and nesting < _MAX_NESTING:
            return self.array(nesting + 1)
        raise _Damaged(f"a metadata value has the unknown type {type_id}")

    def array(self, nesting: int) -> list[Any]:
        type_id = self.scalar("I")
        if (code := _SCALARS.get(type_id)) is not None:
            count = self.count(struct.calcsize("<" + code), "array elements")
            layout = f"<{count}{code}"
            return list(struct.unpack(layout, self.take(struct.calcsize(layout))))
        count = self.count(8, "array elements")
        return [self.value(type_id, nesting) for _ in range(count)]


def _parse(cursor: _Cursor) -> GgufHeader:
    if cursor.take(4) != b"GGUF":
        raise _Damaged("it does not begin with the letters GGUF")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise _Damaged(
            f"its format version is {version}, and only little-endian files of version 2 and 3 are supported"
        )
    num_tensors = cursor.count(_SMALLEST_TENSOR_BYTES, "tensors")
    num_fields = cursor.count(_SMALLEST_FIELD_BYTES, "metadata fields")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        if key in metadata:
            raise _Damaged(f"the metadata field {key} occurs twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    return GgufHeader(metadata, _placed(infos, metadata, cursor))


def _tensor_info(cursor: _Cursor) -> TensorInfo:
    name, num_dims = cursor.string(), cursor.scalar("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise _Damaged(f"the tensor {name} has {num_dims} dimensions")
    dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims))
    if 0 in dims:
        raise _Damaged(f"the tensor {name} is empty")
    return TensorInfo(name, dims[::-1], type_id=cursor.scalar("I"), offset=cursor.scalar("Q"))


def _placed(infos: list[TensorInfo], metadata: dict[str, Any], cursor: _Cursor) -> dict[str, TensorInfo]:
    """Offsets in the file are counted from the end of the head, rounded up to the alignment."""
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise _Damaged(f"general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for info in infos:
        if info.name in tensors:
            raise _Damaged(f"the tensor {info.name} occurs twice")
        tensors[info.name] = TensorInfo(info.name, info.shape, info.type_id, start + info.offset)
    return tensors
