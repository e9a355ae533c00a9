"""The input of a custom tool, which is a text, in a call whose arguments are JSON: `{"input": "…"}`.

The input is decoded while the arguments arrive, and depends only on the text so far, however it is cut. Arguments of
another form are the input as they stand.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from onward.text.message_events import (
    CustomToolInput,
    MessageEvent,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
)

INPUT = "input"
_BEGIN = re.compile(r'[ \t\r\n]*\{[ \t\r\n]*"input"[ \t\r\n]*:[ \t\r\n]*"')
_EXPECTED = ("{", f'"{INPUT}"', ":", '"')
"""The tokens before the input. Spaces may be between them."""
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_UNICODE_LENGTH = 6
_REPLACEMENT = "�"


@dataclass(slots=True)
class InputDecoder:
    """Decodes the arguments of one call."""

    _held: str = ""
    """Arguments whose meaning is not known yet: the beginning, or a part of an escape."""
    _state: str = "before"
    """`before` the input, `inside` it, `after` it, or `raw`: the arguments have another form."""

    def push(self, arguments: str) -> str:
        """Returns the part of the input that is known now."""
        self._held += arguments
        if self._state == "before":
            self._find_begin()
        if self._state == "raw":
            return self._take_all()
        if self._state == "inside":
            return self._decode()
        if self._state == "after":
            self._held = ""
        return ""

    def finish(self) -> str:
        """Returns the rest of the input where the arguments end."""
        if self._state in ("before", "raw"):
            return self._take_all()
        # A part of an escape is dropped: it is half a character.
        self._held = ""
        return ""

    def _find_begin(self) -> None:
        begin = _BEGIN.match(self._held)
        if begin is not None:
            self._held, self._state = self._held[begin.end() :], "inside"
        elif not _may_begin(self._held):
            self._state = "raw"

    def _take_all(self) -> str:
        text, self._held = self._held, ""
        return text

    def _decode(self) -> str:
        parts: list[str] = []
        at, text = 0, self._held
        while at < len(text):
            plain = _PLAIN.match(text, at)
            if plain is not None:
                parts.append(plain[0])
                at = plain.end()
            elif text[at] == '"':
                at, self._state = len(text), "after"
            else:
                decoded = _escape(text, at)
                if decoded is None:
                    break
                character, at = decoded
                parts.append(character)
        self._held = text[at:]
        return "".join(parts)


def _may_begin(text: str) -> bool:
    """Returns whether a text may become the beginning of arguments with an input."""
    at = 0
    for expected in _EXPECTED:
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n"))
        rest = text[at : at + len(expected)]
        if rest != expected:
            return at + len(rest) == len(text) and expected.startswith(rest)
        at += len(expected)
    return True


def _escape(text: str, at: int) -> tuple[str, int] | None:
    """Returns the character of the escape at this position, and where the escape ends. None: it is not complete."""
    kind = text[at + 1 : at + 2]
    if not kind:
        return None
    if kind != "u":
        return _ESCAPES.get(kind, kind), at + 2
    if len(text) < at + _UNICODE_LENGTH:
        return None
    code, end = _code_unit(text, at), at + _UNICODE_LENGTH
    if not 0xD800 <= code < 0xE000:
        return chr(code), end
    if code >= 0xDC00:
        return _REPLACEMENT, end
    if not (following := text[end:]) or following == "\\" or (following[:2] == "\\u" and len(following) < 6):
        return None
    low = _code_unit(text, end) if following.startswith("\\u") else 0
    if not 0xDC00 <= low < 0xE000:
        return _REPLACEMENT, end
    return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)), end + _UNICODE_LENGTH


def _code_unit(text: str, at: int) -> int:
    """Returns the UTF-16 code unit of the complete Unicode escape whose backslash is at `at`. The digits are not
    checked here: the parsers of calls accept only hexadecimal ones."""
    return int(text[at + 2 : at + _UNICODE_LENGTH], 16)


@dataclass(slots=True)
class CustomCallConverter:
    """Turns the events of calls of custom tools into events with their input. `is_raw`: the arguments are the input."""

    names: Collection[str]
    is_raw: bool = False
    _decoders: dict[int, InputDecoder] = field(default_factory=dict)

    def convert(self, events: list[MessageEvent]) -> list[MessageEvent]:
        return [converted for event in events for converted in self._convert(event)]

    def _convert(self, event: MessageEvent) -> list[MessageEvent]:
        match event:
            case ToolCallStarted(index, name, text) if name in self.names:
                self._decoders[index] = InputDecoder("", "raw") if self.is_raw else InputDecoder()
                return [ToolCallStarted(index, name, text, is_custom=True)]
            case ToolCallArguments(index, delta, text) if index in self._decoders:
                return [CustomToolInput(index, self._decoders[index].push(delta), text)]
            case ToolCallEnded(index) if index in self._decoders:
                rest = self._decoders.pop(index).finish()
                return [CustomToolInput(index, rest, ""), event] if rest else [event]
            case _:
                return [event]
