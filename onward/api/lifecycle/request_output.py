"""The output of one request while it grows: applies engine outputs to its choices and returns ChoiceUpdates.

It depends on the tokens alone, so it can be replayed. A choice that the engine gives up (`pd_reschedule`) has ended, and
the other choices continue to their own ends. The response is what was generated; if that is nothing at all, it is the
error. An aborted choice has ended too, even without a token. Knows nothing of sockets, JSON or the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from onward.api.engine_link.request_tracker import EngineOutput
from onward.api.lifecycle.choice_output import ChoiceOutput
from onward.api.lifecycle.choice_update import ChoiceUpdate, concatenate
from onward.api.lifecycle.draft_stats import DraftStats
from onward.api.lifecycle.logprobs_json import PromptLogprobs
from onward.proto.cursor import ChoiceCursor
from onward.proto.engine import ErrorInfo
from onward.proto.finish_reasons import ABORT, INCOMPLETE_REASONS, PD_RESCHEDULE

MAX_EVENT_TOKENS = 1024
"""Maximum number of tokens in one event. Tokens share events if the connection is slow; this bounds an event's cursor."""


@dataclass(slots=True)
class TokenUsage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    """Part of `completion_tokens`. None if reasoning is not parsed."""
    drafts: DraftStats | None = None
    """Set if requested."""

    def as_json(self) -> dict[str, object]:
        num_reasoning_tokens, drafts = self.reasoning_tokens, self.drafts
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **(
                {}
                if num_reasoning_tokens is None
                else {"completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens}}
            ),
            **({} if drafts is None else {"speculative": drafts.as_json()}),
        }


class OutputUpdate(msgspec.Struct):
    """The result of applying a batch of engine outputs. No output is applied after an error."""

    updates: list[ChoiceUpdate] = []
    stopped: list[ChoiceOutput] = []
    """Choices that a stop string has ended, which the engine does not know yet."""
    error: ErrorInfo | None = None


class RequestOutput:
    """The output of one request over all choices. Every prompt has the same number of choices, and these are consecutive.
    `is_all_or_nothing`: if one choice is given up, the request fails. `returns_text`: the client reads text, not token
    ids. `hides_tokens`: the generated tokens are no part of the response, so an incomplete one does not have them."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        choices: list[ChoiceOutput],
        *,
        is_all_or_nothing: bool = False,
        reports_drafts: bool = False,
        returns_text: bool = True,
        hides_tokens: bool = False,
    ) -> None:
        self.choices = choices
        self._prompts = prompts
        self._choices_per_prompt = len(choices) // len(prompts)
        self._is_all_or_nothing = is_all_or_nothing
        self._reports_drafts = reports_drafts
        self._returns_text = returns_text
        self._hides_tokens = hides_tokens
        self._by_id = {choice.request_id: choice for choice in choices}
        self._held_updates: list[ChoiceUpdate] = []
        """Updates that are held until every choice has reached the client's position."""
        self._is_catching_up = any(choice.reader_position is not None for choice in choices)

    @property
    def is_finished(self) -> bool:
        for choice in self.choices:  # noqa: SIM110 - called for every token, and `all` would create a generator
            if choice.finish_reason is None:
                return False
        return True

    @property
    def rescheduled(self) -> bool:
        """Whether some choice was given up, to be continued elsewhere."""
        return any(choice.finish_reason == PD_RESCHEDULE for choice in self.choices)

    @property
    def aborted(self) -> bool:
        return any(choice.finish_reason == ABORT for choice in self.choices)

    @property
    def is_incomplete(self) -> bool:
        """Whether some choice has ended without being complete."""
        return any(choice.finish_reason in INCOMPLETE_REASONS for choice in self.choices)

    @property
    def has_partial(self) -> bool:
        """Whether there is output that can be returned with an error. False while a regenerated output is behind what its
        client has."""
        return not self._is_catching_up and any(choice.token_ids for choice in self.choices)

    def apply(self, outputs: list[EngineOutput]) -> OutputUpdate:
        result = OutputUpdate()
        for output in _merge_per_choice(outputs):
            choice = self._by_id[output.request_id]
            if choice.finish_reason is not None:
                continue
            if output.num_cached_tokens is not None:
                choice.num_cached_tokens = output.num_cached_tokens
            if output.draft_counts:
                choice.draft_stats.record(output.draft_counts)
            if choice.reader_position is None:
                self._apply_output(choice, output, result)
            else:
                self._apply_outputs(choice, _split_at_reader(choice.reader_position, choice, output), result)
            if result.error is not None:
                break
            if choice.finish_reason == PD_RESCHEDULE and self._has_nothing_to_return:
                result.error = output.error
                if not self.has_partial:
                    result.updates = []
                break
        if self._is_catching_up:
            result.updates = self._release_in_order(result.updates)
        return result

    @property
    def _has_nothing_to_return(self) -> bool:
        """Whether the request fails now that a choice was given up: because it cannot be resumed (`best_of`), or because no
        choice has any output."""
        return self._is_all_or_nothing or (self.is_finished and not self.usage().completion_tokens)

    def _release_in_order(self, updates: list[ChoiceUpdate]) -> list[ChoiceUpdate]:
        """Returns the updates that may be sent now. An event's cursor has the positions of all choices, and none may be
        behind what the client has. So new updates are held while any choice is still being regenerated."""
        known_updates, new_updates = (
            [update for update in updates if update.is_known_to_reader],
            [update for update in updates if not update.is_known_to_reader],
        )
        self._held_updates += new_updates
        self._is_catching_up = any(choice.reader_position is not None for choice in self.choices)
        if self._is_catching_up:
            return known_updates
        held, self._held_updates = self._held_updates, []
        return known_updates + held

    def _apply_outputs(self, choice: ChoiceOutput, outputs: list[EngineOutput], result: OutputUpdate) -> None:
        for output in outputs:
            if result.error is not None:
                return
            apply = self._apply_output if choice.reader_position is None else self._apply_known_output
            apply(choice, output, result)

    def _apply_output(self, choice: ChoiceOutput, output: EngineOutput, result: OutputUpdate) -> None:
        if output.token_ids or not output.failed:
            update = choice.apply(
                output, self._take_prompt_logprobs(choice, output) if choice.awaits_prompt_logprobs else None
            )
            result.updates.append(update if update.finish_reason is None else self.with_completion_ids(update))
        if choice.finish_reason is not None and output.finish_reason is None:
            result.stopped.append(choice)
        elif output.error is not None and output.failed and choice.finish_reason is None:
            result.error = output.error

    def _apply_known_output(self, choice: ChoiceOutput, output: EngineOutput, result: OutputUpdate) -> None:
        """Applies output that the client already has. If its end differs from the client's, the result is an error and the
        update is dropped."""
        update = choice.apply(output) if output.token_ids or not output.failed else None
        result.error = choice.check_regenerated(output.error) or (output.error if output.failed else None)
        if update is not None and result.error is None:
            result.updates.append(replace(update, is_known_to_reader=True))
            if choice.finish_reason is not None and output.finish_reason is None:
                result.stopped.append(choice)

    def with_completion_ids(self, update: ChoiceUpdate) -> ChoiceUpdate:
        """Adds all tokens of the choice to its last update, if the output is incomplete. A choice that was given up before
        the request was aborted counts as aborted, since it shall not be continued."""
        if update.finish_reason is None or not self.is_incomplete:
            return update
        if update.finish_reason == PD_RESCHEDULE and self.aborted:
            update = replace(update, finish_reason=ABORT, error=None)
        return self._with_ids(update)

    def partial_update(self, index: int, update: ChoiceUpdate | None = None) -> ChoiceUpdate:
        """Returns a choice's output so far, of a request that has failed. `update`: all its updates, joined."""
        update, reason = update or ChoiceUpdate(index, [], ""), self.choices[index].finish_reason
        return self._with_ids(
            replace(update, finish_reason=None if reason in INCOMPLETE_REASONS else reason, error=None)
        )

    def _with_ids(self, update: ChoiceUpdate) -> ChoiceUpdate:
        if self._hides_tokens:
            return update
        choice = self.choices[update.choice_index]
        num_text_tokens = choice.num_text_tokens if self._returns_text else None
        return replace(update, completion_token_ids=choice.token_ids, num_text_tokens=num_text_tokens)

    def usage(self, num_tokens: int | None = None) -> TokenUsage:
        """Returns the usage. Each prompt counts once, with the cached tokens of its first choice that has reported them.
        With `num_tokens`, only this many output tokens count, and reasoning tokens and drafts are left out."""
        num_cached = sum(self._num_cached(first) for first in range(0, len(self.choices), self._choices_per_prompt))
        num_prompt_tokens = sum(map(len, self._prompts))
        if num_tokens is not None:
            return TokenUsage(num_prompt_tokens, num_tokens, num_cached)
        reasoning_counts = [
            count for choice in self.choices if (count := choice.text_stream.num_reasoning_tokens) is not None
        ]
        num_completion_tokens = sum(choice.position for choice in self.choices)
        drafts = self._draft_stats() if self._reports_drafts else None
        return TokenUsage(
            num_prompt_tokens,
            num_completion_tokens,
            num_cached,
            sum(reasoning_counts) if reasoning_counts else None,
            drafts,
        )

    def _draft_stats(self) -> DraftStats:
        """Returns the sum over all choices."""
        stats = DraftStats()
        for choice in self.choices:
            stats.add(choice.draft_stats)
        return stats

    def _num_cached(self, first: int) -> int:
        counts = (choice.num_cached_tokens for choice in self.choices[first : first + self._choices_per_prompt])
        return next((count for count in counts if count is not None), 0)

    def _take_prompt_logprobs(self, choice: ChoiceOutput, output: EngineOutput) -> PromptLogprobs | None:
        prompt_logprobs = output.prompt_logprobs
        if prompt_logprobs is None and not output.token_ids:
            return None
        later_token_ids = self._prompts[choice.index // self._choices_per_prompt][1:]
        if not later_token_ids:
            prompt_logprobs = []  # a prompt of one token has none
        if prompt_logprobs is None:
            return None
        choice.awaits_prompt_logprobs = False
        return list(zip(later_token_ids, prompt_logprobs, strict=True))


def _split_at_reader(reader_position: ChoiceCursor, choice: ChoiceOutput, output: EngineOutput) -> list[EngineOutput]:
    """Splits an output at the client's position into the part that the client has and, if any, the new part. An output
    that ends before that position, or whose end the client has, is not split."""
    token_ids = output.token_ids
    if reader_position.finish_reason is not None or choice.position + len(token_ids) < reader_position.position:
        return [output]
    num_known = reader_position.position - choice.position
    known_output = replace(output, token_ids=token_ids[:num_known], finish_reason=None, error=None)
    if output.logprobs is None:
        new_output = replace(output, token_ids=token_ids[num_known:], rescored_logprobs=None)
    else:
        known_output = replace(known_output, logprobs=output.logprobs[:num_known])
        new_output = replace(
            output, token_ids=token_ids[num_known:], rescored_logprobs=None, logprobs=output.logprobs[num_known:]
        )
    return (
        [known_output, new_output] if new_output.token_ids or new_output.finish_reason is not None else [known_output]
    )


def _merge_per_choice(outputs: list[EngineOutput]) -> list[EngineOutput]:
    """Merges the outputs of each choice, in their order, while the result has at most `MAX_EVENT_TOKENS` tokens. A
    larger output stays whole. Outputs of different choices may change places."""
    if len(outputs) == 1:
        return outputs
    merged: list[EngineOutput] = []
    last_index: dict[str, int] = {}
    for output in outputs:
        index = last_index.get(output.request_id)
        if index is None or len(merged[index].token_ids) + len(output.token_ids) > MAX_EVENT_TOKENS:
            last_index[output.request_id] = len(merged)
            merged.append(output)
        else:
            merged[index] = _concatenate(merged[index], output)
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
