"""The answer to one request while it grows: tokens in, pieces of text out, one state per choice.

A function of the tokens, so it can be replayed. A choice that the engine gives up (`pd_reschedule`) has ended, and the
others go on to their own ends; the answer is what was generated, unless that is nothing at all: then it is the error.
Knows nothing of sockets, JSON or the engine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from onward.api.ledger import RESCHEDULE, Delivery
from onward.api.limits import first_end
from onward.api.logprobs import PromptLogprobs, TextOffsets
from onward.proto.request import ErrorInfo
from onward.proto.sampling import Sampling
from onward.proto.step import TokenLogprobs

MAX_EVENT_TOKENS = 1024
"""A slow connection's tokens share events, but no event's cursor grows without bound."""


T = TypeVar("T")


class Text(Protocol):
    """What `text.text_stream.TextStream` does."""

    @property
    def stopped(self) -> bool: ...
    def push(self, token_id: int) -> str: ...
    def finish(self, reason: str) -> str: ...


class NoText:
    """For clients that speak in token ids: nothing is turned into text, so no text can end the output."""

    stopped = False

    def push(self, token_id: int) -> str:
        return ""

    def finish(self, reason: str) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event says about one choice: whole tokens, their text, and perhaps the end.

    The text may be behind the tokens (half a character, what may become a stop string); everything else belongs to
    exactly these tokens, logprobs also to tokens of an earlier answer that were scored again."""

    choice: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    """Where asked for: one for each of `scored_token_ids`."""
    text_offsets: list[int] | None = None
    """With `logprobs`: where each token begins in the choice's whole text."""
    prompt_logprobs: PromptLogprobs | None = None
    ended_by_token: bool = False
    """The last of `token_ids` ended the output."""
    rescored_token_ids: list[int] = field(default_factory=list)
    """Tokens of an earlier answer, in front of `token_ids`, whose logprobs only are told here."""
    completion_token_ids: list[int] | None = None
    """At the end of a choice, where the answer can be continued elsewhere: all of the choice's tokens."""
    error: ErrorInfo | None = None
    """Why the choice was given up."""

    @property
    def scored_token_ids(self) -> list[int]:
        return self.rescored_token_ids + self.token_ids


def joined(pieces: Sequence[Piece]) -> Piece:
    """All that was said about one choice, as one piece."""
    first, last = pieces[0], pieces[-1]
    return Piece(
        choice=first.choice,
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        text="".join(piece.text for piece in pieces),
        finish_reason=last.finish_reason,
        logprobs=_chained(piece.logprobs for piece in pieces),
        text_offsets=_chained(piece.text_offsets for piece in pieces),
        prompt_logprobs=first.prompt_logprobs,
        ended_by_token=last.ended_by_token,
        rescored_token_ids=[token_id for piece in pieces for token_id in piece.rescored_token_ids],
        completion_token_ids=last.completion_token_ids,
        error=last.error,
    )


@dataclass(frozen=True, slots=True)
class Unscored:
    """Given tokens whose logprobs are asked for again and have not come, and where they begin in the text."""

    token_ids: list[int]
    text_offsets: list[int]


@dataclass(slots=True)
class Choice:
    index: int
    request_id: str
    sampling: Sampling
    text: Text
    text_offsets: TextOffsets | None = None
    """Kept where logprobs are asked for."""
    token_ids: list[int] = field(default_factory=list)
    """All so far, those of earlier answers included."""
    finish_reason: str | None = None
    num_cached_tokens: int | None = None
    """None until the engine has said it."""
    unscored: Unscored | None = None

    @property
    def position(self) -> int:
        return len(self.token_ids)

    def replay(
        self, token_ids: Sequence[int], told_reason: str | None = None, rescore_from: int | None = None
    ) -> Piece | None:
        """Goes to where an earlier answer stopped, without repeating its text. A piece if that was the end.

        With `told_reason` the earlier answer has told the end too, so that nothing is new about it."""
        ended = first_end(token_ids, self.sampling)
        length, reason = ended or (len(token_ids), None)
        taken, _ = self._push(list(token_ids[:length]))
        offsets = self._place(taken)
        if rescore_from is not None and offsets is not None:
            self.unscored = Unscored(taken[rescore_from:], offsets[rescore_from:])
        if told_reason is not None:
            self.finish_reason = told_reason
            return Piece(self.index, [], "", told_reason)
        rest = self._end("stop" if self.text.stopped else reason)
        # What was delivered up to here is the text of these tokens; only what the end lets go of is new.
        return None if self.finish_reason is None else Piece(self.index, [], rest, self.finish_reason)

    def take(self, delivery: Delivery, prompt_logprobs: PromptLogprobs | None = None) -> Piece:
        taken, text = self._push(delivery.token_ids)
        reason = None if delivery.failed else delivery.finish_reason
        text += self._end("stop" if self.text.stopped else reason)
        piece = Piece(
            self.index,
            taken,
            text,
            self.finish_reason,
            delivery.logprobs[: len(taken)] if delivery.logprobs is not None else None,
            self._place(taken),
            prompt_logprobs,
            ended_by_token=self.finish_reason == "stop" and not self.text.stopped and bool(taken),
            error=delivery.error if self.finish_reason == RESCHEDULE else None,
        )
        return piece if delivery.rescored is None else self._with_scores(piece, delivery.rescored)

    def _with_scores(self, piece: Piece, rescored: list[TokenLogprobs]) -> Piece:
        assert self.unscored is not None, "they come once, and only if asked for"
        earlier, self.unscored = self.unscored, None
        return replace(
            piece,
            rescored_token_ids=earlier.token_ids,
            logprobs=rescored + (piece.logprobs or []),
            text_offsets=earlier.text_offsets + (piece.text_offsets or []),
        )

    def _push(self, token_ids: list[int]) -> tuple[list[int], str]:
        """The tokens that belong to the output, none behind a stop string, and their text."""
        push, stream = self.text.push, self.text
        texts: list[str] = []
        for token_id in token_ids:
            texts.append(push(token_id))
            if stream.stopped:
                token_ids = token_ids[: len(texts)]
                break
        self.token_ids += token_ids
        return token_ids, "".join(texts)

    def _place(self, token_ids: list[int]) -> list[int] | None:
        offsets = self.text_offsets
        return None if offsets is None else [offsets.push(token_id) for token_id in token_ids]

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
    def __init__(self, prompt_token_ids: list[int], choices: list[Choice]) -> None:
        self.choices = choices
        self._prompt_token_ids = prompt_token_ids
        self._by_id = {choice.request_id: choice for choice in choices}

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def rescheduled(self) -> bool:
        """Some choice was given up: what was generated is to be continued elsewhere."""
        return any(choice.finish_reason == RESCHEDULE for choice in self.choices)

    def take(self, deliveries: list[Delivery]) -> Progress:
        progress = Progress()
        for delivery in _merged(deliveries):
            choice = self._by_id[delivery.request_id]
            if choice.finish_reason is not None:
                continue
            if delivery.num_cached_tokens is not None:
                choice.num_cached_tokens = delivery.num_cached_tokens
            if delivery.token_ids or not delivery.failed:
                piece = choice.take(delivery, self._of_prompt(choice, delivery))
                progress.pieces.append(self.with_ids(piece))
            if choice.finish_reason is not None and delivery.finish_reason is None:
                progress.stopped.append(choice)
            elif delivery.failed and choice.finish_reason is None:
                progress.error = delivery.error
                break
            elif choice.finish_reason == RESCHEDULE and self.finished and not self.usage().completion_tokens:
                return Progress(error=delivery.error)
        return progress

    def with_ids(self, piece: Piece) -> Piece:
        """With all of its choice's tokens, if it ends in an answer that is to be continued."""
        if piece.finish_reason is None or not self.rescheduled:
            return piece
        return replace(piece, completion_token_ids=self.choices[piece.choice].token_ids)

    def usage(self) -> Usage:
        """The prompt counts once, as the first choice that was run has found it."""
        completion = sum(choice.position for choice in self.choices)
        known = (choice.num_cached_tokens for choice in self.choices if choice.num_cached_tokens is not None)
        return Usage(len(self._prompt_token_ids), completion, next(known, 0))

    def _of_prompt(self, choice: Choice, delivery: Delivery) -> PromptLogprobs | None:
        told, later_token_ids = delivery.prompt_logprobs, self._prompt_token_ids[1:]
        if told is None and not later_token_ids and choice.sampling.prompt_logprobs is not None and not choice.position:
            told = []  # asked for, and there are none
        return None if told is None else list(zip(later_token_ids, told, strict=True))


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
            merged[index] = _behind(merged[index], one)
    return merged


def _behind(first: Delivery, second: Delivery) -> Delivery:
    return Delivery(
        second.request_id,
        first.token_ids + second.token_ids,
        second.num_cached_tokens,
        second.finish_reason,
        second.error,
        _chained((first.logprobs, second.logprobs)),
        first.prompt_logprobs,
        first.rescored,
    )


def _chained(parts: Iterable[list[T] | None]) -> list[T] | None:
    """The parts' items in order. A part may be missing only where it would be empty, or all are."""
    there = [part for part in parts if part is not None]
    return [item for part in there for item in part] if there else None
