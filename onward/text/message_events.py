"""What a message's text turns out to be while it arrives: words, thoughts, calls of tools, or the marks around them.

Every event has in `text` the characters that it accounts for, marks included. The texts of all events, one behind the
other, are the text that the model wrote: nothing is lost, nothing is told twice, and the order is kept.
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
    """Marks of the format. Nobody is shown them."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    index: int
    """Counts the calls of one message."""
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A call's `delta`s, joined, are the JSON text of its arguments."""

    index: int
    delta: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    index: int
    is_complete: bool
    """Its arguments are a whole JSON object. If not, the text has ended or was no JSON from some character on."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class TokenEvents:
    """What one token has let be told, for those whose story must not depend on how the tokens came."""

    events: tuple["MessageEvent", ...]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)


@dataclass(frozen=True, slots=True)
class EndEvents:
    """What the end has let go of, for them."""

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
    | ToolCallEnded
    | TokenEvents
    | EndEvents
)


def join_events(first: MessageEvent, second: MessageEvent) -> MessageEvent | None:
    """Both as one event. None if they are about different things."""
    match first, second:
        case ContentText(), ContentText():
            return ContentText(first.text + second.text)
        case ReasoningText(), ReasoningText():
            return ReasoningText(first.text + second.text)
        case MarkupText(), MarkupText():
            return MarkupText(first.text + second.text)
        case ToolCallArguments(), ToolCallArguments() if first.index == second.index:
            return ToolCallArguments(first.index, first.delta + second.delta, first.text + second.text)
        case _:
            return None


def merge_events(events: Iterable[MessageEvent]) -> list[MessageEvent]:
    """The same story in as few events as can be. However a text was cut, this is the same."""
    merged: list[MessageEvent] = []
    for event in events:
        joined = join_events(merged[-1], event) if merged else None
        if joined is None:
            merged.append(event)
        else:
            merged[-1] = joined
    return merged
