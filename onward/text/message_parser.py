"""The text of one answer taken apart while it arrives: thinking first, then words and calls of tools.

A function of the text so far, however it is cut. That is what makes an answer with tools resumable: replay the text, drop
what was told, go on. Knows nothing of tokens, requests or JSON answers.
"""

from onward.text.incremental_parser import IncrementalParser
from onward.text.message_events import ContentText, MessageEvent, ToolCallEnded


class MessageParser:
    """Either parser may be missing; without both there is no need for this. `max_calls`: the answer is over when so many
    calls have ended."""

    __slots__ = ("_call_parser", "_max_calls", "_reasoning_parser", "num_tool_calls", "stopped")

    def __init__(
        self,
        reasoning_parser: IncrementalParser | None,
        call_parser: IncrementalParser | None,
        max_calls: int | None = None,
    ) -> None:
        self.num_tool_calls = 0
        """Those that have ended."""
        self.stopped = False
        """The last call that may be made has ended with the newest text. What followed it there is gone, and nothing may
        be pushed."""
        self._reasoning_parser = reasoning_parser
        self._call_parser = call_parser
        self._max_calls = max_calls

    @property
    def parses_reasoning(self) -> bool:
        return self._reasoning_parser is not None

    @property
    def num_held(self) -> int:
        """Characters that were pushed and are not part of any event yet."""
        return sum(parser.num_held for parser in (self._reasoning_parser, self._call_parser) if parser is not None)

    def push(self, text: str) -> list[MessageEvent]:
        assert not self.stopped
        if self._reasoning_parser is None:
            return self._call_events([ContentText(text)] if text else [])
        return self._call_events(self._reasoning_parser.push(text))

    def finish(self) -> list[MessageEvent]:
        """The text has ended. Not for one that was cut and may go on elsewhere."""
        if self.stopped:
            return []
        parsed = self._call_events(self._reasoning_parser.finish() if self._reasoning_parser else [])
        if self._call_parser is None or self.stopped:
            return parsed
        return parsed + self._count_calls(self._call_parser.finish())

    def _call_events(self, events: list[MessageEvent]) -> list[MessageEvent]:
        if self._call_parser is None:
            return events
        parsed: list[MessageEvent] = []
        for event in events:
            if isinstance(event, ContentText):
                parsed += self._count_calls(self._call_parser.push(event.text))
            else:
                parsed.append(event)
            if self.stopped:
                break
        return parsed

    def _count_calls(self, events: list[MessageEvent]) -> list[MessageEvent]:
        for end, event in enumerate(events, start=1):
            if isinstance(event, ToolCallEnded):
                self.num_tool_calls += 1
                if self.num_tool_calls == self._max_calls:
                    self.stopped = True
                    return events[:end]
        return events
