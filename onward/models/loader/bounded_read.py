"""Small files of a model (configs, templates, tokenizers), read whole but never larger than such a file can be.

A model's files are data from strangers: what is too large, too deep or not text is refused by the file's name, before it
takes memory.
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
            data = file.read(max_bytes + 1)  # asking for the size first would believe a pipe or a device
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
