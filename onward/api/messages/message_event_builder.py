"""Turns the ChoiceUpdates of a message into stream events, and returns the message so far.

The events of a token depend only on the tokens. An attempt that resumes a message replays the tokens and sends the next
event with the same index and the same id of a tool call. `message_start` is sent with the first token, since its usage
includes the prompt tokens that were found in the cache.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.endpoint_adapter import ObjectHeader
from onward.api.lifecycle.event_groups import EventGroup, NamedEvent
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.lifecycle.resume_fields import choice_resume_fields
from onward.api.messages.block_events import MessageBlockEvents
from onward.api.responses.output_item_builder import EventFields, OutputItemBuilder
from onward.proto.finish_reasons import INCOMPLETE_REASONS
from onward.text.message_events import EndEvents, MessageEvent, TokenEvents, merge_events
from onward.text.tool_calls.call_ids import IdStyle

UsageFunction = Callable[[int | None], TokenUsage]
"""Returns the usage after this number of tokens; None: after all tokens so far."""
ResumeFields = Callable[[], dict[str, Any]]
"""Returns the fields by which a client continues a message that was cut."""

_PING: EventFields = ("ping", {})
_NO_STOP: dict[str, Any] = {"stop_reason": None, "stop_sequence": None, "stop_details": None}
_NO_DETAILS: dict[str, Any] = {"output_tokens_details": None, "server_tool_use": None}
_WHOLE_USAGE: dict[str, Any] = {
    "cache_creation": None,
    "inference_geo": None,
    "speed": None,
    "service_tier": "standard",
}
"""Clients' types require these fields even where there is nothing to report."""


class MessageEventBuilder:
    """An `EventGroupBuilder` for the events of the Messages API."""

    def __init__(
        self,
        header: ObjectHeader,
        request_id: str,
        id_style: IdStyle,
        usage_of: UsageFunction,
        resume_fields: ResumeFields,
        *,
        shows_thinking: bool,
    ) -> None:
        self._header, self._usage_of, self._resume_fields = header, usage_of, resume_fields
        # A message that is cut states how many of its tokens its text covers, so leading space is not held back.
        self._blocks = MessageBlockEvents(shows_thinking=shows_thinking)
        self._items = OutputItemBuilder(request_id, id_style, None, self._blocks, holds_leading_space=False)
        self._has_started = False
        self._stop = _NO_STOP
        self._extra_fields: dict[str, Any] = {}

    def opening(self) -> list[NamedEvent]:
        return []

    def apply(self, update: ChoiceUpdate) -> list[EventGroup]:
        steps = [step for step in update.events or [] if isinstance(step, TokenEvents)]
        groups: list[EventGroup] = []
        for step, token_id in zip(steps, update.token_ids, strict=True):
            group = self._last_group(groups)
            group.token_ids.append(token_id)
            group.events += self._token_events(step, token_id)
        if update.finish_reason is not None:
            ends = [step for step in update.events or [] if isinstance(step, EndEvents)]
            group = self._last_group(groups)
            group.finish_reason = update.finish_reason
            group.events += self._end_events(update, ends[-1] if ends else EndEvents(()))
        return groups

    def flush(self) -> list[EventGroup]:
        return []

    def message(self) -> dict[str, Any]:
        """Returns the message so far."""
        return self._message([self._blocks.block(item) for item in self._items.items], self._usage_of(None))

    @staticmethod
    def _last_group(groups: list[EventGroup]) -> EventGroup:
        """Returns the group of the next token. Tokens without events share the group of the next token with events."""
        if not groups or groups[-1].events:
            groups.append(EventGroup())
        return groups[-1]

    def _token_events(self, step: TokenEvents, token_id: int) -> list[NamedEvent]:
        return [*self._start_events(), *map(_named, self._items.token(step, token_id, None))]

    def _start_events(self) -> list[NamedEvent]:
        if self._has_started:
            return []
        self._has_started = True
        message = self._message([], self._usage_of(0))
        return [_named(("message_start", {"message": message})), _named(_PING)]

    def _end_events(self, update: ChoiceUpdate, step: EndEvents) -> list[NamedEvent]:
        reason = update.finish_reason
        assert reason is not None, "an end has a reason"
        start = self._start_events()
        if reason in INCOMPLETE_REASONS:
            self._extra_fields = choice_resume_fields(update) | self._resume_fields()
            block_events = self._items.cut()
        else:
            self._stop = stop_fields(update)
            block_events = self._items.end(step, reason)
        delta = {
            "delta": {"container": None, **self._stop},
            "usage": usage_json(self._usage_of(None)),
            **self._extra_fields,
        }
        return [*start, *map(_named, [*block_events, ("message_delta", delta), ("message_stop", {})])]

    def _message(self, content: list[dict[str, Any]], usage: TokenUsage) -> dict[str, Any]:
        return {
            "id": self._header.id,
            "type": "message",
            "role": "assistant",
            "model": self._header.model,
            "content": content,
            "container": None,
            "diagnostics": None,
            **self._stop,
            "usage": usage_json(usage) | _WHOLE_USAGE,
            **self._extra_fields,
        }


def stop_fields(update: ChoiceUpdate) -> dict[str, Any]:
    """Returns the stop fields of the Messages API for a choice that is complete."""
    matched = update.matched_stop
    if update.has_tool_calls and update.finish_reason == "stop" and not isinstance(matched, str):
        reason = "tool_use"
    elif update.finish_reason == "length":
        reason = "max_tokens"
    elif isinstance(matched, str):
        return _NO_STOP | {"stop_reason": "stop_sequence", "stop_sequence": matched}
    else:
        reason = "end_turn"
    return _NO_STOP | {"stop_reason": reason}


def usage_json(usage: TokenUsage) -> dict[str, Any]:
    """Returns the usage in Anthropic's format. `input_tokens` does not count the prompt tokens found in the cache."""
    fields: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **_NO_DETAILS,
    }
    if usage.reasoning_tokens is not None:
        fields["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return fields


def with_merged_steps(update: ChoiceUpdate) -> ChoiceUpdate:
    """Returns the same update with the events of all its tokens merged into as few as possible, at its last token."""
    steps = [step for step in update.events or [] if isinstance(step, TokenEvents)]
    events: list[MessageEvent] = [event for step in steps for event in step.events]
    ends = [step for step in update.events or [] if isinstance(step, EndEvents)]
    if not steps:
        return update
    silent = [TokenEvents(()) for _ in steps[1:]]
    return msgspec.structs.replace(update, events=[*silent, TokenEvents(tuple(merge_events(events))), *ends])


def _named(event: EventFields) -> NamedEvent:
    name, fields = event
    return NamedEvent(name, msgspec.json.encode({"type": name} | fields))
