"""The id of a tool call: a function of the request, so that a stream which is carried on has the same ones."""

import hashlib
import string
from typing import Literal

IdStyle = Literal["openai", "mistral"]
"""Mistral's templates refuse ids that are not nine letters and digits."""

_LENGTHS: dict[IdStyle, int] = {"openai": 24, "mistral": 9}
_PREFIXES: dict[IdStyle, str] = {"openai": "call_", "mistral": ""}
_CHARACTERS = string.ascii_letters + string.digits


def tool_call_id(request_id: str, choice: int, index: int, style: IdStyle = "openai") -> str:
    """`index` counts the calls of one choice."""
    digest = hashlib.blake2b(f"{request_id}/{choice}/{index}".encode(), digest_size=24).digest()
    number, characters = int.from_bytes(digest, "big"), []
    for _ in range(_LENGTHS[style]):
        number, digit = divmod(number, len(_CHARACTERS))
        characters.append(_CHARACTERS[digit])
    return _PREFIXES[style] + "".join(characters)
