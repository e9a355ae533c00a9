"""Tells of the calls that a format finds: each begins once, with its name, has its arguments, and ends once.

A call whose beginning is not to be made out is words. One that has begun cannot be taken back: it ends there, and what
follows is words again.
"""

import json
import re
from collections.abc import Callable, Collection
from functools import partial

import msgspec

from onward.text.message_events import Arguments, CallEnded, CallStarted, Content, Event, Markup
from onward.text.piecewise import Piecewise, Steps
from onward.text.tool_calls.json_text import read_key, read_object, read_string, read_value

NAME_KEYS = frozenset({"name"})
ARGUMENTS_KEYS = frozenset({"arguments", "parameters"})
SIDE_KEYS = frozenset({"id", "type"})
"""What else models write into a call."""
NO_ARGUMENTS = "{}"
NAME_CHARACTERS = re.compile(r"[A-Za-z0-9_.:/-]+")

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class Calls:
    """`known_names`: those of the request's tools. With `only_known`, any other name makes it words."""

    __slots__ = ("_known_names", "_only_known", "num_begun", "source")

    def __init__(self, source: Piecewise, known_names: Collection[str], only_known: bool = False) -> None:
        self.num_begun = 0
        self.source = source
        self._known_names = known_names
        self._only_known = only_known

    def accepts(self, name: str) -> bool:
        if self._only_known:
            return name in self._known_names
        return _NAME.fullmatch(name) is not None

    def read_arguments(self, name: str) -> Steps[bool]:
        """A call whose name has been read and whose arguments come now. False if they are not whole."""
        if not self.accepts(name) or (yield from self.source.peek()) != "{":
            self.words()
            return False
        index = self.begin(name)
        self.source.tell_while_reading(partial(_arguments, index))
        is_complete = yield from read_object(self.source)
        self.source.stop_telling()
        self.end(index, is_complete)
        return is_complete

    def read_object(self) -> Steps[bool]:
        """A call that is one JSON object: `{"name": …, "arguments": {…}}`. False if it was none, or not a whole one; what
        could be told of it has been told then, the rest as words."""
        return (yield from _CallObject(self).read())

    def tell_whole(self, name: str, arguments: str) -> None:
        """A call that has been read as a whole."""
        index = self.begin(name)
        self.source.put(Arguments(index, arguments, ""))
        self.end(index, True)

    def words(self) -> None:
        self.source.tell(Content)

    def blanks_behind(self) -> Steps[None]:
        """Blanks right behind a call belong to it."""
        yield from self.source.blanks()
        self.tell_marks()

    def tell_marks(self) -> None:
        """What is held belongs to the format."""
        self.source.tell(Markup)

    def begin(self, name: str, num_chars: int | None = None) -> int:
        index = self.num_begun
        self.num_begun += 1
        event_of = partial(_started, index, name)
        if num_chars is None:
            self.source.mark(event_of)
        else:
            self.source.mark_first(num_chars, event_of)
        return index

    def end(self, index: int, is_complete: bool) -> None:
        self.source.put(CallEnded(index, is_complete))


class _CallObject:
    """The members of one call's object, in any order. Arguments in front of the name wait for it."""

    __slots__ = ("_calls", "_has_arguments", "_index", "_name", "_source", "_waiting")

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._source = calls.source
        self._index: int | None = None
        self._name: str | None = None
        self._has_arguments = False
        self._waiting: tuple[int, int, str] | None = None
        """Of arguments that could not be told at once: where they begin and end in what is held, and their JSON text."""

    def read(self) -> Steps[bool]:
        is_whole = yield from self._read_members()
        if self._index is None and is_whole and self._name is not None:
            self._tell_late(self._name)
        elif self._index is None or not is_whole:
            self._calls.words()
            return False
        self._calls.tell_marks()
        return True

    def _read_members(self) -> Steps[bool]:
        source = self._source
        if not (yield from source.take_if("{")):
            return False
        yield from source.blanks()
        while True:
            if not (yield from self._read_member()):
                return False
            yield from source.blanks()
            if (yield from source.take_if("}")):
                return True
            if not (yield from source.take_if(",")):
                return False
            yield from source.blanks()

    def _read_member(self) -> Steps[bool]:
        begin = self._source.num_held
        if not (yield from read_key(self._source)):
            return False
        key = _string_at(self._source.held, begin)
        if key in NAME_KEYS:
            return (yield from self._read_name())
        if key in ARGUMENTS_KEYS:
            return (yield from self._read_arguments())
        return key in SIDE_KEYS and (yield from read_value(self._source))

    def _read_name(self) -> Steps[bool]:
        begin = self._source.num_held
        if self._name is not None or not (yield from read_string(self._source)):
            return False
        self._name = _string_at(self._source.held, begin)
        return self._calls.accepts(self._name)

    def _read_arguments(self) -> Steps[bool]:
        if self._has_arguments:
            return False
        self._has_arguments = True
        match (yield from self._source.peek()):
            case "{" if self._name is not None:
                is_whole = yield from self._calls.read_arguments(self._name)
                self._index = self._calls.num_begun - 1
                return is_whole
            case "{":
                return (yield from self._wait_for(read_object))
            case '"':
                return (yield from self._wait_for(read_string))
            case _:  # a call without arguments; anything else here is no call
                return (yield from self._source.one_of(("null",))) is not None

    def _wait_for(self, read: Callable[[Piecewise], Steps[bool]]) -> Steps[bool]:
        """Arguments that are told when the object has ended: they came before the name, or as JSON within a string."""
        begin = self._source.num_held
        if not (yield from read(self._source)):
            return False
        text = self._source.held[begin:]
        inner = _object_within(text) if text[0] == '"' else text
        if inner is None:
            return False
        self._waiting = (begin, self._source.num_held, inner)
        return True

    def _tell_late(self, name: str) -> None:
        """The whole object has been read before anything of it could be told."""
        if self._waiting is None:
            self._calls.tell_whole(name, NO_ARGUMENTS)
            return
        begin, end, arguments = self._waiting
        index = self._calls.begin(name, begin)
        self._source.mark_first(end - begin, partial(Arguments, index, arguments))
        self._calls.end(index, True)


def _started(index: int, name: str, text: str) -> Event:
    return CallStarted(index, name, text)


def _arguments(index: int, text: str) -> Event:
    return Arguments(index, text, text)


def _string_at(text: str, begin: int) -> str:
    """The JSON string that begins there."""
    return json.JSONDecoder(strict=False).raw_decode(text, begin)[0]


def _object_within(text: str) -> str | None:
    """What a JSON string says, if that is a JSON object."""
    inner = _string_at(text, 0)
    try:
        return inner if isinstance(msgspec.json.decode(inner), dict) else None
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
