"""Parses the text of one answer while it arrives: reasoning first, then content and tool calls.

The result is a function of the text so far, however it is cut. That makes an answer with tools resumable: replay the
text, drop the events that were sent, continue. Knows nothing of tokens, requests or JSON answers.
"""

from onward.text.incremental_parser import IncrementalParser
from onward.text.message_events import ContentText, MessageEvent, ToolCallEnded
from onward.text.tool_calls.custom_input import CustomCallConverter


class MessageParser:
    """Either parser may be missing, but not both. `max_calls`: the message ends with this number of tool calls.
    `custom_calls`: for requests with custom tools."""

    __slots__ = ("_call_parser", "_custom_calls", "_max_calls", "_reasoning_parser", "num_tool_calls", "stopped")

    def __init__(
        self,
        reasoning_parser: IncrementalParser | None,
        call_parser: IncrementalParser | None,
        max_calls: int | None = None,
        custom_calls: CustomCallConverter | None = None,
    ) -> None:
        self.num_tool_calls = 0
        """Tool calls that have ended."""
        self.stopped = False
        """The last call that may be made has ended with the newest text. What followed it there is gone, and nothing may
        be pushed."""
        self._reasoning_parser = reasoning_parser
        self._call_parser = call_parser
        self._max_calls = max_calls
        self._custom_calls = custom_calls

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
        """Ends the text, and returns its last events. Must not be called for a text that was interrupted and may
        continue elsewhere."""
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
        if self._custom_calls is not None:
            events = self._custom_calls.convert(events)
        for end, event in enumerate(events, start=1):
            if isinstance(event, ToolCallEnded):
                self.num_tool_calls += 1
                if self.num_tool_calls == self._max_calls:
                    self.stopped = True
                    return events[:end]
        return events
