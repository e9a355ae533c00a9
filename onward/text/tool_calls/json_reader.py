"""Reads one JSON value from a text that arrives in pieces. Exactly JSON: what does not fit the standard ends the reading
in front of the first character that does not. Does not build the value: its text is what counts.
"""

import re

from onward.text.incremental_parser import END, IncrementalParser, ParseSteps

MAX_DEPTH = 64

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_DIGITS = re.compile(r"[0-9]+")
_DIGIT = "0123456789"
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPED = frozenset('"\\/bfnrt')


def read_value(parser: IncrementalParser, depth: int = 0) -> ParseSteps[bool]:
    """Reads one JSON value. Returns False if the text is not one; what was read of it stays read."""
    match (yield from parser.peek()):
        case "{":
            return (yield from read_object(parser, depth))
        case "[":
            return (yield from _read_array(parser, depth))
        case '"':
            return (yield from read_string(parser))
        case "t" | "f" | "n":
            return (yield from parser.read_one_of(("true", "false", "null"))) is not None
        case _:
            return (yield from _read_number(parser))


def read_object(parser: IncrementalParser, depth: int = 0) -> ParseSteps[bool]:
    if depth >= MAX_DEPTH or not (yield from parser.consume_if("{")):
        return False
    yield from parser.read_whitespace()
    if (yield from parser.consume_if("}")):
        return True
    while True:
        if not (yield from read_key(parser)):
            return False
        if not (yield from read_value(parser, depth + 1)):
            return False
        match (yield from _read_separator(parser, "}")):
            case "}":
                return True
            case ",":
                yield from parser.read_whitespace()
            case _:
                return False


def read_key(parser: IncrementalParser) -> ParseSteps[bool]:
    """Reads a member's name, up to where its value begins. Returns False if the text does not fit."""
    if not (yield from read_string(parser)):
        return False
    yield from parser.read_whitespace()
    if not (yield from parser.consume_if(":")):
        return False
    yield from parser.read_whitespace()
    return True


def read_string(parser: IncrementalParser) -> ParseSteps[bool]:
    if not (yield from parser.consume_if('"')):
        return False
    while True:
        parser.consume_run(_PLAIN)
        seen = yield from parser.peek()
        if seen == '"':
            parser.consume()
            return True
        if seen == "\\":
            parser.consume()
            if not (yield from _read_escape(parser)):
                return False
        elif seen == END or seen < " ":
            return False


def _read_escape(parser: IncrementalParser) -> ParseSteps[bool]:
    seen = yield from parser.peek()
    if seen in _ESCAPED:
        parser.consume()
        return True
    if not (yield from parser.consume_if("u")):
        return False
    for _ in range(4):
        if (yield from parser.peek()) not in _HEX:
            return False
        parser.consume()
    return True


def _read_array(parser: IncrementalParser, depth: int) -> ParseSteps[bool]:
    if depth >= MAX_DEPTH:
        return False
    parser.consume()
    yield from parser.read_whitespace()
    if (yield from parser.consume_if("]")):
        return True
    while (yield from read_value(parser, depth + 1)):
        match (yield from _read_separator(parser, "]")):
            case "]":
                return True
            case ",":
                yield from parser.read_whitespace()
            case _:
                return False
    return False


def _read_separator(parser: IncrementalParser, closing: str) -> ParseSteps[str]:
    yield from parser.read_whitespace()
    seen = yield from parser.peek()
    if seen in (",", closing):
        parser.consume()
        return seen
    return END


def _read_number(parser: IncrementalParser) -> ParseSteps[bool]:
    yield from parser.consume_if("-")
    if not (yield from parser.consume_if("0")) and not (yield from _read_digits(parser)):
        return False
    if (yield from parser.consume_if(".")) and not (yield from _read_digits(parser)):
        return False
    if (yield from parser.peek()) not in ("e", "E"):
        return True
    parser.consume()
    if (yield from parser.peek()) in ("+", "-"):
        parser.consume()
    return (yield from _read_digits(parser))


def _read_digits(parser: IncrementalParser) -> ParseSteps[bool]:
    """Reads all digits that follow. Returns False if there is none."""
    seen = yield from parser.peek()
    if seen == END or seen not in _DIGIT:
        return False
    yield from parser.read_run(_DIGITS)
    return True
