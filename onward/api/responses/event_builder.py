"""A response while it grows: pieces of an answer in, numbered events out, and the response itself as it stands.

The number of an event is how many came before it, and depends on nothing but the tokens: so a reader that was cut off says
the last number it has, and whoever goes on, here or elsewhere, knows what is left to tell. Logprobs may be behind the
tokens, where those of an earlier attempt are made again; tokens wait for theirs.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.api.lifecycle.endpoint_adapter import ObjectHeader
from onward.api.lifecycle.logprobs_json import TokenStrings
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.responses.chat_request import ResponseChatRequest
from onward.api.responses.output_item_builder import EventFields, OutputItemBuilder
from onward.proto.engine import ErrorInfo
from onward.proto.finish_reasons import ABORT, PD_RESCHEDULE
from onward.proto.step import TokenLogprobs
from onward.text.message_events import EndEvents, TokenEvents
from onward.text.tool_calls.call_ids import IdStyle
from onward.web.error_format import response_error_fields

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

UsageFunction = Callable[[int], TokenUsage]
"""After so many tokens."""

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class ResponseEvent:
    sequence_number: int
    name: str
    data: bytes


@dataclass(slots=True)
class EventGroup:
    """Events that whole tokens have brought about, and perhaps the end. A reader is given all of them or none."""

    token_ids: list[int] = field(default_factory=list)
    events: list[ResponseEvent] = field(default_factory=list)
    finish_reason: str | None = None


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
        self._header, self._request, self._items, self._usage_of = header, request, item_builder, usage_of
        self._num_tokens = 0
        self._pending_steps: deque[tuple[TokenEvents, int] | _PendingEnd] = deque()
        self._logprobs: deque[TokenLogprobs] = deque()
        self._needs_logprobs = request.num_logprobs is not None
        self._error: ErrorInfo | None = None
        self._is_too_long = False

    @property
    def is_over(self) -> bool:
        return self.status not in ("in_progress", "queued")

    def opening(self) -> list[ResponseEvent]:
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

    def flush_without_logprobs(self) -> list[EventGroup]:
        """None will come: what waits for them is told without."""
        self._needs_logprobs = False
        return self._groups()

    def fail(self, error: ErrorInfo) -> ResponseEvent:
        self._end_early("failed", error)
        return self._numbered(("response.failed", {"response": self.response()}))

    def cancel(self) -> ResponseEvent:
        """There is no event of that name: for the stream it is an answer that is not whole."""
        self._end_early("cancelled")
        return self._numbered(("response.incomplete", {"response": self.response()}))

    def _end_early(self, status: ResponseStatus, error: ErrorInfo | None = None) -> None:
        self._items.mark_incomplete()
        self.status, self._error = status, error

    def response(self) -> dict[str, Any]:
        """As it stands."""
        usage = (
            response_usage(self._usage_of(self._num_tokens), self._items.num_reasoning_tokens) if self.is_over else None
        )
        details = {"reason": "max_output_tokens"} if self._is_too_long else None
        return response_fields(self._header, self._request) | {
            "status": self.status,
            "error": None if self._error is None else response_error_fields(self._error),
            "incomplete_details": details,
            "output": self._items.output(),
            "usage": usage,
        }

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

    def _numbered(self, event: EventFields) -> ResponseEvent:
        name, fields = event
        number = self.num_events
        self.num_events += 1
        return ResponseEvent(number, name, _encode({"type": name, "sequence_number": number} | fields))


def make_event_builder(
    header: ObjectHeader,
    request: ResponseChatRequest,
    request_id: str,
    id_style: IdStyle,
    token_strings: TokenStrings,
    usage_of: UsageFunction,
) -> ResponseEventBuilder:
    item_builder = OutputItemBuilder(request_id, id_style, token_strings if request.num_logprobs is not None else None)
    return ResponseEventBuilder(header, request, item_builder, usage_of)


def response_fields(header: ObjectHeader, request: ResponseChatRequest) -> dict[str, Any]:
    """The fields of a response object that do not change while the answer is made."""
    body = request.body
    return {
        "id": header.id,
        "object": "response",
        "created_at": header.created_s,
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": header.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": request.reasoning_effort, "summary": None},
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"} if body.text is None or body.text.format is None else body.text.format},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
        "metadata": body.metadata or {},
    }


def response_usage(usage: TokenUsage, num_reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
