"""Reads one JSON value from a text that arrives in pieces. Exactly JSON: what does not fit the standard ends the reading
in front of the first character that does not. Does not build the value: its text is what counts.
"""

import re

from onward.text.piecewise import END, Piecewise, Steps

MAX_DEPTH = 64

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_DIGITS = re.compile(r"[0-9]+")
_DIGIT = "0123456789"
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPED = frozenset('"\\/bfnrt')


def read_value(source: Piecewise, depth: int = 0) -> Steps[bool]:
    """False: what was read is no value."""
    match (yield from source.peek()):
        case "{":
            return (yield from read_object(source, depth))
        case "[":
            return (yield from _read_array(source, depth))
        case '"':
            return (yield from read_string(source))
        case "t" | "f" | "n":
            return (yield from source.one_of(("true", "false", "null"))) is not None
        case _:
            return (yield from _read_number(source))


def read_object(source: Piecewise, depth: int = 0) -> Steps[bool]:
    if depth >= MAX_DEPTH or not (yield from source.take_if("{")):
        return False
    yield from source.blanks()
    if (yield from source.take_if("}")):
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
                yield from source.blanks()
            case _:
                return False


def read_key(source: Piecewise) -> Steps[bool]:
    """A member's name, up to where its value begins."""
    if not (yield from read_string(source)):
        return False
    yield from source.blanks()
    if not (yield from source.take_if(":")):
        return False
    yield from source.blanks()
    return True


def read_string(source: Piecewise) -> Steps[bool]:
    if not (yield from source.take_if('"')):
        return False
    while True:
        source.take_run(_PLAIN)
        seen = yield from source.peek()
        if seen == '"':
            source.take()
            return True
        if seen == "\\":
            source.take()
            if not (yield from _read_escape(source)):
                return False
        elif seen == END or seen < " ":
            return False


def _read_escape(source: Piecewise) -> Steps[bool]:
    seen = yield from source.peek()
    if seen in _ESCAPED:
        source.take()
        return True
    if not (yield from source.take_if("u")):
        return False
    for _ in range(4):
        if (yield from source.peek()) not in _HEX:
            return False
        source.take()
    return True


def _read_array(source: Piecewise, depth: int) -> Steps[bool]:
    if depth >= MAX_DEPTH:
        return False
    source.take()
    yield from source.blanks()
    if (yield from source.take_if("]")):
        return True
    while (yield from read_value(source, depth + 1)):
        match (yield from _read_separator(source, "]")):
            case "]":
                return True
            case ",":
                yield from source.blanks()
            case _:
                return False
    return False


def _read_separator(source: Piecewise, closing: str) -> Steps[str]:
    yield from source.blanks()
    seen = yield from source.peek()
    if seen in (",", closing):
        source.take()
        return seen
    return END


def _read_number(source: Piecewise) -> Steps[bool]:
    yield from source.take_if("-")
    if not (yield from source.take_if("0")) and not (yield from _read_digits(source)):
        return False
    if (yield from source.take_if(".")) and not (yield from _read_digits(source)):
        return False
    if (yield from source.peek()) not in ("e", "E"):
        return True
    source.take()
    if (yield from source.peek()) in ("+", "-"):
        source.take()
    return (yield from _read_digits(source))


def _read_digits(source: Piecewise) -> Steps[bool]:
    """At least one."""
    seen = yield from source.peek()
    if seen == END or seen not in _DIGIT:
        return False
    yield from source.run(_DIGITS)
    return True
