"""The events into which a message's text is parsed while it arrives: content, reasoning, tool calls, and markup.

The `text` of an event contains the characters that it accounts for, markup included. The texts of all events together
are exactly the text that the model wrote, in order and without loss or repetition.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentText:
    """Words for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Words of the model to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class MarkupText:
    """Markup of the format, which is not shown to clients."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    index: int
    """Counts the calls of one message."""
    name: str
    text: str
    is_custom: bool = False
    """The call has an input in place of arguments."""


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A call's `delta`s, joined, are the JSON text of its arguments."""

    index: int
    delta: str
    text: str


@dataclass(frozen=True, slots=True)
class CustomToolInput:
    """A call's `delta`s, joined, are the input of a custom tool."""

    index: int
    delta: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    index: int
    is_complete: bool
    """The arguments are a complete JSON object. If not, the text ended early or became invalid JSON."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class TokenEvents:
    """The events that one token has completed, for formatters whose output must not depend on how tokens are
    grouped."""

    events: tuple["MessageEvent", ...]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)


@dataclass(frozen=True, slots=True)
class EndEvents:
    """The events that the end of the text has completed, for the same formatters."""

    events: tuple["MessageEvent", ...]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)


MessageEvent = (
    ContentText
    | ReasoningText
    | MarkupText
    | ToolCallStarted
    | ToolCallArguments
    | CustomToolInput
    | ToolCallEnded
    | TokenEvents
    | EndEvents
)


def join_events(first: MessageEvent, second: MessageEvent) -> MessageEvent | None:
    """Returns both events as one if they are text of the same kind, or parts of the arguments or input of the same
    call. Returns None otherwise."""
    match first, second:
        case ContentText(), ContentText():
            return ContentText(first.text + second.text)
        case ReasoningText(), ReasoningText():
            return ReasoningText(first.text + second.text)
        case MarkupText(), MarkupText():
            return MarkupText(first.text + second.text)
        case ToolCallArguments(), ToolCallArguments() if first.index == second.index:
            return ToolCallArguments(first.index, first.delta + second.delta, first.text + second.text)
        case CustomToolInput(), CustomToolInput() if first.index == second.index:
            return CustomToolInput(first.index, first.delta + second.delta, first.text + second.text)
        case _:
            return None


def merge_events(events: Iterable[MessageEvent]) -> list[MessageEvent]:
    """Returns the events with neighbours joined wherever possible. The result is the same however a text was cut into
    pieces."""
    merged: list[MessageEvent] = []
    for event in events:
        joined = join_events(merged[-1], event) if merged else None
        if joined is None:
            merged.append(event)
        else:
            merged[-1] = joined
    return merged
