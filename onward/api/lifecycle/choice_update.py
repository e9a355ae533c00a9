"""Updates of a choice: new whole tokens, their text, and perhaps the end. Knows no JSON."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from onward.api.lifecycle.logprobs_json import PromptLogprobs
from onward.proto.engine import ErrorInfo
from onward.proto.step import TokenLogprobs
from onward.text.message_events import MessageEvent, merge_events

T = TypeVar("T")


class OutputTextStream(Protocol):
    """The interface of `text.text_stream.TextStream`."""

    @property
    def stopped(self) -> bool: ...
    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output."""
        ...

    def push(self, token_id: int) -> str: ...
    def finish(self, reason: str) -> str: ...
    def take_events(self) -> list[MessageEvent] | None:
        """Returns the parsed events since the last call. None: the text is not parsed."""
        ...

    def num_emitted_tokens(self, token_ids: Sequence[int]) -> int:
        """Returns how many of the pushed tokens, from the first on, have had all of their text returned."""
        ...

    @property
    def num_tool_calls(self) -> int: ...
    @property
    def num_reasoning_tokens(self) -> int | None:
        """Number of reasoning tokens so far. None if reasoning is not parsed."""
        ...


class NullTextStream:
    """A text stream for clients that read token ids. It produces no text, so no stop string can end the output."""

    stopped = False
    stop_string = None
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
    """New whole tokens of one choice with their text, logprobs and perhaps the end; one stream event is made of it.

    The text may be behind the tokens (half a character, or the beginning of a stop string). All other fields belong to
    exactly these tokens; logprobs may also belong to rescored tokens of an earlier response. One is created for every
    token: a struct takes a fifth of the time of a frozen dataclass."""

    choice_index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `scored_token_ids`, if requested."""
    text_offsets: list[int] | None = None
    """With `logprobs`: where each token begins in the choice's whole text."""
    prompt_logprobs: PromptLogprobs | None = None
    ends_with_stop_token: bool = False
    """The last of `token_ids` ended the output."""
    rescored_token_ids: list[int] = []
    """Tokens of an earlier response, in front of `token_ids`, of which only the logprobs are included here."""
    completion_token_ids: list[int] | None = None
    """All tokens of the choice, if the response is incomplete."""
    num_text_tokens: int | None = None
    """With `completion_token_ids`, if the endpoint returns text: how many of them the text covers, from the first on. The
    others end in an incomplete character or may become a stop string or markup."""
    error: ErrorInfo | None = None
    """Why the choice was given up."""
    is_known_to_reader: bool = False
    """The client already has this update. It was generated again only because its tokens were stored nowhere."""
    events: list[MessageEvent] | None = None
    """The parsed text (content, reasoning and calls). None if it is not parsed."""
    has_tool_calls: bool = False
    """With the end: the choice has called tools."""
    matched_stop: str | int | None = None
    """With the end: the stop string or the token that ended the output."""

    @property
    def scored_token_ids(self) -> list[int]:
        return self.rescored_token_ids + self.token_ids


def shown_token_ids(update: ChoiceUpdate, *, hides_end: bool) -> list[int]:
    """Returns the token ids to show. With the internal adapter (`hides_end`) the token that ended the output is left out,
    because clients that exchange token ids do not need it. Usage, cursors and history still include it."""
    return update.token_ids[:-1] if hides_end and update.ends_with_stop_token else update.token_ids


def matched_stop_fields(update: ChoiceUpdate, stop_token_ids: Collection[int]) -> dict[str, Any]:
    """Returns the client's stop string or stop token that ended the output, in the fields of vLLM and SGLang. Empty for
    other ends."""
    matched = update.matched_stop
    if matched is None or (isinstance(matched, int) and matched not in stop_token_ids):
        return {}
    return {"stop_reason": matched, "matched_stop": matched}


def join_updates(updates: Sequence[ChoiceUpdate]) -> ChoiceUpdate:
    """Joins all updates of one choice to one."""
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
        matched_stop=last.matched_stop,
    )


def _all_events(updates: Sequence[ChoiceUpdate]) -> list[MessageEvent] | None:
    events = concatenate(update.events for update in updates)
    return None if events is None else merge_events(events)


def concatenate(parts: Iterable[list[T] | None]) -> list[T] | None:
    """Returns the items of all parts in order, or None if all parts are None. A part may be None only if it would be empty
    or if all parts are None."""
    present = [part for part in parts if part is not None]
    return [item for part in present for item in part] if present else None
