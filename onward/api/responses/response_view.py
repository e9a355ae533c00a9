"""A response as a record has it: told again from its tokens, so a store of records is a store of responses.

Blocks while the prompt is made again and the tokens are told: for threads.
"""

from typing import Any

from msgspec.structs import replace

from onward.api.engine_link.request_tracker import PD_PREEMPTED, PD_RESCHEDULE, EngineOutput
from onward.api.lifecycle.active_choice import ActiveChoice
from onward.api.lifecycle.request_builder import RequestBuilder
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.responses.chat_request import ResponseChatRequest
from onward.api.responses.event_builder import EventGroup, ResponseEvent, ResponseEventBuilder
from onward.api.responses.response_json import ResponseJsonWriter
from onward.proto.router import ChoiceSnapshot, StreamRecord
from onward.web.openai_api.response_items import Item, to_items


class ResponseView:
    """Follows one response from record to record. `events`: all so far."""

    def __init__(self, jobs: RequestBuilder, record: StreamRecord) -> None:
        prepared = jobs.prepare_attempt(record.attempt, 0.0, is_routed=False)
        assert isinstance(prepared, PreparedRequest), "a response has no template of its own"
        assert isinstance(prepared.request, ResponseChatRequest)
        self.request: ResponseChatRequest = prepared.request
        self._prepared = prepared
        self._cached = self._num_scored = 0
        self._choice: ActiveChoice = jobs.replay_choice(prepared)
        self._teller = self._new_teller(jobs, prepared)
        self.events: list[ResponseEvent] = self._teller.opening()
        self.apply(record)

    @property
    def is_over(self) -> bool:
        return self._teller.is_over

    def apply(self, record: StreamRecord) -> list[ResponseEvent]:
        """What a later record of it says beyond the earlier."""
        num_before = len(self.events)
        self._cached = record.attempt.num_cached_tokens or 0
        if not self.is_over:
            self._take_tokens(record)
        if not self.is_over and record.error is not None:
            self.events.append(self._teller.fail(record.error))
        if not self.is_over and record.is_cancelled:
            self.events.append(self._teller.cancel())
        if not self.is_over:
            is_queued = self.request.is_background and not self._choice.token_ids
            self._teller.status = "queued" if is_queued else "in_progress"
        return self.events[num_before:]

    def response(self, record: StreamRecord) -> dict[str, Any]:
        """`record`: the one that was taken last."""
        told = self._teller.response()
        if not (self.is_over or record.is_live or self.request.is_background):
            told["status"] = "incomplete"  # its client has gone, and may come back
        return told

    def context(self) -> list[Item]:
        """All items up to here, for a response that goes on from it."""
        return [*self.request.body.context, *to_items(self.request.body.input), *self._teller.response()["output"]]

    def _take_tokens(self, record: StreamRecord) -> None:
        """Scores may be behind: whoever takes it up makes them again."""
        given = record.attempt.choices[0] if record.attempt.choices else ChoiceSnapshot()
        scores = record.logprobs[self._num_scored : len(given.token_ids)]
        # Where it was given up, a record of a router does not say why.
        error = PD_PREEMPTED if given.finish_reason == PD_RESCHEDULE else None
        news = EngineOutput("", given.token_ids[self._choice.position :], None, given.finish_reason, error)
        groups: list[EventGroup] = []
        if news.token_ids or scores or news.finish_reason is not None:
            self._num_scored += len(scores)
            groups += self._teller.apply(replace(self._choice.apply(news), logprobs=scores))
        if record.is_finished and not record.is_live:
            groups += self._teller.flush_without_logprobs()
        self.events += [event for group in groups for event in group.events]

    def _new_teller(self, jobs: RequestBuilder, prepared: PreparedRequest) -> ResponseEventBuilder:
        writer = jobs.adapter.json_writer(prepared)
        assert isinstance(writer, ResponseJsonWriter)
        num_prompt = len(prepared.prompt_token_ids[0])
        return writer.event_builder(
            jobs.object_header(prepared.attempt), lambda num_tokens: TokenUsage(num_prompt, num_tokens, self._cached)
        )
