"""One choice of an answer while it grows: tokens in, pieces out. A function of the tokens, so it can be replayed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from onward.api.engine_link.request_tracker import INCOMPLETE_REASONS, PD_RESCHEDULE, EngineOutput
from onward.api.lifecycle.choice_update import ChoiceUpdate, OutputTextStream
from onward.api.lifecycle.draft_stats import DraftStats
from onward.api.lifecycle.logprobs_json import PromptLogprobs, TextOffsets
from onward.api.requests.output_limits import find_end
from onward.proto.cursor import ChoiceCursor
from onward.proto.engine import ErrorInfo
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import TokenLogprobs

REGENERATION_DIFFERS = ErrorInfo(
    "stream_unknown", "the stream is not held by anyone, and what was made again is not what was sent before", 409
)


@dataclass(frozen=True, slots=True)
class ChoiceStart:
    """Where a choice goes on from, and how much of that the client is told."""

    token_ids: Sequence[int] = ()
    prior_finish_reason: str | None = None
    """How the choice has ended, where an earlier answer has told it."""
    emit_end: bool = True
    """Whether that end is told again: a new answer has one end for each choice, the same one gone on with has it."""
    emit_from: int | None = None
    """The position from which on this answer tells the choice's text and tokens. None: only what is new."""
    rescore_from: int | None = None
    reader_position: ChoiceCursor | None = None
    """As far as the client has it although its tokens are not among `token_ids`."""


@dataclass(frozen=True, slots=True)
class PendingRescore:
    """Given tokens whose logprobs are asked for again and have not come."""

    token_ids: list[int]
    """Those that this answer tells by their logprobs alone."""
    text_offsets: list[int]
    """Where each of all of them begins in the text."""


@dataclass(slots=True)
class ActiveChoice:
    index: int
    request_id: str
    sampling: SamplingParams
    text_stream: OutputTextStream
    text_offsets: TextOffsets | None = None
    """Kept where logprobs are asked for."""
    token_ids: list[int] = field(default_factory=list)
    """All so far, those of earlier answers included."""
    finish_reason: str | None = None
    num_cached_tokens: int | None = None
    """None until the engine has said it."""
    pending_rescore: PendingRescore | None = None
    reader_position: ChoiceCursor | None = None
    """None once the client is told what comes."""
    grammar_completed_at: int | None = None
    """Of the given tokens, how many complete the grammar, if they do."""
    draft_stats: DraftStats = field(default_factory=DraftStats)
    awaits_prompt_logprobs: bool = field(init=False)
    """The prompt's logprobs were asked for and have not come."""

    def __post_init__(self) -> None:
        self.awaits_prompt_logprobs = self.sampling.prompt_logprobs is not None

    @property
    def position(self) -> int:
        return len(self.token_ids)

    @property
    def num_text_tokens(self) -> int:
        """How many tokens, from the first on, have all of their text among what was shown."""
        is_complete = self.finish_reason is not None and self.finish_reason not in INCOMPLETE_REASONS
        return self.position if is_complete else self.text_stream.num_emitted_tokens(self.token_ids)

    def replay(self, start: ChoiceStart) -> ChoiceUpdate | None:
        """Goes to where an earlier answer stopped. A piece if there is something to tell about it."""
        told, text = self._replay_tokens(start)
        offsets = self._text_offsets_of(self.token_ids)
        self.reader_position = start.reader_position
        is_untold = start.emit_from == 0 or not (start.token_ids or start.reader_position)
        self.awaits_prompt_logprobs = self.awaits_prompt_logprobs and is_untold
        if start.rescore_from is not None and offsets is not None:
            first_told = self.position - len(told)
            self.pending_rescore = PendingRescore(
                self.token_ids[start.rescore_from : first_told], offsets[start.rescore_from :]
            )
        if start.prior_finish_reason is not None:
            rest = self._end(start.prior_finish_reason)
            if start.emit_from is None:  # an earlier answer has told that too
                rest = ""
                self.text_stream.take_events()
        else:
            ended = find_end(self.token_ids, self.sampling, self.grammar_completed_at)
            rest = self._end("stop" if self.text_stream.stopped else ended and ended[1])
        has_news = start.prior_finish_reason is None or start.emit_end
        if start.emit_from is None and not (self.finish_reason is not None and has_news):
            return None
        # What was delivered up to here is the text of these tokens; beside it only what the end lets go of is new.
        ended_by_token = self.finish_reason == "stop" and not self.text_stream.stopped and bool(told)
        return ChoiceUpdate(
            self.index,
            told,
            text + rest,
            self.finish_reason,
            ends_with_stop_token=ended_by_token,
            events=self.text_stream.take_events(),
            has_tool_calls=self._has_calls,
        )

    def _replay_tokens(self, start: ChoiceStart) -> tuple[list[int], str]:
        """The tokens that this answer tells, and their text. Nothing behind the first end counts."""
        ended = find_end(start.token_ids, self.sampling, self.grammar_completed_at)
        token_ids = list(start.token_ids if ended is None else start.token_ids[: ended[0]])
        first_told = len(token_ids) if start.emit_from is None else start.emit_from
        self._push(token_ids[:first_told])
        self.text_stream.take_events()  # which an earlier answer has told
        return ([], "") if self.text_stream.stopped else self._push(token_ids[first_told:])

    def apply(self, delivery: EngineOutput, prompt_logprobs: PromptLogprobs | None = None) -> ChoiceUpdate:
        taken, text = self._push(delivery.token_ids)
        reason = "stop" if self.text_stream.stopped else None if delivery.failed else delivery.finish_reason
        if reason is not None:
            text += self._end(reason)
        logprobs = None if delivery.logprobs is None else delivery.logprobs[: len(taken)]
        offsets = None if self.text_offsets is None else self._text_offsets_of(taken)
        if reason is None:  # nearly always
            piece = ChoiceUpdate(
                self.index, taken, text, None, logprobs, offsets, prompt_logprobs, events=self.text_stream.take_events()
            )
        else:
            piece = ChoiceUpdate(
                self.index,
                taken,
                text,
                reason,
                logprobs,
                offsets,
                prompt_logprobs,
                ends_with_stop_token=reason == "stop" and not self.text_stream.stopped and bool(taken),
                error=delivery.error if reason == PD_RESCHEDULE else None,
                events=self.text_stream.take_events(),
                has_tool_calls=self._has_calls,
            )
        earlier, rescored = self.pending_rescore, delivery.rescored_logprobs
        return piece if earlier is None or rescored is None else self._with_scores(piece, earlier, rescored)

    def _with_scores(self, piece: ChoiceUpdate, earlier: PendingRescore, rescored: list[TokenLogprobs]) -> ChoiceUpdate:
        self.pending_rescore = None
        return replace(
            piece,
            rescored_token_ids=earlier.token_ids,
            logprobs=rescored + (piece.logprobs or []),
            text_offsets=earlier.text_offsets + (piece.text_offsets or []),
        )

    def _push(self, token_ids: list[int]) -> tuple[list[int], str]:
        """The tokens that belong to the output, none behind a stop string, and their text."""
        push, stream = self.text_stream.push, self.text_stream
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

    def _text_offsets_of(self, token_ids: list[int]) -> list[int] | None:
        offsets = self.text_offsets
        return None if offsets is None else [offsets.push(token_id) for token_id in token_ids]

    def _end(self, reason: str | None) -> str:
        self.finish_reason = reason
        return "" if reason is None else self.text_stream.finish(reason)

    @property
    def _has_calls(self) -> bool:
        return self.finish_reason is not None and self.text_stream.num_tool_calls > 0

    def check_regenerated(self, cause: ErrorInfo | None) -> ErrorInfo | None:
        """Whether the client is told what comes next; an error if what was made again is not what it has."""
        skipped = self.reader_position
        assert skipped is not None
        if self.position < skipped.position:
            return None if self.finish_reason is None else cause or REGENERATION_DIFFERS
        if self.finish_reason != skipped.finish_reason:
            return cause or REGENERATION_DIFFERS
        self.reader_position = None
        return None
