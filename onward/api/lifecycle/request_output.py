"""The answer to one request while it grows: what the engine delivers for its choices in, pieces out.

A function of the tokens, so it can be replayed. A choice that the engine gives up (`pd_reschedule`) has ended, and the
others go on to their own ends; the answer is what was generated, unless that is nothing at all: then it is the error. An
aborted choice has ended too, also without a token. Knows nothing of sockets, JSON or the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from onward.api.engine_link.request_tracker import ABORT, INCOMPLETE_REASONS, PD_RESCHEDULE, EngineOutput
from onward.api.lifecycle.active_choice import ActiveChoice
from onward.api.lifecycle.choice_update import ChoiceUpdate, concatenate
from onward.api.lifecycle.draft_stats import DraftStats
from onward.api.lifecycle.logprobs_json import PromptLogprobs
from onward.proto.cursor import ChoiceCursor
from onward.proto.engine import ErrorInfo

MAX_EVENT_TOKENS = 1024
"""A slow connection's tokens share events, but no event's cursor grows without bound."""


@dataclass(slots=True)
class TokenUsage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    """Of the completion's. None where thinking is not looked for."""
    drafts: DraftStats | None = None
    """Where asked for."""

    def as_json(self) -> dict[str, object]:
        thought, drafts = self.reasoning_tokens, self.drafts
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({} if thought is None else {"completion_tokens_details": {"reasoning_tokens": thought}}),
            **({} if drafts is None else {"speculative": drafts.as_json()}),
        }


class OutputUpdate(msgspec.Struct):
    """What a batch of deliveries came to. After an error nothing follows."""

    updates: list[ChoiceUpdate] = []
    stopped: list[ActiveChoice] = []
    """Ended by a stop string: the engine must be told."""
    error: ErrorInfo | None = None


class RequestOutput:
    """Every prompt has equally many choices, one behind the other. `is_all_or_nothing`: if one choice is given up, so is
    the answer. `returns_text`: the client reads text, not token ids."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        choices: list[ActiveChoice],
        *,
        is_all_or_nothing: bool = False,
        tells_drafts: bool = False,
        shows_text: bool = True,
    ) -> None:
        self.choices = choices
        self._prompts = prompts
        self._num_each = len(choices) // len(prompts)
        self._is_all_or_nothing = is_all_or_nothing
        self._tells_drafts = tells_drafts
        self._shows_text = shows_text
        self._by_id = {choice.request_id: choice for choice in choices}
        self._held_updates: list[ChoiceUpdate] = []
        """News that wait until every choice is where the client has it."""
        self._is_catching_up = any(choice.reader_position is not None for choice in choices)

    @property
    def is_finished(self) -> bool:
        for choice in self.choices:  # noqa: SIM110 - asked for every token, and `all` would make a generator
            if choice.finish_reason is None:
                return False
        return True

    @property
    def rescheduled(self) -> bool:
        """Some choice was given up: what was generated is to be continued elsewhere."""
        return any(choice.finish_reason == PD_RESCHEDULE for choice in self.choices)

    @property
    def aborted(self) -> bool:
        return any(choice.finish_reason == ABORT for choice in self.choices)

    @property
    def is_incomplete(self) -> bool:
        """Some choice has ended without being complete."""
        return any(choice.finish_reason in INCOMPLETE_REASONS for choice in self.choices)

    @property
    def has_partial(self) -> bool:
        """Whether there is anything that a client can be given with an error. Not while the answer is made again and is
        behind what its client has."""
        return not self._is_catching_up and any(choice.token_ids for choice in self.choices)

    def apply(self, deliveries: list[EngineOutput]) -> OutputUpdate:
        progress = OutputUpdate()
        for delivery in _merge_per_choice(deliveries):
            choice = self._by_id[delivery.request_id]
            if choice.finish_reason is not None:
                continue
            if delivery.num_cached_tokens is not None:
                choice.num_cached_tokens = delivery.num_cached_tokens
            if delivery.draft_counts:
                choice.draft_stats.record(delivery.draft_counts)
            if choice.reader_position is None:
                self._take_part(choice, delivery, progress)
            else:
                self._take_parts(choice, _split_at_reader(choice.reader_position, choice, delivery), progress)
            if progress.error is not None:
                break
            if choice.finish_reason == PD_RESCHEDULE and self._has_nothing_to_return:
                progress.error = delivery.error
                if not self.has_partial:
                    progress.updates = []
                break
        if self._is_catching_up:
            progress.updates = self._release_in_order(progress.updates)
        return progress

    @property
    def _has_nothing_to_return(self) -> bool:
        """After a choice was given up."""
        return self._is_all_or_nothing or (self.is_finished and not self.usage().completion_tokens)

    def _release_in_order(self, pieces: list[ChoiceUpdate]) -> list[ChoiceUpdate]:
        """An event's cursor names the places of all choices, and none may be behind what the client has: while one choice
        is still being made again, news of the others wait."""
        known, news = (
            [one for one in pieces if one.is_known_to_reader],
            [one for one in pieces if not one.is_known_to_reader],
        )
        self._held_updates += news
        self._is_catching_up = any(choice.reader_position is not None for choice in self.choices)
        if self._is_catching_up:
            return known
        held, self._held_updates = self._held_updates, []
        return known + held

    def _take_parts(self, choice: ActiveChoice, parts: list[EngineOutput], progress: OutputUpdate) -> None:
        for part in parts:
            if progress.error is not None:
                return
            take = self._take_part if choice.reader_position is None else self._take_skipped
            take(choice, part, progress)

    def _take_part(self, choice: ActiveChoice, part: EngineOutput, progress: OutputUpdate) -> None:
        if part.token_ids or not part.failed:
            piece = choice.apply(part, self._of_prompt(choice, part) if choice.awaits_prompt_logprobs else None)
            progress.updates.append(piece if piece.finish_reason is None else self.with_completion_ids(piece))
        if choice.finish_reason is not None and part.finish_reason is None:
            progress.stopped.append(choice)
        elif part.error is not None and part.failed and choice.finish_reason is None:
            progress.error = part.error

    def _take_skipped(self, choice: ActiveChoice, part: EngineOutput, progress: OutputUpdate) -> None:
        """What the client has already. If that ends otherwise than it should, nobody is told of the end."""
        piece = choice.apply(part) if part.token_ids or not part.failed else None
        progress.error = choice.check_regenerated(part.error) or (part.error if part.failed else None)
        if piece is not None and progress.error is None:
            progress.updates.append(replace(piece, is_known_to_reader=True))
            if choice.finish_reason is not None and part.finish_reason is None:
                progress.stopped.append(choice)

    def with_completion_ids(self, piece: ChoiceUpdate) -> ChoiceUpdate:
        """With all of its choice's tokens, if it ends in an answer that was cut. A choice that was given up before the
        request was aborted is aborted: nobody wants it continued."""
        if piece.finish_reason is None or not self.is_incomplete:
            return piece
        if piece.finish_reason == PD_RESCHEDULE and self.aborted:
            piece = replace(piece, finish_reason=ABORT, error=None)
        return self._with_ids(piece)

    def partial_update(self, index: int, piece: ChoiceUpdate | None = None) -> ChoiceUpdate:
        """What there is of a choice, of an answer that has failed. `piece`: all that was said about it."""
        piece, reason = piece or ChoiceUpdate(index, [], ""), self.choices[index].finish_reason
        return self._with_ids(
            replace(piece, finish_reason=None if reason in INCOMPLETE_REASONS else reason, error=None)
        )

    def _with_ids(self, piece: ChoiceUpdate) -> ChoiceUpdate:
        choice = self.choices[piece.choice_index]
        num_text_tokens = choice.num_text_tokens if self._shows_text else None
        return replace(piece, completion_token_ids=choice.token_ids, num_text_tokens=num_text_tokens)

    def usage(self, num_tokens: int | None = None) -> TokenUsage:
        """Each prompt counts once, as the first of its choices that was run has found it. `num_tokens`: where not all of
        the output counts that is there, and nothing is said of what it is."""
        cached = sum(self._num_cached(first) for first in range(0, len(self.choices), self._num_each))
        num_prompt = sum(map(len, self._prompts))
        if num_tokens is not None:
            return TokenUsage(num_prompt, num_tokens, cached)
        thought = [one for choice in self.choices if (one := choice.text_stream.num_reasoning_tokens) is not None]
        made = sum(choice.position for choice in self.choices)
        drafts = self._drafts() if self._tells_drafts else None
        return TokenUsage(num_prompt, made, cached, sum(thought) if thought else None, drafts)

    def _drafts(self) -> DraftStats:
        """Of all choices."""
        stats = DraftStats()
        for choice in self.choices:
            stats.add(choice.draft_stats)
        return stats

    def _num_cached(self, first: int) -> int:
        known = (choice.num_cached_tokens for choice in self.choices[first : first + self._num_each])
        return next((one for one in known if one is not None), 0)

    def _of_prompt(self, choice: ActiveChoice, delivery: EngineOutput) -> PromptLogprobs | None:
        told = delivery.prompt_logprobs
        if told is None and not delivery.token_ids:
            return None
        later_token_ids = self._prompts[choice.index // self._num_each][1:]
        if not later_token_ids:
            told = []  # asked for, and there are none
        if told is None:
            return None
        choice.awaits_prompt_logprobs = False
        return list(zip(later_token_ids, told, strict=True))


def _split_at_reader(skipped: ChoiceCursor, choice: ActiveChoice, delivery: EngineOutput) -> list[EngineOutput]:
    """Into what the client has already and what is new, where that is not one of them only."""
    token_ids = delivery.token_ids
    if skipped.finish_reason is not None or choice.position + len(token_ids) < skipped.position:
        return [delivery]
    num = skipped.position - choice.position
    known = replace(delivery, token_ids=token_ids[:num], finish_reason=None, error=None)
    if delivery.logprobs is None:
        new = replace(delivery, token_ids=token_ids[num:], rescored_logprobs=None)
    else:
        known = replace(known, logprobs=delivery.logprobs[:num])
        new = replace(delivery, token_ids=token_ids[num:], rescored_logprobs=None, logprobs=delivery.logprobs[num:])
    return [known, new] if new.token_ids or new.finish_reason is not None else [known]


def _merge_per_choice(deliveries: list[EngineOutput]) -> list[EngineOutput]:
    """What came for the same choice becomes one delivery, up to the size of an event."""
    if len(deliveries) == 1:
        return deliveries
    merged: list[EngineOutput] = []
    newest: dict[str, int] = {}
    for one in deliveries:
        index = newest.get(one.request_id)
        if index is None or len(merged[index].token_ids) + len(one.token_ids) > MAX_EVENT_TOKENS:
            newest[one.request_id] = len(merged)
            merged.append(one)
        else:
            merged[index] = _concatenate(merged[index], one)
    return merged


def _concatenate(first: EngineOutput, second: EngineOutput) -> EngineOutput:
    return EngineOutput(
        second.request_id,
        first.token_ids + second.token_ids,
        second.num_cached_tokens,
        second.finish_reason,
        second.error,
        concatenate((first.logprobs, second.logprobs)),
        first.prompt_logprobs,
        first.rescored_logprobs,
        draft_counts=first.draft_counts + second.draft_counts,
    )
