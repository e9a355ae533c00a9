"""The id of a tool call: a function of the request, so that a resumed stream has the same ones."""

import hashlib
import string
from typing import Literal

IdStyle = Literal["openai", "anthropic", "mistral"]
"""Mistral's templates refuse ids that are not nine letters and digits."""

_LENGTHS: dict[IdStyle, int] = {"openai": 24, "anthropic": 24, "mistral": 9}
_PREFIXES: dict[IdStyle, str] = {"openai": "call_", "anthropic": "toolu_", "mistral": ""}
_CHARACTERS = string.ascii_letters + string.digits


def tool_call_id(request_id: str, choice: int, index: int, style: IdStyle = "openai") -> str:
    """Returns the id of a tool call in this style, the same one whenever it is called with the same arguments. `index`
    counts the calls of one choice."""
    digest = hashlib.blake2b(f"{request_id}/{choice}/{index}".encode(), digest_size=24).digest()
    number, characters = int.from_bytes(digest, "big"), []
    for _ in range(_LENGTHS[style]):
        number, digit = divmod(number, len(_CHARACTERS))
        characters.append(_CHARACTERS[digit])
    return _PREFIXES[style] + "".join(characters)
