"""A response as a record has it: told again from its tokens, so a store of records is a store of responses.

Blocks while the prompt is made again and the tokens are told: for threads.
"""

from typing import Any

from msgspec.structs import replace

from onward.api.engine_link.request_tracker import PD_PREEMPTED, EngineOutput
from onward.api.lifecycle.choice_output import ChoiceOutput
from onward.api.lifecycle.request_builder import RequestBuilder
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.responses.chat_request import ResponseChatRequest
from onward.api.responses.event_builder import EventGroup, ResponseEvent, ResponseEventBuilder
from onward.api.responses.response_formatters import ResponseJsonWriter
from onward.proto.finish_reasons import PD_RESCHEDULE
from onward.proto.router import ChoiceSnapshot, StreamRecord
from onward.web.openai_api.response_items import Item, to_items


class ResponseView:
    """Follows one response from record to record. `events`: all so far."""

    def __init__(self, builder: RequestBuilder, record: StreamRecord) -> None:
        prepared = builder.prepare_attempt(record.attempt, 0.0, is_routed=False)
        assert isinstance(prepared, PreparedRequest), "a response has no template of its own"
        assert isinstance(prepared.request, ResponseChatRequest)
        self.request: ResponseChatRequest = prepared.request
        self._prepared = prepared
        self._num_cached_tokens = self._num_scored = 0
        self._choice: ChoiceOutput = builder.replay_choice(prepared)
        self._event_builder = self._new_event_builder(builder, prepared)
        self.events: list[ResponseEvent] = self._event_builder.opening()
        self.apply(record)

    @property
    def is_over(self) -> bool:
        return self._event_builder.is_over

    def apply(self, record: StreamRecord) -> list[ResponseEvent]:
        """What a later record of it says beyond the earlier."""
        num_before = len(self.events)
        self._num_cached_tokens = record.attempt.num_cached_tokens or 0
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
        """`record`: the one that was taken last."""
        fields = self._event_builder.response()
        if not (self.is_over or record.is_live or self.request.is_background):
            fields["status"] = "incomplete"  # its client has gone, and may come back
        return fields

    def context(self) -> list[Item]:
        """All items up to here, for a response that goes on from it."""
        return [
            *self.request.body.context,
            *to_items(self.request.body.input),
            *self._event_builder.response()["output"],
        ]

    def _apply_tokens(self, record: StreamRecord) -> None:
        """Scores may be behind: whoever takes it up makes them again."""
        snapshot = record.attempt.choices[0] if record.attempt.choices else ChoiceSnapshot()
        logprobs = record.logprobs[self._num_scored : len(snapshot.token_ids)]
        # Where it was given up, a record of a router does not say why.
        error = PD_PREEMPTED if snapshot.finish_reason == PD_RESCHEDULE else None
        output = EngineOutput("", snapshot.token_ids[self._choice.position :], None, snapshot.finish_reason, error)
        groups: list[EventGroup] = []
        if output.token_ids or logprobs or output.finish_reason is not None:
            self._num_scored += len(logprobs)
            groups += self._event_builder.apply(replace(self._choice.apply(output), logprobs=logprobs))
        if record.is_finished and not record.is_live:
            groups += self._event_builder.flush_without_logprobs()
        self.events += [event for group in groups for event in group.events]

    def _new_event_builder(self, builder: RequestBuilder, prepared: PreparedRequest) -> ResponseEventBuilder:
        writer = builder.adapter.json_writer(prepared)
        assert isinstance(writer, ResponseJsonWriter)
        num_prompt_tokens = len(prepared.prompt_token_ids[0])
        return writer.event_builder(
            builder.object_header(prepared.attempt),
            lambda num_tokens: TokenUsage(num_prompt_tokens, num_tokens, self._num_cached_tokens),
        )
