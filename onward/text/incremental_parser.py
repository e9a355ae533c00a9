"""Reads a text that arrives in pieces, one character behind the other, and tells what each part of it is.

A format is written down as a generator that walks through the text as if all of it were there; it rests where a piece
ends and goes on with the next one. Every character that is read is held until it is told as part of an event, and telling
takes all that is held. So no character can be lost, and since the generator never sees where pieces end, any cutting of
the text gives the same result. Knows no format.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from onward.text.message_events import ContentText, MessageEvent, join_events

T = TypeVar("T")
ParseSteps = Generator[None, None, T]
"""Rests at each `yield` until there is more text."""

MAX_HELD_CHARS = 1 << 16
"""Of what is not told because nobody knows yet what it is. Beyond, it is taken for something else."""
WHITESPACE = " \t\r\n"

_BLANKS = re.compile(f"[{WHITESPACE}]+")
END = ""
"""What `peek` sees behind the text. It equals no character, so whatever was expected there has not come."""


class IncrementalParser:
    __slots__ = ("_at", "_ended", "_events", "_held", "_piece", "_steps", "_telling", "num_held")

    def __init__(self, read: "Callable[[IncrementalParser], ParseSteps[None]]") -> None:
        self.num_held = 0
        """Characters that were read and not told."""
        self._piece = ""
        self._at = 0
        self._ended = False
        self._held: list[str] = []
        self._events: list[MessageEvent] = []
        self._telling: Callable[[str], MessageEvent] | None = None
        self._steps = read(self)
        next(self._steps)

    def push(self, text: str) -> list[MessageEvent]:
        """What is known now that this text has come."""
        assert not self._ended
        if text:
            self._piece, self._at = text, 0
            next(self._steps)
            assert self._at == len(text), "a format reads all there is"
        return self._taken_events()

    def finish(self) -> list[MessageEvent]:
        """The text has ended: what was held back can only be words."""
        assert not self._ended
        self._ended = True
        for _ in self._steps:
            raise AssertionError("a format ends where the text ends")
        self.emit_held(ContentText)
        return self._taken_events()

    def _taken_events(self) -> list[MessageEvent]:
        events, self._events = self._events, []
        return events

    # For formats.

    @property
    def held(self) -> str:
        if len(self._held) > 1:
            self._held = ["".join(self._held)]
        return self._held[0] if self._held else ""

    def emit_held(self, event_of: Callable[[str], MessageEvent]) -> None:
        """All that is held is this. Nothing is told of nothing."""
        if self.num_held:
            self.emit(event_of(self._release()))

    def emit(self, event: MessageEvent) -> None:
        both = join_events(self._events[-1], event) if self._events else None
        if both is None:
            self._events.append(event)
        else:
            self._events[-1] = both

    def emit_held_or_empty(self, event_of: Callable[[str], MessageEvent]) -> None:
        """As `tell`, for an event that is there also without text."""
        self.emit(event_of(self._release()))

    def emit_first(self, num_chars: int, event_of: Callable[[str], MessageEvent]) -> None:
        """As `mark`, for the first of what is held."""
        text, rest = self.held[:num_chars], self.held[num_chars:]
        self._held, self.num_held = [rest], len(rest)
        self.emit(event_of(text))

    def start_streaming(self, event_of: Callable[[str], MessageEvent]) -> None:
        """From here on what is read is told when a piece ends."""
        assert not self.num_held
        self._telling = event_of

    def stop_streaming(self) -> None:
        assert self._telling is not None
        self.emit_held(self._telling)
        self._telling = None

    def peek(self) -> ParseSteps[str]:
        """The next character, which stays unread. `END` if there is none, or if too much is held."""
        if self._at == len(self._piece):
            yield from self._wait_for_text()
        if self._at == len(self._piece) or self._room() <= 0:
            return END
        return self._piece[self._at]

    def consume(self) -> None:
        """Reads the character that `peek` saw."""
        self._take_to(self._at + 1)

    def consume_run(self, pattern: "re.Pattern[str]") -> None:
        """Reads as much of this piece as matches from here on. The pattern looks at single characters only."""
        found = pattern.match(self._piece, self._at, self._at + min(self._room(), len(self._piece)))
        if found is not None:
            self._take_to(found.end())

    def consume_if(self, character: str) -> ParseSteps[bool]:
        if (yield from self.peek()) != character:
            return False
        self.consume()
        return True

    def read_run(self, pattern: "re.Pattern[str]") -> ParseSteps[str]:
        """Reads all characters that match, in however many pieces they come."""
        begin = self.num_held
        while (seen := (yield from self.peek())) and pattern.match(seen):
            self.consume_run(pattern)
        return self.held[begin:]

    def read_whitespace(self) -> ParseSteps[None]:
        while (seen := (yield from self.peek())) and seen in WHITESPACE:
            self.consume_run(_BLANKS)

    def read_one_of(self, words: Sequence[str]) -> ParseSteps[str | None]:
        """Reads one of the words, of which none begins another. None: what was read of it stays read, and the first
        character that did not fit is unread."""
        num_read = 0
        while True:
            seen = yield from self.peek()
            words = [word for word in words if seen and word[num_read] == seen]
            if not words:
                return None
            self.consume()
            num_read += 1
            if len(words[0]) == num_read:
                return words[0]

    def emit_until(self, word: str, event_of: Callable[[str], MessageEvent]) -> ParseSteps[bool]:
        """Tells everything in front of the word, and reads the word. False if the text ends without it."""
        assert word[0] not in word[1:], "so that a word that breaks off cannot hide the beginning of the next one"
        while True:
            if self._at == len(self._piece):
                yield from self._wait_for_text()
                if self._ended:
                    return False
            start = self._piece.find(word[0], self._at)
            self._take_to(len(self._piece) if start < 0 else start)
            self.emit_held(event_of)
            if start >= 0 and (yield from self.read_one_of((word,))):
                return True
            self.emit_held(event_of)

    def emit_rest(self, event_of: Callable[[str], MessageEvent]) -> ParseSteps[None]:
        """Everything up to the end of the text is this."""
        while True:
            self._take_to(len(self._piece))
            self.emit_held(event_of)
            yield from self._wait_for_text()
            if self._ended:
                return

    def _wait_for_text(self) -> ParseSteps[None]:
        if self._telling is not None:
            self.emit_held(self._telling)
        if not self._ended:
            yield

    def _room(self) -> int:
        return len(self._piece) if self._telling is not None else MAX_HELD_CHARS - self.num_held

    def _take_to(self, end: int) -> None:
        if end > self._at:
            self._held.append(self._piece[self._at : end])
            self.num_held += end - self._at
            self._at = end

    def _release(self) -> str:
        text = self.held
        self._held, self.num_held = [], 0
        return text
