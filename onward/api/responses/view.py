"""A response as a record has it: told again from its tokens, so a store of records is a store of responses.

Blocks while the prompt is made again and the tokens are told: for threads.
"""

from typing import Any

from msgspec.structs import replace

from onward.api.answer import Usage
from onward.api.choice import Choice
from onward.api.jobs import Jobs
from onward.api.ledger import GIVEN_UP, RESCHEDULE, Delivery
from onward.api.prepared import Prepared
from onward.api.responses.request import ResponseRequest
from onward.api.responses.teller import Group, NumberedEvent, Teller
from onward.api.responses.writer import ResponseWriter
from onward.proto.router import GivenChoice, Record
from onward.web.response_items import Item, items_of


class View:
    """Follows one response from record to record. `events`: all so far."""

    def __init__(self, jobs: Jobs, record: Record) -> None:
        prepared = jobs.of_attempt(record.attempt, 0.0, is_routed=False)
        assert isinstance(prepared, Prepared), "a response has no template of its own"
        assert isinstance(prepared.request, ResponseRequest)
        self.request: ResponseRequest = prepared.request
        self._prepared = prepared
        self._cached = self._num_scored = 0
        self._choice: Choice = jobs.retold(prepared)
        self._teller = self._new_teller(jobs, prepared)
        self.events: list[NumberedEvent] = self._teller.opening()
        self.take(record)

    @property
    def is_over(self) -> bool:
        return self._teller.is_over

    def take(self, record: Record) -> list[NumberedEvent]:
        """What a later record of it says beyond the earlier."""
        num_before = len(self.events)
        self._cached = record.attempt.num_cached_tokens or 0
        if not self.is_over:
            self._take_tokens(record)
        if not self.is_over and record.error is not None:
            self.events.append(self._teller.failed(record.error))
        if not self.is_over and record.is_cancelled:
            self.events.append(self._teller.cancelled())
        if not self.is_over:
            is_queued = self.request.is_background and not self._choice.token_ids
            self._teller.status = "queued" if is_queued else "in_progress"
        return self.events[num_before:]

    def response(self, record: Record) -> dict[str, Any]:
        """`record`: the one that was taken last."""
        told = self._teller.response()
        if not (self.is_over or record.is_live or self.request.is_background):
            told["status"] = "incomplete"  # its client has gone, and may come back
        return told

    def context(self) -> list[Item]:
        """All items up to here, for a response that goes on from it."""
        return [*self.request.said.context, *items_of(self.request.said.input), *self._teller.response()["output"]]

    def _take_tokens(self, record: Record) -> None:
        """Scores may be behind: whoever takes it up makes them again."""
        given = record.attempt.choices[0] if record.attempt.choices else GivenChoice()
        scores = record.scores[self._num_scored : len(given.token_ids)]
        # Where it was given up, a record of a router does not say why.
        error = GIVEN_UP if given.finish_reason == RESCHEDULE else None
        news = Delivery("", given.token_ids[self._choice.position :], None, given.finish_reason, error)
        groups: list[Group] = []
        if news.token_ids or scores or news.finish_reason is not None:
            self._num_scored += len(scores)
            groups += self._teller.take(replace(self._choice.take(news), logprobs=scores))
        if record.is_over and not record.is_live:
            groups += self._teller.without_scores()
        self.events += [event for group in groups for event in group.events]

    def _new_teller(self, jobs: Jobs, prepared: Prepared) -> Teller:
        writer = jobs.dialect.writer(prepared)
        assert isinstance(writer, ResponseWriter)
        num_prompt = len(prepared.prompts[0])
        return writer.teller(
            jobs.head_of(prepared.attempt), lambda num_tokens: Usage(num_prompt, num_tokens, self._cached)
        )
