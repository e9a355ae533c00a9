"""Emits the events of the tool calls that a format finds: each call begins once, with its name, has arguments, and ends
once.

A call without a readable beginning is content. A call that has begun cannot be taken back: it ends where it becomes
invalid, and the rest is content again.
"""

import json
import re
from collections.abc import Callable, Collection
from functools import partial

import msgspec

from onward.text.incremental_parser import IncrementalParser, ParseSteps
from onward.text.message_events import (
    ContentText,
    MarkupText,
    MessageEvent,
    ToolCallArguments,
    ToolCallEnded,
    ToolCallStarted,
)
from onward.text.tool_calls.json_reader import read_key, read_object, read_string, read_value

NAME_KEYS = frozenset({"name"})
ARGUMENTS_KEYS = frozenset({"arguments", "parameters"})
SIDE_KEYS = frozenset({"id", "type"})
"""Other keys that models write into a call."""
NO_ARGUMENTS = "{}"
NAME_CHARACTERS = re.compile(r"[A-Za-z0-9_.:/-]+")

_ANYTHING = re.compile(r"[\s\S]+")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class ToolCallReader:
    """`known_names`: those of the request's tools. With `only_known`, any other name makes it words."""

    __slots__ = ("_known_names", "_only_known", "num_started", "parser")

    def __init__(self, parser: IncrementalParser, known_names: Collection[str], only_known: bool = False) -> None:
        self.num_started = 0
        self.parser = parser
        self._known_names = known_names
        self._only_known = only_known

    def accepts(self, name: str) -> bool:
        if self._only_known:
            return name in self._known_names
        return _NAME.fullmatch(name) is not None

    def read_arguments(self, name: str) -> ParseSteps[bool]:
        """Reads the arguments of a call whose name has been read. Returns False if they are incomplete."""
        if not self.accepts(name) or (yield from self.parser.peek()) != "{":
            self.emit_content()
            return False
        index = self.begin(name)
        self.parser.start_streaming(partial(_arguments, index))
        is_complete = yield from read_object(self.parser)
        self.parser.stop_streaming()
        self.end(index, is_complete)
        return is_complete

    def read_raw(self, name: str) -> ParseSteps[None]:
        """Reads the whole text as the arguments of one call. An empty text is no call."""
        if not (yield from self.parser.peek()):
            return
        index = self.begin(name)
        self.parser.start_streaming(partial(_arguments, index))
        while (yield from self.parser.peek()):
            self.parser.consume_run(_ANYTHING)
        self.parser.stop_streaming()
        self.end(index, True)

    def read_object(self) -> ParseSteps[bool]:
        """Reads a call that is one JSON object: `{"name": …, "arguments": {…}}`. Returns False if it is incomplete or
        no call; its readable part has then been emitted, and the rest as content."""
        return (yield from _JsonCallReader(self).read())

    def emit_call(self, name: str, arguments: str) -> None:
        """Emits all events of a complete call. All held characters are the text of its first event."""
        index = self.begin(name)
        self.parser.emit(ToolCallArguments(index, arguments, ""))
        self.end(index, True)

    def emit_content(self) -> None:
        self.parser.emit_held(ContentText)

    def read_trailing_whitespace(self) -> ParseSteps[None]:
        """Blanks right behind a call belong to it."""
        yield from self.parser.read_whitespace()
        self.emit_markup()

    def emit_markup(self) -> None:
        """Emits the held characters as markup."""
        self.parser.emit_held(MarkupText)

    def begin(self, name: str, num_chars: int | None = None) -> int:
        index = self.num_started
        self.num_started += 1
        make_event = partial(_started, index, name)
        if num_chars is None:
            self.parser.emit_held_or_empty(make_event)
        else:
            self.parser.emit_first(num_chars, make_event)
        return index

    def end(self, index: int, is_complete: bool) -> None:
        self.parser.emit(ToolCallEnded(index, is_complete))


class _JsonCallReader:
    """The members of one call's object, in any order. Arguments in front of the name wait for it."""

    __slots__ = ("_buffered", "_has_arguments", "_index", "_name", "_parser", "_reader")

    def __init__(self, reader: ToolCallReader) -> None:
        self._reader = reader
        self._parser = reader.parser
        self._index: int | None = None
        self._name: str | None = None
        self._has_arguments = False
        self._buffered: tuple[int, int, str] | None = None
        """Arguments that could not be emitted at once: where they begin and end in the held text, and their JSON
        text."""

    def read(self) -> ParseSteps[bool]:
        is_complete = yield from self._read_members()
        if self._index is None and is_complete and self._name is not None:
            self._emit_buffered(self._name)
        elif self._index is None or not is_complete:
            self._reader.emit_content()
            return False
        self._reader.emit_markup()
        return True

    def _read_members(self) -> ParseSteps[bool]:
        parser = self._parser
        if not (yield from parser.consume_if("{")):
            return False
        yield from parser.read_whitespace()
        while True:
            if not (yield from self._read_member()):
                return False
            yield from parser.read_whitespace()
            if (yield from parser.consume_if("}")):
                return True
            if not (yield from parser.consume_if(",")):
                return False
            yield from parser.read_whitespace()

    def _read_member(self) -> ParseSteps[bool]:
        begin = self._parser.num_held
        if not (yield from read_key(self._parser)):
            return False
        key = _string_at(self._parser.held, begin)
        if key in NAME_KEYS:
            return (yield from self._read_name())
        if key in ARGUMENTS_KEYS:
            return (yield from self._read_arguments())
        return key in SIDE_KEYS and (yield from read_value(self._parser))

    def _read_name(self) -> ParseSteps[bool]:
        begin = self._parser.num_held
        if self._name is not None or not (yield from read_string(self._parser)):
            return False
        self._name = _string_at(self._parser.held, begin)
        return self._reader.accepts(self._name)

    def _read_arguments(self) -> ParseSteps[bool]:
        if self._has_arguments:
            return False
        self._has_arguments = True
        match (yield from self._parser.peek()):
            case "{" if self._name is not None:
                is_complete = yield from self._reader.read_arguments(self._name)
                self._index = self._reader.num_started - 1
                return is_complete
            case "{":
                return (yield from self._buffer_arguments(read_object))
            case '"':
                return (yield from self._buffer_arguments(read_string))
            case _:  # a call without arguments; anything else here is no call
                return (yield from self._parser.read_one_of(("null",))) is not None

    def _buffer_arguments(self, read_value_of: Callable[[IncrementalParser], ParseSteps[bool]]) -> ParseSteps[bool]:
        """Reads arguments that are emitted when the object has ended, because they came before the name or as JSON
        within a string."""
        begin = self._parser.num_held
        if not (yield from read_value_of(self._parser)):
            return False
        text = self._parser.held[begin:]
        inner = _object_within(text) if text[0] == '"' else text
        if inner is None:
            return False
        self._buffered = (begin, self._parser.num_held, inner)
        return True

    def _emit_buffered(self, name: str) -> None:
        """Emits a call whose whole object was read before any part of it could be emitted."""
        if self._buffered is None:
            self._reader.emit_call(name, NO_ARGUMENTS)
            return
        begin, end, arguments = self._buffered
        index = self._reader.begin(name, begin)
        self._parser.emit_first(end - begin, partial(ToolCallArguments, index, arguments))
        self._reader.end(index, True)


def _started(index: int, name: str, text: str) -> MessageEvent:
    return ToolCallStarted(index, name, text)


def _arguments(index: int, text: str) -> MessageEvent:
    return ToolCallArguments(index, text, text)


def _string_at(text: str, begin: int) -> str:
    """Returns the decoded JSON string that begins at `begin`."""
    return json.JSONDecoder(strict=False).raw_decode(text, begin)[0]


def _object_within(text: str) -> str | None:
    """Returns the content of a JSON string if that is a JSON object."""
    inner = _string_at(text, 0)
    try:
        return inner if isinstance(msgspec.json.decode(inner), dict) else None
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
