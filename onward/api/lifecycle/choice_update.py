"""What is said about a choice, bit by bit: whole tokens, their text, and perhaps the end. Knows no JSON."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec

from onward.api.lifecycle.logprobs_json import PromptLogprobs
from onward.proto.engine import ErrorInfo
from onward.proto.step import TokenLogprobs
from onward.text.message_events import MessageEvent, merge_events

T = TypeVar("T")


class OutputTextStream(Protocol):
    """What `text.text_stream.TextStream` does."""

    @property
    def stopped(self) -> bool: ...
    def push(self, token_id: int) -> str: ...
    def finish(self, reason: str) -> str: ...
    def take_events(self) -> list[MessageEvent] | None:
        """What the text has been found to say since the last time. None: it is not taken apart."""
        ...

    def num_emitted_tokens(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens that were pushed, from the first on, have all of their text among what was shown."""
        ...

    @property
    def num_tool_calls(self) -> int: ...
    @property
    def num_reasoning_tokens(self) -> int | None:
        """So far. None where thinking is not looked for."""
        ...


class NullTextStream:
    """For clients that speak in token ids: nothing is turned into text, so no text can end the output."""

    stopped = False
    num_tool_calls = 0
    num_reasoning_tokens = None

    def push(self, token_id: int) -> str:
        return ""

    def finish(self, reason: str) -> str:
        return ""

    def num_emitted_tokens(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def take_events(self) -> None:
        return None


class ChoiceUpdate(msgspec.Struct, frozen=True, gc=False):
    """What one event says about one choice: whole tokens, their text, and perhaps the end.

    The text may be behind the tokens (half a character, what may become a stop string); everything else belongs to
    exactly these tokens, logprobs also to tokens of an earlier answer that were scored again. There is one for every
    token: a struct is made in a fifth of the time that a frozen dataclass takes."""

    choice_index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    """Where asked for: one for each of `scored_token_ids`."""
    text_offsets: list[int] | None = None
    """With `logprobs`: where each token begins in the choice's whole text."""
    prompt_logprobs: PromptLogprobs | None = None
    ends_with_stop_token: bool = False
    """The last of `token_ids` ended the output."""
    rescored_token_ids: list[int] = []
    """Tokens of an earlier answer, in front of `token_ids`, whose logprobs only are told here."""
    completion_token_ids: list[int] | None = None
    """Where the answer is not complete: all of the choice's tokens."""
    num_text_tokens: int | None = None
    """With `completion_token_ids`, where the endpoint shows text: how many of them the text covers, from the first on. The
    others end in an incomplete character or may become a stop string or markup."""
    error: ErrorInfo | None = None
    """Why the choice was given up."""
    is_known_to_reader: bool = False
    """The client has this already: it was made again only because nobody else had kept its tokens."""
    events: list[MessageEvent] | None = None
    """What the text says, where it is taken apart into words, thoughts and calls."""
    has_tool_calls: bool = False
    """With the end: the choice has called tools."""

    @property
    def scored_token_ids(self) -> list[int]:
        return self.rescored_token_ids + self.token_ids


def shown_token_ids(update: ChoiceUpdate, *, hides_end: bool) -> list[int]:
    """With the internal adapter (`hides_end`) without the token that ended the output: those who speak tokens to each other
    have no use for an eos. It is left out of what is shown and of nothing else: usage, cursors and history have it."""
    return update.token_ids[:-1] if hides_end and update.ends_with_stop_token else update.token_ids


def join_updates(updates: Sequence[ChoiceUpdate]) -> ChoiceUpdate:
    """All that was said about one choice, as one piece."""
    first, last = updates[0], updates[-1]
    return ChoiceUpdate(
        choice_index=first.choice_index,
        token_ids=[token_id for part_update in updates for token_id in part_update.token_ids],
        text="".join(part_update.text for part_update in updates),
        finish_reason=last.finish_reason,
        logprobs=concatenate(part_update.logprobs for part_update in updates),
        text_offsets=concatenate(part_update.text_offsets for part_update in updates),
        prompt_logprobs=next(
            (update.prompt_logprobs for update in updates if update.prompt_logprobs is not None), None
        ),
        ends_with_stop_token=last.ends_with_stop_token,
        rescored_token_ids=[token_id for part_update in updates for token_id in part_update.rescored_token_ids],
        completion_token_ids=last.completion_token_ids,
        num_text_tokens=last.num_text_tokens,
        error=last.error,
        events=_all_events(updates),
        has_tool_calls=last.has_tool_calls,
    )


def _all_events(updates: Sequence[ChoiceUpdate]) -> list[MessageEvent] | None:
    events = concatenate(update.events for update in updates)
    return None if events is None else merge_events(events)


def concatenate(parts: Iterable[list[T] | None]) -> list[T] | None:
    """The parts' items in order. A part may be missing only where it would be empty, or all are."""
    present = [part for part in parts if part is not None]
    return [item for part in present for item in part] if present else None
