"""The output of one choice while it is generated: tokens in, updates out. Depends on the tokens alone, so replays agree."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from onward.api.engine_link.request_tracker import EngineOutput
from onward.api.lifecycle.choice_update import ChoiceUpdate, OutputTextStream
from onward.api.lifecycle.draft_stats import DraftStats
from onward.api.lifecycle.logprobs_json import PromptLogprobs, TextOffsets
from onward.output_limits import find_end
from onward.proto.cursor import ChoiceCursor
from onward.proto.engine import ErrorInfo
from onward.proto.finish_reasons import INCOMPLETE_REASONS, PD_RESCHEDULE
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
    logprobs: Sequence[TokenLogprobs] = ()
    """Of the first of `token_ids`, where an earlier attempt has kept them; the others are computed again."""


@dataclass(frozen=True, slots=True)
class PendingRescore:
    """Given tokens whose logprobs are asked for again and have not come."""

    token_ids: list[int]
    """Those that this answer tells by their logprobs alone."""
    text_offsets: list[int]
    """Where each of all of them begins in the text."""


@dataclass(slots=True)
class ChoiceOutput:
    """Detokenizes, checks stop strings and formats logprobs of one choice, and knows what the client was sent."""

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
    start_position: int = 0
    """The position that it goes on from in this answer."""
    reader_start: ChoiceCursor = ChoiceCursor(0)
    """The reader's position in the choice at that time."""
    replayed_update: ChoiceUpdate | None = None
    """What there was to tell about the given tokens."""
    rescore_from: int | None = None
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
        emitted_token_ids, text = self._replay_tokens(start)
        offsets = self._text_offsets_of(self.token_ids)
        self.reader_position = start.reader_position
        is_unsent = start.emit_from == 0 or not (start.token_ids or start.reader_position)
        self.awaits_prompt_logprobs = self.awaits_prompt_logprobs and is_unsent
        if start.rescore_from is not None and offsets is not None:
            first_emitted = self.position - len(emitted_token_ids)
            self.pending_rescore = PendingRescore(
                self.token_ids[start.rescore_from : first_emitted], offsets[start.rescore_from :]
            )
        if start.prior_finish_reason is not None:
            final_text = self._end(start.prior_finish_reason)
            if start.emit_from is None:  # an earlier answer has told that too
                final_text = ""
                self.text_stream.take_events()
        else:
            end = find_end(self.token_ids, self.sampling, self.grammar_completed_at)
            final_text = self._end("stop" if self.text_stream.stopped else end and end[1])
        emits_end = start.prior_finish_reason is None or start.emit_end
        if start.emit_from is None and not (self.finish_reason is not None and emits_end):
            return None
        # What was delivered up to here is the text of these tokens; beside it only what the end lets go of is new.
        ended_by_token = self.finish_reason == "stop" and not self.text_stream.stopped and bool(emitted_token_ids)
        return ChoiceUpdate(
            self.index,
            emitted_token_ids,
            text + final_text,
            self.finish_reason,
            list(start.logprobs[: len(emitted_token_ids)]) or None,
            ends_with_stop_token=ended_by_token,
            events=self.text_stream.take_events(),
            has_tool_calls=self._has_tool_calls,
        )

    def _replay_tokens(self, start: ChoiceStart) -> tuple[list[int], str]:
        """The tokens that this answer tells, and their text. Nothing behind the first end counts."""
        end = find_end(start.token_ids, self.sampling, self.grammar_completed_at)
        token_ids = list(start.token_ids if end is None else start.token_ids[: end[0]])
        first_emitted = len(token_ids) if start.emit_from is None else start.emit_from
        self._push(token_ids[:first_emitted])
        self.text_stream.take_events()  # which an earlier answer has told
        return ([], "") if self.text_stream.stopped else self._push(token_ids[first_emitted:])

    def apply(self, output: EngineOutput, prompt_logprobs: PromptLogprobs | None = None) -> ChoiceUpdate:
        token_ids, text = self._push(output.token_ids)
        finish_reason = "stop" if self.text_stream.stopped else None if output.failed else output.finish_reason
        if finish_reason is not None:
            text += self._end(finish_reason)
        logprobs = None if output.logprobs is None else output.logprobs[: len(token_ids)]
        offsets = None if self.text_offsets is None else self._text_offsets_of(token_ids)
        if finish_reason is None:  # nearly always
            update = ChoiceUpdate(
                self.index,
                token_ids,
                text,
                None,
                logprobs,
                offsets,
                prompt_logprobs,
                events=self.text_stream.take_events(),
            )
        else:
            update = ChoiceUpdate(
                self.index,
                token_ids,
                text,
                finish_reason,
                logprobs,
                offsets,
                prompt_logprobs,
                ends_with_stop_token=finish_reason == "stop" and not self.text_stream.stopped and bool(token_ids),
                error=output.error if finish_reason == PD_RESCHEDULE else None,
                events=self.text_stream.take_events(),
                has_tool_calls=self._has_tool_calls,
            )
        pending, rescored_logprobs = self.pending_rescore, output.rescored_logprobs
        return (
            update
            if pending is None or rescored_logprobs is None
            else self._with_scores(update, pending, rescored_logprobs)
        )

    def _with_scores(
        self, update: ChoiceUpdate, pending: PendingRescore, rescored_logprobs: list[TokenLogprobs]
    ) -> ChoiceUpdate:
        self.pending_rescore = None
        return replace(
            update,
            rescored_token_ids=pending.token_ids,
            logprobs=rescored_logprobs + (update.logprobs or []),
            text_offsets=pending.text_offsets + (update.text_offsets or []),
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

    def _end(self, finish_reason: str | None) -> str:
        self.finish_reason = finish_reason
        return "" if finish_reason is None else self.text_stream.finish(finish_reason)

    @property
    def _has_tool_calls(self) -> bool:
        return self.finish_reason is not None and self.text_stream.num_tool_calls > 0

    def check_regenerated(self, error: ErrorInfo | None) -> ErrorInfo | None:
        """Whether the client is told what comes next; an error if what was made again is not what it has."""
        expected = self.reader_position
        assert expected is not None
        if self.position < expected.position:
            return None if self.finish_reason is None else error or REGENERATION_DIFFERS
        if self.finish_reason != expected.finish_reason:
            return error or REGENERATION_DIFFERS
        self.reader_position = None
        return None
