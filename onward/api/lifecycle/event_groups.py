"""Groups of events. One token may cause several events, of which a reader gets all or none."""

from dataclasses import dataclass, field
from typing import Protocol

from onward.api.lifecycle.choice_update import ChoiceUpdate


@dataclass(frozen=True, slots=True)
class NamedEvent:
    name: str
    data: bytes


@dataclass(slots=True)
class EventGroup:
    """The events of one or more whole tokens, and perhaps of the end. A reader gets all of them or none."""

    token_ids: list[int] = field(default_factory=list)
    events: list[NamedEvent] = field(default_factory=list)
    finish_reason: str | None = None


class EventGroupBuilder(Protocol):
    """Makes the events of one response. They depend on the tokens alone, so a replay counts the events that a reader has
    had."""

    def opening(self) -> list[NamedEvent]:
        """Returns the events before the first token."""
        ...

    def apply(self, update: ChoiceUpdate) -> list[EventGroup]: ...
    def flush(self) -> list[EventGroup]:
        """Returns the groups that have waited for logprobs which will not come."""
        ...
