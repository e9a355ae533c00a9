"""The text of one output, parsed token by token: a `TextStream` followed by a parser. For outputs with tools or
reasoning.

As with plain text, the events up to a position are a function of the tokens up to there: replay the tokens, drop what
was sent, continue.
"""

from collections import deque
from collections.abc import Sequence

from onward.text.message_events import MessageEvent, ReasoningText, join_events
from onward.text.message_parser import MessageParser
from onward.text.text_stream import INTERRUPTED_REASONS, TextStream


class ParsedTextStream:
    __slots__ = ("_events", "_parser", "_reasoning_counter", "_text_stream")

    def __init__(self, text_stream: TextStream, parser: MessageParser) -> None:
        self._text_stream = text_stream
        self._parser = parser
        self._events: list[MessageEvent] = []
        self._reasoning_counter = ReasoningTokenCounter()

    @property
    def stopped(self) -> bool:
        """A stop string was completed by the newest token, or the last call that may be made has ended with it. Nothing may
        be pushed after that."""
        return self._text_stream.stopped or self._parser.stopped

    @property
    def stop_string(self) -> str | None:
        return self._text_stream.stop_string

    @property
    def num_tool_calls(self) -> int:
        """Calls that have ended."""
        return self._parser.num_tool_calls

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens, without the tags; None if reasoning is not parsed."""
        return self._reasoning_counter.count if self._parser.parses_reasoning else None

    def push(self, token_id: int) -> str:
        """Adds a token, and returns the text that may be shown now. The events of this text are left for
        `take_events`."""
        assert not self.stopped
        text = self._text_stream.push(token_id)
        self._reasoning_counter.push(text)
        self._append_events(self._parser.push(text) if text else [])
        return text

    def finish(self, reason: str) -> str:
        """Returns the rest of the text when the output has ended for this reason; its events are left for
        `take_events`. An interrupted output may continue elsewhere, so its held text is not emitted."""
        if self._parser.stopped or reason in INTERRUPTED_REASONS:
            return ""
        rest = self._text_stream.finish(reason)
        self._reasoning_counter.flush(rest)
        self._append_events(self._parser.push(rest) if rest else [])
        self._append_events(self._parser.finish())
        return rest

    def num_emitted_tokens(self, token_ids: Sequence[int]) -> int:
        """Returns how many of the pushed tokens, from the first on, have all of their text among the events.
        `token_ids` are all tokens that were pushed."""
        if self.stopped:
            return len(token_ids)
        return self._text_stream.num_emitted_tokens(token_ids, self._parser.num_held)

    def take_events(self) -> list[MessageEvent]:
        """Returns the events since the last call, merged into as few as possible."""
        events, self._events = self._events, []
        return events

    def _append_events(self, events: list[MessageEvent]) -> None:
        self._reasoning_counter.count_events(events)
        for event in events:
            joined = join_events(self._events[-1], event) if self._events else None
            if joined is None:
                self._events.append(event)
            else:
                self._events[-1] = joined


class ReasoningTokenCounter:
    """How many tokens of an output are reasoning, once it is known what their text says.

    A token is what its last character is; one that completes no character is what it becomes. So the count is a function of
    the tokens, like all events.
    """

    __slots__ = ("_num_classified", "_num_read", "_num_textless", "_unclassified", "count")

    def __init__(self) -> None:
        self.count = 0
        self._num_read = self._num_classified = 0
        """Characters."""
        self._num_textless = 0
        """Tokens that have shown no text yet."""
        self._unclassified: deque[tuple[int, int]] = deque()
        """Texts that are not classified yet: where each ends, and how many tokens it took."""

    def push(self, text: str) -> None:
        """Counts one more token, and adds the text that it has completed."""
        self._num_textless += 1
        self.flush(text)

    def flush(self, text: str) -> None:
        """Adds more text of the tokens that were pushed before."""
        if text:
            self._num_read += len(text)
            self._unclassified.append((self._num_read, self._num_textless))
            self._num_textless = 0

    def count_events(self, events: Sequence[MessageEvent]) -> None:
        for event in events:
            self._num_classified += len(event.text)
            while self._unclassified and self._unclassified[0][0] <= self._num_classified:
                _, num_tokens = self._unclassified.popleft()
                if isinstance(event, ReasoningText):
                    self.count += num_tokens
