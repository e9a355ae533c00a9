"""A parser for text that arrives in pieces, which emits events for its parts.

A format is a generator that reads the text as if it were complete; it is suspended at the end of a piece and resumed
with the next one. Every character that is read is held until an event includes it, and an event includes all held
characters. So no character can be lost, and since the generator never sees where pieces end, the result does not depend
on them. This module knows no format.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from onward.text.message_events import ContentText, MessageEvent, join_events

T = TypeVar("T")
ParseSteps = Generator[None, None, T]
"""Rests at each `yield` until there is more text."""

MAX_HELD_CHARS = 1 << 16
"""Held characters whose meaning is not known yet, at most. Beyond, they are treated as something else."""
WHITESPACE = " \t\r\n"

_BLANKS = re.compile(f"[{WHITESPACE}]+")
END = ""
"""What `peek` returns behind the end of the text. It equals no character, so every comparison with it fails."""


class IncrementalParser:
    __slots__ = ("_chunk", "_ended", "_events", "_held", "_make_stream_event", "_position", "_steps", "num_held")

    def __init__(self, read_format: "Callable[[IncrementalParser], ParseSteps[None]]") -> None:
        self.num_held = 0
        """Characters that were read and not yet emitted."""
        self._chunk = ""
        self._position = 0
        self._ended = False
        self._held: list[str] = []
        self._events: list[MessageEvent] = []
        self._make_stream_event: Callable[[str], MessageEvent] | None = None
        self._steps = read_format(self)
        next(self._steps)

    def push(self, text: str) -> list[MessageEvent]:
        """Returns the events that this text completes."""
        assert not self._ended
        if text:
            self._chunk, self._position = text, 0
            next(self._steps)
            assert self._position == len(text), "a format reads all there is"
        return self._take_events()

    def finish(self) -> list[MessageEvent]:
        """Ends the text, and returns its last events. Text that was held back is content."""
        assert not self._ended
        self._ended = True
        for _ in self._steps:
            raise AssertionError("a format ends where the text ends")
        self.emit_held(ContentText)
        return self._take_events()

    def _take_events(self) -> list[MessageEvent]:
        events, self._events = self._events, []
        return events

    # For formats.

    @property
    def held(self) -> str:
        if len(self._held) > 1:
            self._held = ["".join(self._held)]
        return self._held[0] if self._held else ""

    def emit_held(self, make_event: Callable[[str], MessageEvent]) -> None:
        """Emits all held characters as one event. Emits nothing if none are held."""
        if self.num_held:
            self.emit(make_event(self._release()))

    def emit(self, event: MessageEvent) -> None:
        joined = join_events(self._events[-1], event) if self._events else None
        if joined is None:
            self._events.append(event)
        else:
            self._events[-1] = joined

    def emit_held_or_empty(self, make_event: Callable[[str], MessageEvent]) -> None:
        """Emits all held characters as one event, also if none are held."""
        self.emit(make_event(self._release()))

    def emit_first(self, num_chars: int, make_event: Callable[[str], MessageEvent]) -> None:
        """Emits the first `num_chars` held characters as one event, and keeps the others held."""
        text, rest = self.held[:num_chars], self.held[num_chars:]
        self._held, self.num_held = [rest], len(rest)
        self.emit(make_event(text))

    def start_streaming(self, make_event: Callable[[str], MessageEvent]) -> None:
        """Emits the characters that are read from here on at the end of each piece, until `stop_streaming`. Must
        not be called while characters are held."""
        assert not self.num_held
        self._make_stream_event = make_event

    def stop_streaming(self) -> None:
        assert self._make_stream_event is not None
        self.emit_held(self._make_stream_event)
        self._make_stream_event = None

    def peek(self) -> ParseSteps[str]:
        """Returns the next character without reading it, and waits for more text if necessary. Returns `END` at the end
        of the text, or if too many characters are held."""
        if self._position == len(self._chunk):
            yield from self._wait_for_text()
        if self._position == len(self._chunk) or self._max_chars() <= 0:
            return END
        return self._chunk[self._position]

    def consume(self) -> None:
        """Reads the character that `peek` saw."""
        self._take_to(self._position + 1)

    def consume_run(self, pattern: "re.Pattern[str]") -> None:
        """Reads as much of this piece as matches from here on. The pattern looks at single characters only."""
        match = pattern.match(self._chunk, self._position, self._position + min(self._max_chars(), len(self._chunk)))
        if match is not None:
            self._take_to(match.end())

    def consume_if(self, character: str) -> ParseSteps[bool]:
        if (yield from self.peek()) != character:
            return False
        self.consume()
        return True

    def read_run(self, pattern: "re.Pattern[str]") -> ParseSteps[str]:
        """Reads all characters that match, in however many pieces they come."""
        start = self.num_held
        while (character := (yield from self.peek())) and pattern.match(character):
            self.consume_run(pattern)
        return self.held[start:]

    def read_whitespace(self) -> ParseSteps[None]:
        while (character := (yield from self.peek())) and character in WHITESPACE:
            self.consume_run(_BLANKS)

    def read_one_of(self, words: Sequence[str]) -> ParseSteps[str | None]:
        """Reads one of the words, of which none begins another. None: what was read of it stays read, and the first
        character that did not fit is unread."""
        num_read = 0
        while True:
            character = yield from self.peek()
            words = [word for word in words if character and word[num_read] == character]
            if not words:
                return None
            self.consume()
            num_read += 1
            if len(words[0]) == num_read:
                return words[0]

    def emit_until(self, word: str, make_event: Callable[[str], MessageEvent]) -> ParseSteps[bool]:
        """Emits everything before the word, and reads the word. Returns False if the text ends without it."""
        assert word[0] not in word[1:], "so that a word that breaks off cannot hide the beginning of the next one"
        while True:
            if self._position == len(self._chunk):
                yield from self._wait_for_text()
                if self._ended:
                    return False
            start = self._chunk.find(word[0], self._position)
            self._take_to(len(self._chunk) if start < 0 else start)
            self.emit_held(make_event)
            if start >= 0 and (yield from self.read_one_of((word,))):
                return True
            self.emit_held(make_event)

    def emit_rest(self, make_event: Callable[[str], MessageEvent]) -> ParseSteps[None]:
        """Reads everything up to the end of the text, and emits it as one event for each piece."""
        while True:
            self._take_to(len(self._chunk))
            self.emit_held(make_event)
            yield from self._wait_for_text()
            if self._ended:
                return

    def _wait_for_text(self) -> ParseSteps[None]:
        if self._make_stream_event is not None:
            self.emit_held(self._make_stream_event)
        if not self._ended:
            yield

    def _max_chars(self) -> int:
        return len(self._chunk) if self._make_stream_event is not None else MAX_HELD_CHARS - self.num_held

    def _take_to(self, end: int) -> None:
        if end > self._position:
            self._held.append(self._chunk[self._position : end])
            self.num_held += end - self._position
            self._position = end

    def _release(self) -> str:
        text = self.held
        self._held, self.num_held = [], 0
        return text
