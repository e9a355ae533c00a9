"""Turns the ChoiceUpdates of a response into numbered events, and returns the response so far.

The number of an event is the number of events before it, and depends only on the tokens. So a reader that was cut off
sends the last number that it has, and any process that resumes the response knows which events remain. Logprobs may
arrive after their tokens if those of an earlier attempt are computed again; the events of these tokens wait for them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.endpoint_adapter import ObjectHeader
from onward.api.lifecycle.event_groups import EventGroup, NamedEvent
from onward.api.lifecycle.logprobs_json import TokenStrings
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.responses.chat_request import ResponseChatRequest
from onward.api.responses.item_events import ResponseItemEvents, item_json
from onward.api.responses.output_item_builder import EventFields, OutputItemBuilder
from onward.proto.engine import ErrorInfo
from onward.proto.finish_reasons import ABORT, PD_RESCHEDULE
from onward.proto.step import TokenLogprobs
from onward.text.message_events import EndEvents, TokenEvents
from onward.text.tool_calls.call_ids import IdStyle
from onward.web.error_format import response_error_fields
from onward.web.openai_api.response_object import response_object
from onward.web.openai_api.response_tools import namespaced_names

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

UsageFunction = Callable[[int], TokenUsage]
"""Returns the usage after this number of tokens."""

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class _PendingEnd:
    step: EndEvents
    reason: str
    error: ErrorInfo | None


class ResponseEventBuilder:
    def __init__(
        self,
        header: ObjectHeader,
        request: ResponseChatRequest,
        item_builder: OutputItemBuilder,
        usage_of: UsageFunction,
    ) -> None:
        self.status: ResponseStatus = "in_progress"
        self.num_events = 0
        self.header = header
        """Its owner replaces it once the output is complete."""
        self._request, self._items, self._usage_of = request, item_builder, usage_of
        self._num_tokens = 0
        self._pending_steps: deque[tuple[TokenEvents, int] | _PendingEnd] = deque()
        self._logprobs: deque[TokenLogprobs] = deque()
        self._needs_logprobs = request.num_logprobs is not None
        self._error: ErrorInfo | None = None
        self._is_too_long = False

    @property
    def is_over(self) -> bool:
        return self.status not in ("in_progress", "queued")

    def opening(self) -> list[NamedEvent]:
        response = self.response()
        return [self._numbered((name, {"response": response})) for name in ("response.created", "response.in_progress")]

    def apply(self, update: ChoiceUpdate) -> list[EventGroup]:
        self._logprobs.extend(update.logprobs or ())
        steps = update.events or []
        tokens = [step for step in steps if isinstance(step, TokenEvents)]
        self._pending_steps.extend(zip(tokens, update.token_ids, strict=True))
        ends = [step for step in steps if isinstance(step, EndEvents)]
        if update.finish_reason is not None:
            self._pending_steps.append(
                _PendingEnd(ends[-1] if ends else EndEvents(()), update.finish_reason, update.error)
            )
        return self._groups()

    def flush(self) -> list[EventGroup]:
        """Returns the events that have waited for logprobs, without those that have not arrived, since none will
        come. From now on no event waits for logprobs."""
        self._needs_logprobs = False
        return self._groups()

    def fail(self, error: ErrorInfo) -> NamedEvent:
        self._end_early("failed", error)
        return self._numbered(("response.failed", {"response": self.response()}))

    def cancel(self) -> NamedEvent:
        """Ends the response as cancelled. OpenAI has no event for that, so the stream gets `response.incomplete`."""
        self._end_early("cancelled")
        return self._numbered(("response.incomplete", {"response": self.response()}))

    def _end_early(self, status: ResponseStatus, error: ErrorInfo | None = None) -> None:
        self._items.mark_incomplete()
        self.status, self._error = status, error

    def response(self) -> dict[str, Any]:
        """Returns the response object so far."""
        usage = (
            response_usage(self._usage_of(self._num_tokens), self._items.num_reasoning_tokens) if self.is_over else None
        )
        details = {"reason": "max_output_tokens"} if self._is_too_long else None
        return response_object(
            self._request.body,
            response_id=self.header.id,
            created_s=self.header.created_s,
            model=self.header.model,
            status=self.status,
            completed_at=self.header.completed_s if self.status == "completed" else None,
            error=None if self._error is None else response_error_fields(self._error),
            incomplete_details=details,
            output=[item_json(item) for item in self._items.items],
            usage=usage,
        )

    def _groups(self) -> list[EventGroup]:
        groups = [EventGroup()]
        while self._pending_steps and groups[-1].finish_reason is None:
            group, step = groups[-1], self._pending_steps[0]
            if isinstance(step, _PendingEnd):
                self._apply_end(group, step)
            elif self._needs_logprobs and not self._logprobs:
                break
            else:
                self._apply_token(group, *step)
                if group.events:
                    groups.append(EventGroup())
            self._pending_steps.popleft()
        return groups if groups[-1].token_ids or groups[-1].finish_reason is not None else groups[:-1]

    def _apply_token(self, group: EventGroup, step: TokenEvents, token_id: int) -> None:
        logprobs = self._logprobs.popleft() if self._logprobs else None
        group.events += map(self._numbered, self._items.token(step, token_id, logprobs))
        group.token_ids.append(token_id)
        self._num_tokens += 1

    def _apply_end(self, group: EventGroup, end: _PendingEnd) -> None:
        group.finish_reason = end.reason
        if end.reason == ABORT:
            group.events.append(self.cancel())
            return
        if end.reason == PD_RESCHEDULE:
            assert end.error is not None, "what is given up says why"
            group.events.append(self.fail(end.error))
            return
        group.events += map(self._numbered, self._items.end(end.step, end.reason))
        self._is_too_long = end.reason == "length"
        self.status = "incomplete" if self._is_too_long else "completed"
        group.events.append(self._numbered((f"response.{self.status}", {"response": self.response()})))

    def _numbered(self, event: EventFields) -> NamedEvent:
        name, fields = event
        number = self.num_events
        self.num_events += 1
        return NamedEvent(name, _encode({"type": name, "sequence_number": number} | fields))


def make_event_builder(
    header: ObjectHeader,
    request: ResponseChatRequest,
    request_id: str,
    id_style: IdStyle,
    token_strings: TokenStrings,
    usage_of: UsageFunction,
) -> ResponseEventBuilder:
    item_builder = OutputItemBuilder(
        request_id,
        id_style,
        token_strings if request.num_logprobs is not None else None,
        ResponseItemEvents(),
        namespaced_names=namespaced_names(request.body.tools),
    )
    return ResponseEventBuilder(header, request, item_builder, usage_of)


def response_usage(usage: TokenUsage, num_reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
