"""Text in the source of a grammar in Lark's form, as the library reads it."""

import json
from typing import Any

_DELETE = "\x7f"


def literal(text: str) -> str:
    """A string that stands for exactly this text."""
    return _without_delete(json.dumps(text, ensure_ascii=False))


def json_value(value: Any) -> str:
    """A value behind `%json`."""
    return _without_delete(json.dumps(value))


def _without_delete(source: str) -> str:
    # JSON lets U+007F stand as it is. The library's lexer takes it for no character of a string.
    return source.replace(_DELETE, "\\u007f")
