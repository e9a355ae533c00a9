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

from onward.api.answer import Usage
from onward.api.dialect import Head
from onward.api.ledger import ABORT, RESCHEDULE
from onward.api.logprobs import TokenNames
from onward.api.pieces import Piece
from onward.api.responses.object import fields_of, usage_of
from onward.api.responses.request import ResponseRequest
from onward.api.responses.story import Story, Told
from onward.proto.request import ErrorInfo
from onward.proto.step import TokenLogprobs
from onward.text.message_events import EndTold, TokenTold
from onward.text.tool_calls.ids import IdStyle
from onward.web.response_failures import error_of

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

UsageOf = Callable[[int], Usage]
"""After so many tokens."""

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    number: int
    name: str
    data: bytes


@dataclass(slots=True)
class Group:
    """Events that whole tokens have brought about, and perhaps the end. A reader is given all of them or none."""

    token_ids: list[int] = field(default_factory=list)
    events: list[NumberedEvent] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class _End:
    step: EndTold
    reason: str
    error: ErrorInfo | None


class Teller:
    def __init__(self, head: Head, request: ResponseRequest, story: Story, usage_of_tokens: UsageOf) -> None:
        self.status: Status = "in_progress"
        self.num_events = 0
        self._head, self._request, self._story, self._usage_of = head, request, story, usage_of_tokens
        self._num_tokens = 0
        self._waiting: deque[tuple[TokenTold, int] | _End] = deque()
        self._scores: deque[TokenLogprobs] = deque()
        self._needs_scores = request.num_logprobs is not None
        self._error: ErrorInfo | None = None
        self._is_too_long = False

    @property
    def is_over(self) -> bool:
        return self.status not in ("in_progress", "queued")

    def opening(self) -> list[NumberedEvent]:
        response = self.response()
        return [self._numbered((name, {"response": response})) for name in ("response.created", "response.in_progress")]

    def take(self, piece: Piece) -> list[Group]:
        self._scores.extend(piece.logprobs or ())
        steps = piece.events or []
        tokens = [step for step in steps if isinstance(step, TokenTold)]
        self._waiting.extend(zip(tokens, piece.token_ids, strict=True))
        ends = [step for step in steps if isinstance(step, EndTold)]
        if piece.finish_reason is not None:
            self._waiting.append(_End(ends[-1] if ends else EndTold(()), piece.finish_reason, piece.error))
        return self._groups()

    def without_scores(self) -> list[Group]:
        """None will come: what waits for them is told without."""
        self._needs_scores = False
        return self._groups()

    def failed(self, error: ErrorInfo) -> NumberedEvent:
        self._cut("failed", error)
        return self._numbered(("response.failed", {"response": self.response()}))

    def cancelled(self) -> NumberedEvent:
        """There is no event of that name: for the stream it is an answer that is not whole."""
        self._cut("cancelled")
        return self._numbered(("response.incomplete", {"response": self.response()}))

    def _cut(self, status: Status, error: ErrorInfo | None = None) -> None:
        self._story.cut()
        self.status, self._error = status, error

    def response(self) -> dict[str, Any]:
        """As it stands."""
        usage = usage_of(self._usage_of(self._num_tokens), self._story.num_reasoning_tokens) if self.is_over else None
        details = {"reason": "max_output_tokens"} if self._is_too_long else None
        return fields_of(self._head, self._request) | {
            "status": self.status,
            "error": None if self._error is None else error_of(self._error),
            "incomplete_details": details,
            "output": self._story.output(),
            "usage": usage,
        }

    def _groups(self) -> list[Group]:
        groups = [Group()]
        while self._waiting and groups[-1].finish_reason is None:
            group, step = groups[-1], self._waiting[0]
            if isinstance(step, _End):
                self._end(group, step)
            elif self._needs_scores and not self._scores:
                break
            else:
                self._token(group, *step)
                if group.events:
                    groups.append(Group())
            self._waiting.popleft()
        return groups if groups[-1].token_ids or groups[-1].finish_reason is not None else groups[:-1]

    def _token(self, group: Group, step: TokenTold, token_id: int) -> None:
        score = self._scores.popleft() if self._scores else None
        group.events += map(self._numbered, self._story.token(step, token_id, score))
        group.token_ids.append(token_id)
        self._num_tokens += 1

    def _end(self, group: Group, end: _End) -> None:
        group.finish_reason = end.reason
        if end.reason == ABORT:
            group.events.append(self.cancelled())
            return
        if end.reason == RESCHEDULE:
            assert end.error is not None, "what is given up says why"
            group.events.append(self.failed(end.error))
            return
        group.events += map(self._numbered, self._story.end(end.step, end.reason))
        self._is_too_long = end.reason == "length"
        self.status = "incomplete" if self._is_too_long else "completed"
        group.events.append(self._numbered((f"response.{self.status}", {"response": self.response()})))

    def _numbered(self, told: Told) -> NumberedEvent:
        name, fields = told
        number = self.num_events
        self.num_events += 1
        return NumberedEvent(number, name, _encode({"type": name, "sequence_number": number} | fields))


def new_teller(
    head: Head,
    request: ResponseRequest,
    request_id: str,
    id_style: IdStyle,
    names: TokenNames,
    usage_of_tokens: UsageOf,
) -> Teller:
    story = Story(request_id, id_style, names if request.num_logprobs is not None else None)
    return Teller(head, request, story, usage_of_tokens)
