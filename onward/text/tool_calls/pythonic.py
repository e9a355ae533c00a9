"""Llama 4 and some of Llama 3.2: a list of Python calls, each with named arguments that are literals.

    [get_weather(city="Paris", days=3), get_time()]

A call is told when its closing bracket has come, with its arguments turned into JSON. Only at the beginning of a text,
or behind the tag.
"""

import json
import re
from typing import Any

from onward.text.message_events import Content
from onward.text.piecewise import END, Piecewise, Steps
from onward.text.tool_calls.calls import NAME_CHARACTERS, Calls

TAG, TAG_END = "<|python_start|>", "<|python_end|>"
MARKS = (TAG, TAG_END)
MAX_DEPTH = 32

_WORD = re.compile(r"[A-Za-z_0-9.+-]+")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_PLAIN = re.compile(r"[^'\"\\\n]+")
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_HEX_LENGTHS = {"x": 2, "u": 4}
_HEX = frozenset("0123456789abcdefABCDEF")


class _NoLiteral(Exception):
    """What comes is not a literal that JSON can say."""


def read(calls: Calls) -> Steps[None]:
    source = calls.source
    yield from source.blanks()
    begins = (yield from source.peek()) == "[" or (yield from source.one_of((TAG,))) is not None
    while True:
        if not begins:
            calls.words()
            if not (yield from source.until(TAG, Content)):
                return
        begins = (yield from _read_list(calls)) and (yield from _next_begins(calls))


def _next_begins(calls: Calls) -> Steps[bool]:
    source = calls.source
    yield from calls.blanks_behind()
    mark = yield from source.one_of(MARKS)
    if mark == TAG_END:
        yield from calls.blanks_behind()
        mark = yield from source.one_of((TAG,))
    return mark is not None


def _read_list(calls: Calls) -> Steps[bool]:
    source = calls.source
    yield from source.blanks()
    if not (yield from source.take_if("[")):
        return False
    yield from source.blanks()
    while (yield from _read_call(calls)):
        yield from source.blanks()
        if (yield from source.take_if("]")):
            return True
        if not (yield from source.take_if(",")):
            return False
        yield from source.blanks()
    return False


def _read_call(calls: Calls) -> Steps[bool]:
    source = calls.source
    name = yield from source.run(NAME_CHARACTERS)
    if not calls.accepts(name) or not (yield from source.take_if("(")):
        return False
    try:
        arguments = yield from _read_arguments(source)
    except _NoLiteral:
        return False
    calls.tell_whole(name, json.dumps(arguments, ensure_ascii=False))
    return True


def _read_arguments(source: Piecewise) -> Steps[dict[str, Any]]:
    arguments: dict[str, Any] = {}
    yield from source.blanks()
    while not (yield from source.take_if(")")):
        name = yield from source.run(_WORD)
        yield from source.blanks()
        if not name.isidentifier() or name in arguments:
            raise _NoLiteral
        yield from _expect(source, "=")
        arguments[name] = yield from _read_literal(source, 0)
        yield from _read_comma(source, ")")
    return arguments


def _read_literal(source: Piecewise, depth: int) -> Steps[Any]:
    if depth >= MAX_DEPTH:
        raise _NoLiteral
    yield from source.blanks()
    seen = yield from source.peek()
    if seen == "[":
        return (yield from _read_items(source, depth))
    if seen == "{":
        return (yield from _read_members(source, depth))
    if seen in ("'", '"'):
        return (yield from _read_string(source))
    return _constant((yield from source.run(_WORD)))


def _constant(word: str) -> Any:
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if not word.isascii() or _NUMBER.fullmatch(word) is None:
        raise _NoLiteral
    try:
        number = int(word) if word.lstrip("+-").isdigit() else float(word)
    except ValueError:  # more digits than Python converts
        raise _NoLiteral from None
    if number in (float("inf"), float("-inf")):
        raise _NoLiteral
    return number


def _read_items(source: Piecewise, depth: int) -> Steps[list[Any]]:
    items: list[Any] = []
    source.take()
    yield from source.blanks()
    while not (yield from source.take_if("]")):
        items.append((yield from _read_literal(source, depth + 1)))
        yield from _read_comma(source, "]")
    return items


def _read_members(source: Piecewise, depth: int) -> Steps[dict[str, Any]]:
    members: dict[str, Any] = {}
    source.take()
    yield from source.blanks()
    while not (yield from source.take_if("}")):
        key = yield from _read_literal(source, depth + 1)
        if not isinstance(key, str):
            raise _NoLiteral
        yield from source.blanks()
        yield from _expect(source, ":")
        members[key] = yield from _read_literal(source, depth + 1)
        yield from _read_comma(source, "}")
    return members


def _read_comma(source: Piecewise, closing: str) -> Steps[None]:
    yield from source.blanks()
    if (yield from source.peek()) != closing:
        yield from _expect(source, ",")
        yield from source.blanks()


def _expect(source: Piecewise, character: str) -> Steps[None]:
    if not (yield from source.take_if(character)):
        raise _NoLiteral


def _read_string(source: Piecewise) -> Steps[str]:
    quote = yield from source.peek()
    source.take()
    parts: list[str] = []
    while not (yield from source.take_if(quote)):
        seen = yield from source.peek()
        if seen in (END, "\n"):
            raise _NoLiteral
        if seen == "\\":
            source.take()
            parts.append((yield from _read_escape(source)))
        elif seen in ("'", '"'):
            source.take()
            parts.append(seen)
        else:
            parts.append((yield from source.run(_PLAIN)))
    text = "".join(parts)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _NoLiteral
    return text


def _read_escape(source: Piecewise) -> Steps[str]:
    kind = yield from source.peek()
    if kind == END:
        raise _NoLiteral
    source.take()
    if kind not in _HEX_LENGTHS:
        return _ESCAPES.get(kind, "\\" + kind)  # as Python has it
    digits = ""
    for _ in range(_HEX_LENGTHS[kind]):
        seen = yield from source.peek()
        if seen not in _HEX:
            raise _NoLiteral
        source.take()
        digits += seen
    return chr(int(digits, 16))
