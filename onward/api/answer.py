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
from onward.proto.cursor import ChoiceCursor
from onward.proto.request import ErrorInfo
from onward.proto.sampling import Sampling
from onward.proto.step import TokenLogprobs

MADE_DIFFERENTLY = ErrorInfo(
    "stream_unknown", "the stream is not held by anyone, and what was made again is not what was sent before", 409
)
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
    skipped: bool = False
    """The client has this already: it was made again only because nobody else had kept its tokens."""

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
        prompt_logprobs=next((one.prompt_logprobs for one in pieces if one.prompt_logprobs is not None), None),
        ended_by_token=last.ended_by_token,
        rescored_token_ids=[token_id for piece in pieces for token_id in piece.rescored_token_ids],
        completion_token_ids=last.completion_token_ids,
        error=last.error,
    )


@dataclass(frozen=True, slots=True)
class Start:
    """Where a choice goes on from, and how much of that the client is told."""

    token_ids: Sequence[int] = ()
    told_reason: str | None = None
    """How the choice has ended, where an earlier answer has told it."""
    repeats_end: bool = True
    """Whether that end is told again: a new answer has one end for each choice, the same one gone on with has it."""
    tells_from: int | None = None
    """The position from which on this answer tells the choice's text and tokens. None: only what is new."""
    rescore_from: int | None = None
    skip_to: ChoiceCursor | None = None
    """As far as the client has it although its tokens are not among `token_ids`."""


@dataclass(frozen=True, slots=True)
class Unscored:
    """Given tokens whose logprobs are asked for again and have not come."""

    token_ids: list[int]
    """Those that this answer tells by their logprobs alone."""
    text_offsets: list[int]
    """Where each of all of them begins in the text."""


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
    skip_to: ChoiceCursor | None = None
    """None once the client is told what comes."""
    grammar_end: int | None = None
    """Of the given tokens, how many complete the grammar, if they do."""
    owes_prompt: bool = field(init=False)
    """The prompt's logprobs were asked for and have not come."""

    def __post_init__(self) -> None:
        self.owes_prompt = self.sampling.prompt_logprobs is not None

    @property
    def position(self) -> int:
        return len(self.token_ids)

    def replay(self, start: Start) -> Piece | None:
        """Goes to where an earlier answer stopped. A piece if there is something to tell about it."""
        told, text = self._push_again(start)
        offsets = self._place(self.token_ids)
        self.skip_to = start.skip_to
        is_untold = start.tells_from == 0 or not (start.token_ids or start.skip_to)
        self.owes_prompt = self.owes_prompt and is_untold
        if start.rescore_from is not None and offsets is not None:
            first_told = self.position - len(told)
            self.unscored = Unscored(self.token_ids[start.rescore_from : first_told], offsets[start.rescore_from :])
        if start.told_reason is not None:
            self.finish_reason = start.told_reason
            rest = "" if start.tells_from is None else self.text.finish(start.told_reason)
        else:
            ended = first_end(self.token_ids, self.sampling, self.grammar_end)
            rest = self._end("stop" if self.text.stopped else ended and ended[1])
        has_news = start.told_reason is None or start.repeats_end
        if start.tells_from is None and not (self.finish_reason is not None and has_news):
            return None
        # What was delivered up to here is the text of these tokens; beside it only what the end lets go of is new.
        ended_by_token = self.finish_reason == "stop" and not self.text.stopped and bool(told)
        return Piece(self.index, told, text + rest, self.finish_reason, ended_by_token=ended_by_token)

    def _push_again(self, start: Start) -> tuple[list[int], str]:
        """The tokens that this answer tells, and their text. Nothing behind the first end counts."""
        ended = first_end(start.token_ids, self.sampling, self.grammar_end)
        token_ids = list(start.token_ids if ended is None else start.token_ids[: ended[0]])
        first_told = len(token_ids) if start.tells_from is None else start.tells_from
        self._push(token_ids[:first_told])
        return ([], "") if self.text.stopped else self._push(token_ids[first_told:])

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
        earlier, rescored = self.unscored, delivery.rescored
        return piece if earlier is None or rescored is None else self._with_scores(piece, earlier, rescored)

    def _with_scores(self, piece: Piece, earlier: Unscored, rescored: list[TokenLogprobs]) -> Piece:
        self.unscored = None
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

    def compare_skipped(self, cause: ErrorInfo | None) -> ErrorInfo | None:
        """Whether the client is told what comes next; an error if what was made again is not what it has."""
        skipped = self.skip_to
        assert skipped is not None
        if self.position < skipped.position:
            return None if self.finish_reason is None else cause or MADE_DIFFERENTLY
        if self.finish_reason != skipped.finish_reason:
            return cause or MADE_DIFFERENTLY
        self.skip_to = None
        return None


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
        self._held: list[Piece] = []
        """News that wait until every choice is where the client has it."""

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
            for part in _split_at(choice, delivery):
                if progress.error is None:
                    self._take_part(choice, part, progress)
            if progress.error is not None:
                break
            if choice.finish_reason == RESCHEDULE and self.finished and not self.usage().completion_tokens:
                return Progress(error=delivery.error)
        progress.pieces = self._in_turn(progress.pieces)
        return progress

    def _in_turn(self, pieces: list[Piece]) -> list[Piece]:
        """An event's cursor names the places of all choices, and none may be behind what the client has: while one choice
        is still being made again, news of the others wait."""
        known, news = [one for one in pieces if one.skipped], [one for one in pieces if not one.skipped]
        self._held += news
        if any(choice.skip_to is not None for choice in self.choices):
            return known
        held, self._held = self._held, []
        return known + held

    def _take_part(self, choice: Choice, part: Delivery, progress: Progress) -> None:
        if choice.skip_to is not None:
            self._take_skipped(choice, part, progress)
            return
        if part.token_ids or not part.failed:
            progress.pieces.append(self.with_ids(choice.take(part, self._of_prompt(choice, part))))
        if choice.finish_reason is not None and part.finish_reason is None:
            progress.stopped.append(choice)
        elif part.failed and choice.finish_reason is None:
            progress.error = part.error

    def _take_skipped(self, choice: Choice, part: Delivery, progress: Progress) -> None:
        """What the client has already. If that ends otherwise than it should, nobody is told of the end."""
        piece = choice.take(part) if part.token_ids or not part.failed else None
        progress.error = choice.compare_skipped(part.error) or (part.error if part.failed else None)
        if piece is not None and progress.error is None:
            progress.pieces.append(replace(piece, skipped=True))
            if choice.finish_reason is not None and part.finish_reason is None:
                progress.stopped.append(choice)

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
        later_token_ids, told = self._prompt_token_ids[1:], delivery.prompt_logprobs
        if not later_token_ids and delivery.token_ids:
            told = []  # asked for, and there are none
        if told is None or not choice.owes_prompt:
            return None
        choice.owes_prompt = False
        return list(zip(later_token_ids, told, strict=True))


def _split_at(choice: Choice, delivery: Delivery) -> list[Delivery]:
    """Into what the client has already and what is new, where that is not one of them only."""
    skipped, token_ids = choice.skip_to, delivery.token_ids
    if skipped is None or skipped.finish_reason is not None or choice.position + len(token_ids) < skipped.position:
        return [delivery]
    num = skipped.position - choice.position
    known = replace(delivery, token_ids=token_ids[:num], finish_reason=None, error=None)
    if delivery.logprobs is None:
        new = replace(delivery, token_ids=token_ids[num:], rescored=None)
    else:
        known = replace(known, logprobs=delivery.logprobs[:num])
        new = replace(delivery, token_ids=token_ids[num:], rescored=None, logprobs=delivery.logprobs[num:])
    return [known, new] if new.token_ids or new.finish_reason is not None else [known]


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
