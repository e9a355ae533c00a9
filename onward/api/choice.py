"""One choice of an answer while it grows: tokens in, pieces out. A function of the tokens, so it can be replayed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from onward.api.draft_stats import DraftStats
from onward.api.ledger import CUT, RESCHEDULE, Delivery
from onward.api.limits import first_end
from onward.api.logprobs import PromptLogprobs, TextOffsets
from onward.api.pieces import Piece, Text
from onward.proto.cursor import ChoiceCursor
from onward.proto.request import ErrorInfo
from onward.proto.sampling import Sampling
from onward.proto.step import TokenLogprobs

MADE_DIFFERENTLY = ErrorInfo(
    "stream_unknown", "the stream is not held by anyone, and what was made again is not what was sent before", 409
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
    drafts: DraftStats = field(default_factory=DraftStats)
    owes_prompt: bool = field(init=False)
    """The prompt's logprobs were asked for and have not come."""

    def __post_init__(self) -> None:
        self.owes_prompt = self.sampling.prompt_logprobs is not None

    @property
    def position(self) -> int:
        return len(self.token_ids)

    @property
    def num_text_tokens(self) -> int:
        """How many tokens, from the first on, have all of their text among what was shown."""
        is_complete = self.finish_reason is not None and self.finish_reason not in CUT
        return self.position if is_complete else self.text.num_covered(self.token_ids)

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
            rest = self._end(start.told_reason)
            if start.tells_from is None:  # an earlier answer has told that too
                rest = ""
                self.text.take_events()
        else:
            ended = first_end(self.token_ids, self.sampling, self.grammar_end)
            rest = self._end("stop" if self.text.stopped else ended and ended[1])
        has_news = start.told_reason is None or start.repeats_end
        if start.tells_from is None and not (self.finish_reason is not None and has_news):
            return None
        # What was delivered up to here is the text of these tokens; beside it only what the end lets go of is new.
        ended_by_token = self.finish_reason == "stop" and not self.text.stopped and bool(told)
        return Piece(
            self.index,
            told,
            text + rest,
            self.finish_reason,
            ended_by_token=ended_by_token,
            events=self.text.take_events(),
            has_calls=self._has_calls,
        )

    def _push_again(self, start: Start) -> tuple[list[int], str]:
        """The tokens that this answer tells, and their text. Nothing behind the first end counts."""
        ended = first_end(start.token_ids, self.sampling, self.grammar_end)
        token_ids = list(start.token_ids if ended is None else start.token_ids[: ended[0]])
        first_told = len(token_ids) if start.tells_from is None else start.tells_from
        self._push(token_ids[:first_told])
        self.text.take_events()  # which an earlier answer has told
        return ([], "") if self.text.stopped else self._push(token_ids[first_told:])

    def take(self, delivery: Delivery, prompt_logprobs: PromptLogprobs | None = None) -> Piece:
        taken, text = self._push(delivery.token_ids)
        reason = "stop" if self.text.stopped else None if delivery.failed else delivery.finish_reason
        if reason is not None:
            text += self._end(reason)
        logprobs = None if delivery.logprobs is None else delivery.logprobs[: len(taken)]
        offsets = None if self.text_offsets is None else self._place(taken)
        if reason is None:  # nearly always
            piece = Piece(
                self.index, taken, text, None, logprobs, offsets, prompt_logprobs, events=self.text.take_events()
            )
        else:
            piece = Piece(
                self.index,
                taken,
                text,
                reason,
                logprobs,
                offsets,
                prompt_logprobs,
                ended_by_token=reason == "stop" and not self.text.stopped and bool(taken),
                error=delivery.error if reason == RESCHEDULE else None,
                events=self.text.take_events(),
                has_calls=self._has_calls,
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
        if len(token_ids) == 1:
            self.token_ids.append(token_ids[0])
            return token_ids, push(token_ids[0])
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

    @property
    def _has_calls(self) -> bool:
        return self.finish_reason is not None and self.text.num_calls > 0

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
