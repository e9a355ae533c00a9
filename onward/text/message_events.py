"""What a message's text turns out to be while it arrives: words, thoughts, calls of tools, or the marks around them.

Every event has in `text` the characters that it accounts for, marks included. The texts of all events, one behind the
other, are the text that the model wrote: nothing is lost, nothing is told twice, and the order is kept.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Words for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Words of the model to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Markup:
    """Marks of the format. Nobody is shown them."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    index: int
    """Counts the calls of one message."""
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A call's `delta`s, joined, are the JSON text of its arguments."""

    index: int
    delta: str
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    index: int
    is_complete: bool
    """Its arguments are a whole JSON object. If not, the text has ended or was no JSON from some character on."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class TokenTold:
    """What one token has let be told, for those whose story must not depend on how the tokens came."""

    events: tuple["Event", ...]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)


@dataclass(frozen=True, slots=True)
class EndTold:
    """What the end has let go of, for them."""

    events: tuple["Event", ...]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)


Event = Content | Reasoning | Markup | CallStarted | Arguments | CallEnded | TokenTold | EndTold


def joined(first: Event, second: Event) -> Event | None:
    """Both as one event. None if they are about different things."""
    match first, second:
        case Content(), Content():
            return Content(first.text + second.text)
        case Reasoning(), Reasoning():
            return Reasoning(first.text + second.text)
        case Markup(), Markup():
            return Markup(first.text + second.text)
        case Arguments(), Arguments() if first.index == second.index:
            return Arguments(first.index, first.delta + second.delta, first.text + second.text)
        case _:
            return None


def merged(events: Iterable[Event]) -> list[Event]:
    """The same story in as few events as can be. However a text was cut, this is the same."""
    told: list[Event] = []
    for event in events:
        both = joined(told[-1], event) if told else None
        if both is None:
            told.append(event)
        else:
            told[-1] = both
    return told
