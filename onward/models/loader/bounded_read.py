"""Reads small files of a model (configs, templates, tokenizers) whole, within limits on their size.

A model's files are untrusted data: a file that is too large, too deeply nested or not text is refused by its name,
before it takes memory.
"""

from pathlib import Path
from typing import Any

import msgspec

from onward.errors import StartupError

MAX_JSON_BYTES = 64 << 20
"""The index of a model with a hundred thousand tensors has 10 MB."""
MAX_TOKENIZER_BYTES = 256 << 20
MAX_TEMPLATE_BYTES = 1 << 20


def read_bytes(path: Path, max_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)  # a size that is asked for first is wrong for a pipe or a device
    except OSError as fault:
        raise StartupError(f"cannot read {path}: {fault.strerror}") from None
    if len(data) > max_bytes:
        raise StartupError(f"{path} is larger than {max_bytes} bytes, the limit for such a file")
    return data


def read_text(path: Path, max_bytes: int) -> str:
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as fault:
        raise StartupError(f"{path} is not valid UTF-8: {fault.reason} at byte {fault.start}") from None


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    try:
        return msgspec.json.decode(read_bytes(path, max_bytes), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise StartupError(f"{path} is not valid: {fault}") from None
    except RecursionError:
        raise StartupError(f"{path} is not valid: it is nested too deeply") from None
