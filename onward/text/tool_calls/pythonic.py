"""Llama 4 and some of Llama 3.2: a list of Python calls, each with named arguments that are literals.

    [get_weather(city="Paris", days=3), get_time()]

A call is told when its closing bracket has come, with its arguments turned into JSON. Only at the beginning of a text,
or behind the tag.
"""

import json
import re
from typing import Any

from onward.text.incremental_parser import END, IncrementalParser, ParseSteps
from onward.text.message_events import ContentText
from onward.text.tool_calls.call_reader import NAME_CHARACTERS, ToolCallReader

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


class _NotALiteral(Exception):
    """What comes is not a literal that JSON can say."""


def read(calls: ToolCallReader) -> ParseSteps[None]:
    source = calls.parser
    yield from source.read_whitespace()
    begins = (yield from source.peek()) == "[" or (yield from source.read_one_of((TAG,))) is not None
    while True:
        if not begins:
            calls.emit_content()
            if not (yield from source.emit_until(TAG, ContentText)):
                return
        begins = (yield from _read_list(calls)) and (yield from _next_begins(calls))


def _next_begins(calls: ToolCallReader) -> ParseSteps[bool]:
    source = calls.parser
    yield from calls.read_trailing_whitespace()
    mark = yield from source.read_one_of(MARKS)
    if mark == TAG_END:
        yield from calls.read_trailing_whitespace()
        mark = yield from source.read_one_of((TAG,))
    return mark is not None


def _read_list(calls: ToolCallReader) -> ParseSteps[bool]:
    source = calls.parser
    yield from source.read_whitespace()
    if not (yield from source.consume_if("[")):
        return False
    yield from source.read_whitespace()
    while (yield from _read_call(calls)):
        yield from source.read_whitespace()
        if (yield from source.consume_if("]")):
            return True
        if not (yield from source.consume_if(",")):
            return False
        yield from source.read_whitespace()
    return False


def _read_call(calls: ToolCallReader) -> ParseSteps[bool]:
    source = calls.parser
    name = yield from source.read_run(NAME_CHARACTERS)
    if not calls.accepts(name) or not (yield from source.consume_if("(")):
        return False
    try:
        arguments = yield from _read_arguments(source)
    except _NotALiteral:
        return False
    calls.emit_call(name, json.dumps(arguments, ensure_ascii=False))
    return True


def _read_arguments(source: IncrementalParser) -> ParseSteps[dict[str, Any]]:
    arguments: dict[str, Any] = {}
    yield from source.read_whitespace()
    while not (yield from source.consume_if(")")):
        name = yield from source.read_run(_WORD)
        yield from source.read_whitespace()
        if not name.isidentifier() or name in arguments:
            raise _NotALiteral
        yield from _expect(source, "=")
        arguments[name] = yield from _read_literal(source, 0)
        yield from _read_comma(source, ")")
    return arguments


def _read_literal(source: IncrementalParser, depth: int) -> ParseSteps[Any]:
    if depth >= MAX_DEPTH:
        raise _NotALiteral
    yield from source.read_whitespace()
    seen = yield from source.peek()
    if seen == "[":
        return (yield from _read_items(source, depth))
    if seen == "{":
        return (yield from _read_members(source, depth))
    if seen in ("'", '"'):
        return (yield from _read_string(source))
    return _constant((yield from source.read_run(_WORD)))


def _constant(word: str) -> Any:
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if not word.isascii() or _NUMBER.fullmatch(word) is None:
        raise _NotALiteral
    try:
        number = int(word) if word.lstrip("+-").isdigit() else float(word)
    except ValueError:  # more digits than Python converts
        raise _NotALiteral from None
    if number in (float("inf"), float("-inf")):
        raise _NotALiteral
    return number


def _read_items(source: IncrementalParser, depth: int) -> ParseSteps[list[Any]]:
    items: list[Any] = []
    source.consume()
    yield from source.read_whitespace()
    while not (yield from source.consume_if("]")):
        items.append((yield from _read_literal(source, depth + 1)))
        yield from _read_comma(source, "]")
    return items


def _read_members(source: IncrementalParser, depth: int) -> ParseSteps[dict[str, Any]]:
    members: dict[str, Any] = {}
    source.consume()
    yield from source.read_whitespace()
    while not (yield from source.consume_if("}")):
        key = yield from _read_literal(source, depth + 1)
        if not isinstance(key, str):
            raise _NotALiteral
        yield from source.read_whitespace()
        yield from _expect(source, ":")
        members[key] = yield from _read_literal(source, depth + 1)
        yield from _read_comma(source, "}")
    return members


def _read_comma(source: IncrementalParser, closing: str) -> ParseSteps[None]:
    yield from source.read_whitespace()
    if (yield from source.peek()) != closing:
        yield from _expect(source, ",")
        yield from source.read_whitespace()


def _expect(source: IncrementalParser, character: str) -> ParseSteps[None]:
    if not (yield from source.consume_if(character)):
        raise _NotALiteral


def _read_string(source: IncrementalParser) -> ParseSteps[str]:
    quote = yield from source.peek()
    source.consume()
    parts: list[str] = []
    while not (yield from source.consume_if(quote)):
        seen = yield from source.peek()
        if seen in (END, "\n"):
            raise _NotALiteral
        if seen == "\\":
            source.consume()
            parts.append((yield from _read_escape(source)))
        elif seen in ("'", '"'):
            source.consume()
            parts.append(seen)
        else:
            parts.append((yield from source.read_run(_PLAIN)))
    text = "".join(parts)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _NotALiteral
    return text


def _read_escape(source: IncrementalParser) -> ParseSteps[str]:
    kind = yield from source.peek()
    if kind == END:
        raise _NotALiteral
    source.consume()
    if kind not in _HEX_LENGTHS:
        return _ESCAPES.get(kind, "\\" + kind)  # as Python has it
    digits = ""
    for _ in range(_HEX_LENGTHS[kind]):
        seen = yield from source.peek()
        if seen not in _HEX:
            raise _NotALiteral
        source.consume()
        digits += seen
    return chr(int(digits, 16))
