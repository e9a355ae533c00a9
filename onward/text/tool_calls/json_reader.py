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


def read_value(source: IncrementalParser, depth: int = 0) -> ParseSteps[bool]:
    """False: what was read is no value."""
    match (yield from source.peek()):
        case "{":
            return (yield from read_object(source, depth))
        case "[":
            return (yield from _read_array(source, depth))
        case '"':
            return (yield from read_string(source))
        case "t" | "f" | "n":
            return (yield from source.read_one_of(("true", "false", "null"))) is not None
        case _:
            return (yield from _read_number(source))


def read_object(source: IncrementalParser, depth: int = 0) -> ParseSteps[bool]:
    if depth >= MAX_DEPTH or not (yield from source.consume_if("{")):
        return False
    yield from source.read_whitespace()
    if (yield from source.consume_if("}")):
        return True
    while True:
        if not (yield from read_key(source)):
            return False
        if not (yield from read_value(source, depth + 1)):
            return False
        match (yield from _read_separator(source, "}")):
            case "}":
                return True
            case ",":
                yield from source.read_whitespace()
            case _:
                return False


def read_key(source: IncrementalParser) -> ParseSteps[bool]:
    """A member's name, up to where its value begins."""
    if not (yield from read_string(source)):
        return False
    yield from source.read_whitespace()
    if not (yield from source.consume_if(":")):
        return False
    yield from source.read_whitespace()
    return True


def read_string(source: IncrementalParser) -> ParseSteps[bool]:
    if not (yield from source.consume_if('"')):
        return False
    while True:
        source.consume_run(_PLAIN)
        seen = yield from source.peek()
        if seen == '"':
            source.consume()
            return True
        if seen == "\\":
            source.consume()
            if not (yield from _read_escape(source)):
                return False
        elif seen == END or seen < " ":
            return False


def _read_escape(source: IncrementalParser) -> ParseSteps[bool]:
    seen = yield from source.peek()
    if seen in _ESCAPED:
        source.consume()
        return True
    if not (yield from source.consume_if("u")):
        return False
    for _ in range(4):
        if (yield from source.peek()) not in _HEX:
            return False
        source.consume()
    return True


def _read_array(source: IncrementalParser, depth: int) -> ParseSteps[bool]:
    if depth >= MAX_DEPTH:
        return False
    source.consume()
    yield from source.read_whitespace()
    if (yield from source.consume_if("]")):
        return True
    while (yield from read_value(source, depth + 1)):
        match (yield from _read_separator(source, "]")):
            case "]":
                return True
            case ",":
                yield from source.read_whitespace()
            case _:
                return False
    return False


def _read_separator(source: IncrementalParser, closing: str) -> ParseSteps[str]:
    yield from source.read_whitespace()
    seen = yield from source.peek()
    if seen in (",", closing):
        source.consume()
        return seen
    return END


def _read_number(source: IncrementalParser) -> ParseSteps[bool]:
    yield from source.consume_if("-")
    if not (yield from source.consume_if("0")) and not (yield from _read_digits(source)):
        return False
    if (yield from source.consume_if(".")) and not (yield from _read_digits(source)):
        return False
    if (yield from source.peek()) not in ("e", "E"):
        return True
    source.consume()
    if (yield from source.peek()) in ("+", "-"):
        source.consume()
    return (yield from _read_digits(source))


def _read_digits(source: IncrementalParser) -> ParseSteps[bool]:
    """At least one."""
    seen = yield from source.peek()
    if seen == END or seen not in _DIGIT:
        return False
    yield from source.read_run(_DIGITS)
    return True
