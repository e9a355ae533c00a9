"""Llama 4 and some of Llama 3.2: a list of Python calls, each with named arguments that are literals.

    [get_weather(city="Paris", days=3), get_time()]

A call is emitted at its closing bracket, with its arguments converted to JSON. It is recognized only at the beginning
of a text, or behind the tag.
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
    """The text is not a literal that JSON can represent."""


def read(reader: ToolCallReader) -> ParseSteps[None]:
    parser = reader.parser
    yield from parser.read_whitespace()
    begins = (yield from parser.peek()) == "[" or (yield from parser.read_one_of((TAG,))) is not None
    while True:
        if not begins:
            reader.emit_content()
            if not (yield from parser.emit_until(TAG, ContentText)):
                return
        begins = (yield from _read_list(reader)) and (yield from _next_begins(reader))


def _next_begins(reader: ToolCallReader) -> ParseSteps[bool]:
    parser = reader.parser
    yield from reader.read_trailing_whitespace()
    mark = yield from parser.read_one_of(MARKS)
    if mark == TAG_END:
        yield from reader.read_trailing_whitespace()
        mark = yield from parser.read_one_of((TAG,))
    return mark is not None


def _read_list(reader: ToolCallReader) -> ParseSteps[bool]:
    parser = reader.parser
    yield from parser.read_whitespace()
    if not (yield from parser.consume_if("[")):
        return False
    yield from parser.read_whitespace()
    while (yield from _read_call(reader)):
        yield from parser.read_whitespace()
        if (yield from parser.consume_if("]")):
            return True
        if not (yield from parser.consume_if(",")):
            return False
        yield from parser.read_whitespace()
    return False


def _read_call(reader: ToolCallReader) -> ParseSteps[bool]:
    parser = reader.parser
    name = yield from parser.read_run(NAME_CHARACTERS)
    if not reader.accepts(name) or not (yield from parser.consume_if("(")):
        return False
    try:
        arguments = yield from _read_arguments(parser)
    except _NotALiteral:
        return False
    reader.emit_call(name, json.dumps(arguments, ensure_ascii=False))
    return True


def _read_arguments(parser: IncrementalParser) -> ParseSteps[dict[str, Any]]:
    arguments: dict[str, Any] = {}
    yield from parser.read_whitespace()
    while not (yield from parser.consume_if(")")):
        name = yield from parser.read_run(_WORD)
        yield from parser.read_whitespace()
        if not name.isidentifier() or name in arguments:
            raise _NotALiteral
        yield from _expect(parser, "=")
        arguments[name] = yield from _read_literal(parser, 0)
        yield from _read_comma(parser, ")")
    return arguments


def _read_literal(parser: IncrementalParser, depth: int) -> ParseSteps[Any]:
    if depth >= MAX_DEPTH:
        raise _NotALiteral
    yield from parser.read_whitespace()
    seen = yield from parser.peek()
    if seen == "[":
        return (yield from _read_items(parser, depth))
    if seen == "{":
        return (yield from _read_members(parser, depth))
    if seen in ("'", '"'):
        return (yield from _read_string(parser))
    return _constant((yield from parser.read_run(_WORD)))


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


def _read_items(parser: IncrementalParser, depth: int) -> ParseSteps[list[Any]]:
    items: list[Any] = []
    parser.consume()
    yield from parser.read_whitespace()
    while not (yield from parser.consume_if("]")):
        items.append((yield from _read_literal(parser, depth + 1)))
        yield from _read_comma(parser, "]")
    return items


def _read_members(parser: IncrementalParser, depth: int) -> ParseSteps[dict[str, Any]]:
    members: dict[str, Any] = {}
    parser.consume()
    yield from parser.read_whitespace()
    while not (yield from parser.consume_if("}")):
        key = yield from _read_literal(parser, depth + 1)
        if not isinstance(key, str):
            raise _NotALiteral
        yield from parser.read_whitespace()
        yield from _expect(parser, ":")
        members[key] = yield from _read_literal(parser, depth + 1)
        yield from _read_comma(parser, "}")
    return members


def _read_comma(parser: IncrementalParser, closing: str) -> ParseSteps[None]:
    yield from parser.read_whitespace()
    if (yield from parser.peek()) != closing:
        yield from _expect(parser, ",")
        yield from parser.read_whitespace()


def _expect(parser: IncrementalParser, character: str) -> ParseSteps[None]:
    if not (yield from parser.consume_if(character)):
        raise _NotALiteral


def _read_string(parser: IncrementalParser) -> ParseSteps[str]:
    quote = yield from parser.peek()
    parser.consume()
    parts: list[str] = []
    while not (yield from parser.consume_if(quote)):
        seen = yield from parser.peek()
        if seen in (END, "\n"):
            raise _NotALiteral
        if seen == "\\":
            parser.consume()
            parts.append((yield from _read_escape(parser)))
        elif seen in ("'", '"'):
            parser.consume()
            parts.append(seen)
        else:
            parts.append((yield from parser.read_run(_PLAIN)))
    text = "".join(parts)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _NotALiteral
    return text


def _read_escape(parser: IncrementalParser) -> ParseSteps[str]:
    kind = yield from parser.peek()
    if kind == END:
        raise _NotALiteral
    parser.consume()
    if kind not in _HEX_LENGTHS:
        return _ESCAPES.get(kind, "\\" + kind)  # as Python has it
    digits = ""
    for _ in range(_HEX_LENGTHS[kind]):
        seen = yield from parser.peek()
        if seen not in _HEX:
            raise _NotALiteral
        parser.consume()
        digits += seen
    return chr(int(digits, 16))
