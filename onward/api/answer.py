"""The answer to one request while it grows: tokens in, pieces of text out, one state per choice.

A function of the tokens, so it can be replayed. Knows nothing of sockets, JSON or the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from onward.api.ledger import Delivery
from onward.api.limits import first_end
from onward.proto.request import ErrorInfo
from onward.proto.sampling import Sampling

MAX_EVENT_TOKENS = 1024
"""A slow connection's tokens share events, but no event's cursor grows without bound."""


class Text(Protocol):
    """What `text.text_stream.TextStream` does."""

    @property
    def stopped(self) -> bool: ...
    def push(self, token_id: int) -> str: ...
    def finish(self, reason: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event says about one choice: whole tokens, their text, and perhaps the end."""

    choice: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None


@dataclass(slots=True)
class Choice:
    index: int
    request_id: str
    sampling: Sampling
    text: Text
    position: int = 0
    finish_reason: str | None = None
    num_cached_tokens: int = 0

    def replay(self, token_ids: Sequence[int]) -> Piece | None:
        """Goes to where an earlier answer stopped, without repeating its text. A piece if that was the end."""
        ended = first_end(token_ids, self.sampling)
        length, reason = ended or (len(token_ids), None)
        self._push(list(token_ids[:length]))
        rest = self._end("stop" if self.text.stopped else reason)
        # What was delivered up to here is the text of these tokens; only what the end lets go of is new.
        return None if self.finish_reason is None else Piece(self.index, [], rest, self.finish_reason)

    def take(self, token_ids: list[int], reason: str | None) -> Piece:
        taken, text = self._push(token_ids)
        text += self._end("stop" if self.text.stopped else reason)
        return Piece(self.index, taken, text, self.finish_reason)

    def _push(self, token_ids: list[int]) -> tuple[list[int], str]:
        """The tokens that belong to the output, none behind a stop string, and their text."""
        push, stream = self.text.push, self.text
        texts: list[str] = []
        for token_id in token_ids:
            texts.append(push(token_id))
            if stream.stopped:
                token_ids = token_ids[: len(texts)]
                break
        self.position += len(token_ids)
        return token_ids, "".join(texts)

    def _end(self, reason: str | None) -> str:
        self.finish_reason = reason
        return "" if reason is None else self.text.finish(reason)


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Progress:
    """What a batch of deliveries came to. After an error nothing follows."""

    pieces: list[Piece] = field(default_factory=list)
    stopped: list[Choice] = field(default_factory=list)
    """Ended by a stop string: the engine must be told."""
    error: ErrorInfo | None = None


class Answer:
    def __init__(self, num_prompt_tokens: int, choices: list[Choice]) -> None:
        self.choices = choices
        self._num_prompt_tokens = num_prompt_tokens
        self._by_id = {choice.request_id: choice for choice in choices}

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def take(self, deliveries: list[Delivery]) -> Progress:
        progress = Progress()
        for delivery in _merged(deliveries):
            choice = self._by_id[delivery.request_id]
            if choice.finish_reason is not None:
                continue
            choice.num_cached_tokens = delivery.num_cached_tokens or 0
            reason = None if delivery.error is not None else delivery.finish_reason
            if delivery.token_ids or reason is not None:
                progress.pieces.append(choice.take(delivery.token_ids, reason))
            if choice.finish_reason is not None and delivery.finish_reason is None:
                progress.stopped.append(choice)
            elif delivery.error is not None and choice.finish_reason is None:
                progress.error = delivery.error
                break
        return progress

    def usage(self) -> Usage:
        completion = sum(choice.position for choice in self.choices)
        return Usage(self._num_prompt_tokens, completion, self.choices[0].num_cached_tokens)


def _merged(deliveries: list[Delivery]) -> list[Delivery]:
    """What came for the same choice becomes one delivery, up to the size of an event."""
    if len(deliveries) == 1:
        return deliveries
    merged: list[Delivery] = []
    newest: dict[str, int] = {}
    for one in deliveries:
        index = newest.get(one.request_id)
        if index is None or len(merged[index].token_ids) + len(one.token_ids) > MAX_EVENT_TOKENS:
            newest[one.request_id] = len(merged)
            merged.append(one)
        else:
            tokens = merged[index].token_ids + one.token_ids
            merged[index] = Delivery(one.request_id, tokens, one.num_cached_tokens, one.finish_reason, one.error)
    return merged
