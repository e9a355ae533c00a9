"""The output of one choice while it is generated: tokens in, updates out. It depends on the tokens alone, so a replay gives
the same."""

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
    """Where a choice continues: the tokens that exist, and from which position the response includes them."""

    token_ids: Sequence[int] = ()
    prior_finish_reason: str | None = None
    """Finish reason of the choice, if an earlier response has sent it."""
    emit_end: bool = True
    """Whether that end is sent again. A new response sends the end of every choice; a resumed one has already sent it."""
    emit_from: int | None = None
    """The position from which this response includes the choice's text and tokens. None: only new tokens."""
    rescore_from: int | None = None
    reader_position: ChoiceCursor | None = None
    """The client's position, if it has tokens that are not in `token_ids`."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Logprobs of the first of `token_ids`, as an earlier attempt has stored them. The others are computed again."""


@dataclass(frozen=True, slots=True)
class PendingRescore:
    """Tokens that came with the request and whose logprobs are computed again, until these logprobs arrive."""

    token_ids: list[int]
    """The tokens of which this response includes only the logprobs."""
    text_offsets: list[int]
    """The text offsets of `token_ids`, followed by those of the given tokens that this response sends."""


@dataclass(slots=True)
class ChoiceOutput:
    """One choice of an ActiveRequest. Detokenizes, finds stop strings, assigns logprobs, and tracks what the reader has."""

    index: int
    request_id: str
    sampling: SamplingParams
    text_stream: OutputTextStream
    text_offsets: TextOffsets | None = None
    """Set if logprobs are requested."""
    token_ids: list[int] = field(default_factory=list)
    """All tokens so far, including those of earlier attempts and responses."""
    finish_reason: str | None = None
    num_cached_tokens: int | None = None
    """None until the engine has sent it."""
    pending_rescore: PendingRescore | None = None
    reader_position: ChoiceCursor | None = None
    """The position up to which a regenerated choice repeats what the client has. None once it has reached it."""
    grammar_completed_at: int | None = None
    """Number of given tokens that complete the grammar, if they do."""
    draft_stats: DraftStats = field(default_factory=DraftStats)
    start_position: int = 0
    """The position from which the choice continues in this response."""
    reader_start: ChoiceCursor = ChoiceCursor(0)
    """The reader's position in the choice at that time."""
    replayed_update: ChoiceUpdate | None = None
    """The update about the given tokens, if this response sends one."""
    rescore_from: int | None = None
    awaits_prompt_logprobs: bool = field(init=False)
    """Whether the prompt's logprobs were requested and have not arrived."""

    def __post_init__(self) -> None:
        self.awaits_prompt_logprobs = self.sampling.prompt_logprobs is not None

    @property
    def position(self) -> int:
        return len(self.token_ids)

    @property
    def num_text_tokens(self) -> int:
        """Number of tokens, from the first on, whose text was shown completely."""
        is_complete = self.finish_reason is not None and self.finish_reason not in INCOMPLETE_REASONS
        return self.position if is_complete else self.text_stream.num_emitted_tokens(self.token_ids)

    def replay(self, start: ChoiceStart) -> ChoiceUpdate | None:
        """Replays the given tokens. Returns an update if this response includes some of them or sends their end."""
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
            if start.emit_from is None:  # an earlier response has sent this text too
                final_text = ""
                self.text_stream.take_events()
        else:
            end = find_end(self.token_ids, self.sampling, self.grammar_completed_at)
            final_text = self._end("stop" if self.text_stream.stopped else end and end[1])
        emits_end = start.prior_finish_reason is None or start.emit_end
        if start.emit_from is None and not (self.finish_reason is not None and emits_end):
            return None
        # The text so far is that of these tokens. Only text that the end releases is new beside it.
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
            matched_stop=self._matched_stop,
        )

    def _replay_tokens(self, start: ChoiceStart) -> tuple[list[int], str]:
        """Returns the given tokens that this response includes, and their text. Tokens after the first end are dropped."""
        end = find_end(start.token_ids, self.sampling, self.grammar_completed_at)
        token_ids = list(start.token_ids if end is None else start.token_ids[: end[0]])
        first_emitted = len(token_ids) if start.emit_from is None else start.emit_from
        self._push(token_ids[:first_emitted])
        self.text_stream.take_events()  # an earlier response has sent these events
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
                matched_stop=self._matched_stop,
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
        """Returns the tokens up to the end of a stop string, and their text."""
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

    @property
    def _matched_stop(self) -> str | int | None:
        """The stop string or end token that ended the output, if any."""
        if self.finish_reason != "stop" or self.text_stream.stopped:
            return self.text_stream.stop_string if self.finish_reason == "stop" else None
        last = self.token_ids[-1] if self.token_ids else None
        return last if last in self.sampling.end_token_ids else None

    def check_regenerated(self, error: ErrorInfo | None) -> ErrorInfo | None:
        """Clears `reader_position` once the regenerated choice has reached it, so that the client gets later tokens.
        Returns an error if the choice differs from what the client has."""
        expected = self.reader_position
        assert expected is not None
        if self.position < expected.position:
            return None if self.finish_reason is None else error or REGENERATION_DIFFERS
        if self.finish_reason != expected.finish_reason:
            return error or REGENERATION_DIFFERS
        self.reader_position = None
        return None
