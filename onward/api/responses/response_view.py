"""Rebuilds a response from a StreamRecord by replaying its tokens, so a store of records is a store of responses.

Tokenizing the prompt and replaying the tokens block, so a view is built in a thread.
"""

import dataclasses
from typing import Any

from msgspec.structs import replace

from onward.api.engine_link.request_tracker import PD_PREEMPTED, EngineOutput
from onward.api.lifecycle.choice_output import ChoiceOutput
from onward.api.lifecycle.event_groups import EventGroup, NamedEvent
from onward.api.lifecycle.request_builder import RequestBuilder
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.responses.chat_request import ResponseChatRequest
from onward.api.responses.event_builder import ResponseEventBuilder
from onward.api.responses.response_formatters import ResponseJsonWriter
from onward.proto.finish_reasons import PD_RESCHEDULE
from onward.proto.router import ChoiceSnapshot, StreamRecord
from onward.web.openai_api.response_items import Item, to_items


class ResponseView:
    """A response rebuilt from a record, and updated from later records. `events`: all events so far."""

    def __init__(self, builder: RequestBuilder, record: StreamRecord) -> None:
        prepared = builder.prepare_attempt(record.attempt, 0.0, is_routed=False)
        assert isinstance(prepared, PreparedRequest), "a response has no template of its own"
        assert isinstance(prepared.request, ResponseChatRequest)
        self.request: ResponseChatRequest = prepared.request
        self._prepared = prepared
        self._num_cached_tokens = self._num_scored = 0
        self._choice: ChoiceOutput = builder.replay_choice(prepared)
        self._event_builder = self._new_event_builder(builder, prepared)
        self.events: list[NamedEvent] = self._event_builder.opening()
        self.apply(record)

    @property
    def is_over(self) -> bool:
        return self._event_builder.is_over

    def apply(self, record: StreamRecord) -> list[NamedEvent]:
        """Applies a later record of the same response, and returns the new events."""
        num_before = len(self.events)
        self._num_cached_tokens = record.attempt.num_cached_tokens or 0
        self._event_builder.header = dataclasses.replace(
            self._event_builder.header, completed_s=record.attempt.completed_s
        )
        if not self.is_over:
            self._apply_tokens(record)
        if not self.is_over and record.error is not None:
            self.events.append(self._event_builder.fail(record.error))
        if not self.is_over and record.is_cancelled:
            self.events.append(self._event_builder.cancel())
        if not self.is_over:
            is_queued = self.request.is_background and not self._choice.token_ids
            self._event_builder.status = "queued" if is_queued else "in_progress"
        return self.events[num_before:]

    def response(self, record: StreamRecord) -> dict[str, Any]:
        """Returns the response object. `record`: the record that was applied last."""
        fields = self._event_builder.response()
        if not (self.is_over or record.is_live or self.request.is_background):
            fields["status"] = "incomplete"  # its client has disconnected, and may resume it
        return fields

    def context(self) -> list[Item]:
        """Returns all input and output items, for a response that continues from this one."""
        return [
            *self.request.body.context,
            *to_items(self.request.body.input),
            *self._event_builder.response()["output"],
        ]

    def _apply_tokens(self, record: StreamRecord) -> None:
        """Applies the record's new tokens. Its logprobs may be fewer than its tokens: a later attempt computes the rest."""
        snapshot = record.attempt.choices[0] if record.attempt.choices else ChoiceSnapshot()
        logprobs = record.logprobs[self._num_scored : len(snapshot.token_ids)]
        # A router's record of a response that was given up does not contain the cause.
        error = PD_PREEMPTED if snapshot.finish_reason == PD_RESCHEDULE else None
        output = EngineOutput("", snapshot.token_ids[self._choice.position :], None, snapshot.finish_reason, error)
        groups: list[EventGroup] = []
        if output.token_ids or logprobs or output.finish_reason is not None:
            self._num_scored += len(logprobs)
            groups += self._event_builder.apply(replace(self._choice.apply(output), logprobs=logprobs))
        if record.is_finished and not record.is_live:
            groups += self._event_builder.flush()
        self.events += [event for group in groups for event in group.events]

    def _new_event_builder(self, builder: RequestBuilder, prepared: PreparedRequest) -> ResponseEventBuilder:
        writer = builder.adapter.json_writer(prepared)
        assert isinstance(writer, ResponseJsonWriter)
        num_prompt_tokens = len(prepared.prompt_token_ids[0])
        return writer.event_builder(
            builder.object_header(prepared.attempt),
            lambda num_tokens: TokenUsage(num_prompt_tokens, num_tokens, self._num_cached_tokens),
        )
