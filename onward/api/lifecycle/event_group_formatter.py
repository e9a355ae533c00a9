"""Writes a response as a stream of typed events, for a client or for a router.

One token may cause several events, of which the last has the `id:` line; the router passes them on together. An attempt
that resumes a response replays the tokens whose events the reader has had, and sends none of these events.
"""

from collections.abc import Sequence

from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.event_groups import EventGroup, EventGroupBuilder, NamedEvent
from onward.api.lifecycle.request_builder import ActiveRequest
from onward.api.lifecycle.resume import prior_choices
from onward.api.lifecycle.stream_formatters import CursorTracker, PromptUsageEvent, StreamFormatter
from onward.proto.cursor import ChoiceCursor
from onward.web import sse


class EventGroupFormatter(StreamFormatter):
    """Formats the event groups of a builder. `for_router`: the events are for a router, which gets additional ones."""

    def __init__(self, active: ActiveRequest, builder: EventGroupBuilder, *, for_router: bool) -> None:
        self.active = active
        self.for_router = for_router
        self.terminator = sse.DONE if for_router else b""
        """A client needs no `[DONE]`, since the type of the last event shows that it is the last."""
        self._event_builder = builder
        prior = prior_choices(active.prepared)[0]
        self._num_sent = len(prior.token_ids)
        """Number of tokens that the reader has: an earlier attempt sent their events, or the client sent the tokens."""
        self._is_end_sent = prior.finish_reason is not None
        self._num_applied = 0
        self._cursors = CursorTracker(active.prepared.attempt, [self._num_sent], [ChoiceCursor(self._num_sent)])
        self._prompt_usage = PromptUsageEvent(active) if for_router else None

    def format_opening(self) -> list[bytes]:
        opening = [self._held_event(event) for event in self._event_builder.opening()]
        replayed = self.format_updates(self.active.replayed_updates)
        return replayed if self.active.prepared.is_resumed else opening + replayed

    def format_updates(self, updates: list[ChoiceUpdate]) -> list[bytes]:
        events = [] if self._prompt_usage is None else self._prompt_usage.event_before(updates)
        for update in updates:
            for group in self._event_builder.apply(update):
                events += self._format_group(group, is_known=update.is_known_to_reader)
        return events

    def format_end(self) -> list[bytes]:
        """Returns the events that have waited for logprobs which did not come."""
        return [event for group in self._event_builder.flush() for event in self._format_group(group, is_known=False)]

    def _format_group(self, group: EventGroup, *, is_known: bool) -> list[bytes]:
        num_known = max(0, self._num_sent - self._num_applied)
        self._num_applied += len(group.token_ids)
        new_token_ids, finish_reason = group.token_ids[num_known:], group.finish_reason
        if not new_token_ids and (finish_reason is None or self._is_end_sent):
            # A new response has the events of the tokens that its client has sent. The cursor already counts these tokens.
            return [] if self.active.prepared.is_resumed else self._held_events(group.events)
        cursor = self._cursors.advance(ChoiceUpdate(0, new_token_ids, "", finish_reason))
        assert cursor is not None, "the group has tokens or an end that the client does not have"
        if is_known or not group.events:
            return self._silent_tokens(cursor)
        *held, last = group.events
        return [*self._held_events(held), event_bytes(last, cursor)]

    def _held_events(self, events: Sequence[NamedEvent]) -> list[bytes]:
        return [self._held_event(event) for event in events]

    def _held_event(self, event: NamedEvent) -> bytes:
        """Formats an event that a router delivers together with the next event that has a cursor."""
        return sse.HELD_COMMENT + event_bytes(event) if self.for_router else event_bytes(event)

    def _silent_tokens(self, cursor: str) -> list[bytes]:
        """Formats tokens that have no event for the client yet. A router gets their cursor."""
        return [sse.cursor_event(cursor)] if self.for_router else []


def event_bytes(event: NamedEvent, cursor: str | None = None) -> bytes:
    return sse.named_event(event.name, event.data, cursor)
