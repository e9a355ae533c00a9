"""The forms in which an answer is written as events while it grows: for a client, and for a router in front of one."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from onward.api.lifecycle.choice_update import ChoiceUpdate, join_updates
from onward.api.lifecycle.chunk_encoder import ChunkEncoder
from onward.api.lifecycle.request_builder import ActiveRequest
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.requests.schemas import GenerationRequest
from onward.obs.trace_context import trace_id_in_cursor
from onward.proto.cursor import ChoiceCursor, format_cursor_head, format_cursor_tail
from onward.proto.engine import ErrorInfo
from onward.proto.router import Attempt, PromptUsage
from onward.web import sse
from onward.web.error_handlers import INTERNAL_ERROR


class CursorTracker:
    """The `id:` lines of one answer's events: each says where the stream stands after the whole tokens that it covers.

    Follows the answer, event by event, from `positions` on. `reader_positions`: where the reader of the events stands,
    which may be further along.
    """

    def __init__(self, attempt: Attempt, positions: list[int], reader_positions: list[ChoiceCursor]) -> None:
        self._head = format_cursor_head(
            attempt.request_id,
            attempt.created_s,
            attempt.seed,
            attempt.attempt_epoch,
            trace_id=trace_id_in_cursor(attempt.request_id, attempt.trace),
        )
        self._positions = list(positions)
        self._choices = list(reader_positions)

    @property
    def num_tokens(self) -> int:
        """Of all choices, up to here."""
        return sum(self._positions)

    def usage_cursor(self) -> str:
        """When that has been told too."""
        return self._head + format_cursor_tail(self._choices, {}, usage_told=True)

    def advance(self, update: ChoiceUpdate) -> str | None:
        """None if the piece says nothing new."""
        index, token_ids, reader_position = update.choice_index, update.token_ids, self._choices[update.choice_index]
        position = self._positions[index] = self._positions[index] + len(token_ids)
        if reader_position.finish_reason is not None:
            return None  # made again for its logprobs, up to the end that is known
        self._choices[index] = ChoiceCursor(position, update.finish_reason)
        if len(self._choices) == 1 and len(token_ids) == 1 and update.finish_reason is None:
            return f"{self._head}{position};0:{token_ids[0]}"  # as below, and nearly every event
        return self._head + format_cursor_tail(self._choices, {index: token_ids} if token_ids else {})


class StreamFormatter(ABC):
    terminator = sse.DONE
    """What ends every stream of this form, however it went."""
    has_sequence_numbers = False
    """Whether the event about a failure is numbered by the tokens before it."""

    def format_opening(self) -> list[bytes]:
        """What a stream begins with, before there is a token."""
        return []

    @abstractmethod
    def format_updates(self, updates: list[ChoiceUpdate]) -> list[bytes]: ...
    @abstractmethod
    def format_end(self) -> list[bytes]:
        """What comes behind the last piece."""

    @abstractmethod
    def format_error(self, info: ErrorInfo) -> list[bytes]:
        """What comes instead of the rest."""


class BodyCollector:
    """Everything that was said, for an answer that is written when it is whole."""

    def __init__(self, active: ActiveRequest) -> None:
        self._active = active
        self._updates: list[list[ChoiceUpdate]] = [[] for _ in active.output.choices]

    def add(self, updates: list[ChoiceUpdate]) -> None:
        for update in updates:
            self._updates[update.choice_index].append(update)

    def body(self) -> bytes:
        output = self._active.output
        choices = [output.with_completion_ids(join_updates(updates)) for updates in self._updates]
        return self._write(choices, self._active.resume_fields() if output.is_incomplete else {})

    def partial_body(self, info: ErrorInfo) -> bytes | None:
        """What there is of an answer that has failed for this reason, in its own form. None: nothing."""
        output = self._active.output
        if not output.has_partial:
            return None
        choices = [
            output.partial_update(index, join_updates(updates) if updates else None)
            for index, updates in enumerate(self._updates)
        ]
        if self._active.prepared.request.needs_full_output:
            choices = [replace(update, error=info) for update in choices]  # a response says itself why it has failed
        return self._write(choices, self._active.resume_fields())

    def _write(self, choices: list[ChoiceUpdate], resume_fields: dict[str, object]) -> bytes:
        active, request = self._active, self._active.prepared.request
        choices = with_shared_prompt_logprobs(choices, request.num_candidates)
        if request.selects_best:
            choices = select_best(choices, request)
        return active.writer.whole_body(active.header, choices, active.output.usage(), resume_fields)


class ChunkFormatter(StreamFormatter):
    """What a client reads: chunks."""

    def __init__(self, active: ActiveRequest) -> None:
        self._active = active
        request = active.prepared.request
        self._include_usage, self._continuous_usage = request.include_usage, request.continuous_usage
        self._chunks = ChunkEncoder(active.writer, active.header, self._include_usage)
        self._cursors = _new_cursor_tracker(active)

    def format_opening(self) -> list[bytes]:
        """Of all choices at once, with the answer's first event. Whoever goes on with an answer has had them."""
        if self._active.prepared.is_resumed:
            return []
        usage = self._usage_so_far() if self._continuous_usage else None
        openings = [self._chunks.opening(choice.index, usage) for choice in self._active.output.choices]
        return [sse.event(opening) for opening in openings if opening is not None]

    def format_updates(self, updates: list[ChoiceUpdate]) -> list[bytes]:
        has_ended = bool(updates) and updates[-1].finish_reason is not None and self._active.output.is_finished
        last = updates[-1] if has_ended else None
        return [self._event(update, update is last) for update in updates]

    def _event(self, update: ChoiceUpdate, is_last: bool) -> bytes:
        cursor = self._cursors.advance(update)
        if not update.is_known_to_reader:
            is_cut = is_last and self._active.output.is_incomplete
            extra_fields = self._active.resume_fields() if is_cut else None
            usage = self._usage_so_far() if self._continuous_usage else None
            return sse.event(self._chunks.update(update, extra_fields, usage), cursor)
        return sse.cursor_event(cursor) if self._active.prepared.is_routed and cursor is not None else b""

    def _usage_so_far(self) -> TokenUsage:
        """Up to the piece that is written: others may have come already."""
        return self._active.output.usage(self._cursors.num_tokens)

    def format_end(self) -> list[bytes]:
        if not self._include_usage or self._active.prepared.attempt.usage_sent:
            return []
        return [sse.event(self._chunks.usage(self._active.output.usage()), self._cursors.usage_cursor())]

    def format_error(self, info: ErrorInfo) -> list[bytes]:
        # After a fault of ours nothing that is known of the answer can be trusted.
        partial = None if info is INTERNAL_ERROR else self._active.partial_stream_body()
        return [sse.error_event(info, None if partial is None else msgspec.json.encode(partial))]


class RoutedChunkFormatter(ChunkFormatter):
    """The same for a router, which is told more."""

    def __init__(self, active: ActiveRequest) -> None:
        super().__init__(active)
        self._prompt_usage = PromptUsageEvent(active)

    def format_updates(self, updates: list[ChoiceUpdate]) -> list[bytes]:
        return self._prompt_usage.event_before(updates) + super().format_updates(updates)


class RoutedBodyFormatter(StreamFormatter):
    """For a router whose client wants the answer as a whole: the tokens as they come, the body at the end."""

    def __init__(self, active: ActiveRequest) -> None:
        self._prompt_usage = PromptUsageEvent(active)
        self._cursors = _new_cursor_tracker(active)
        self._collector = BodyCollector(active)
        self._collector.add(active.replayed_updates)

    def format_updates(self, updates: list[ChoiceUpdate]) -> list[bytes]:
        self._collector.add(updates)
        cursors = [self._cursors.advance(update) for update in updates]
        return self._prompt_usage.event_before(updates) + [
            sse.cursor_event(cursor) for cursor in cursors if cursor is not None
        ]

    def format_end(self) -> list[bytes]:
        return [sse.named_event("answer", self._collector.body())]

    def format_error(self, info: ErrorInfo) -> list[bytes]:
        return [sse.error_event(info, None if info is INTERNAL_ERROR else self._collector.partial_body(info))]


def _new_cursor_tracker(active: ActiveRequest) -> CursorTracker:
    choices = active.output.choices
    positions, reader_positions = (
        [choice.start_position for choice in choices],
        [choice.reader_start for choice in choices],
    )
    return CursorTracker(active.prepared.attempt, positions, reader_positions)


def make_formatter(active: ActiveRequest) -> StreamFormatter:
    if not active.prepared.is_routed:
        return ChunkFormatter(active)
    return (RoutedBodyFormatter if active.prepared.returns_whole_body else RoutedChunkFormatter)(active)


class PromptUsageEvent:
    """What a router is told before the first token."""

    def __init__(self, active: ActiveRequest) -> None:
        self._output = active.output
        self._is_sent = False

    def event_before(self, updates: list[ChoiceUpdate]) -> list[bytes]:
        """Not before the engine has said what was cached, which comes with the first token."""
        cached_counts = (choice.num_cached_tokens for choice in self._output.choices)
        if self._is_sent or not updates or all(count is None for count in cached_counts):
            return []
        self._is_sent = True
        usage = self._output.usage()
        prompt_usage = PromptUsage(usage.prompt_tokens, usage.cached_tokens, len(self._output.choices))
        return [sse.named_event("facts", msgspec.json.encode(prompt_usage))]


def with_shared_prompt_logprobs(choices: Sequence[ChoiceUpdate], num_candidates: int) -> list[ChoiceUpdate]:
    """The first choice of a prompt has looked at it for all."""
    return [
        replace(update, prompt_logprobs=group[0].prompt_logprobs)
        for group in _groups(choices, num_candidates)
        for update in group
    ]


def select_best(choices: Sequence[ChoiceUpdate], request: GenerationRequest) -> list[ChoiceUpdate]:
    """The choices of an answer: of each prompt's candidates the likeliest, by the mean logprob of their tokens. Numbered
    as the answer shows them, the best of each prompt first; equally likely ones keep their order."""
    best: list[ChoiceUpdate] = []
    for group in _groups(choices, request.num_candidates):
        best += sorted(group, key=mean_logprob, reverse=True)[: request.num_returned]
    hidden = {"logprobs": None, "text_offsets": None} if request.num_logprobs is None else {}
    return [replace(update, choice_index=index, **hidden) for index, update in enumerate(best)]


def mean_logprob(update: ChoiceUpdate) -> float:
    logprobs = [entry.logprob for entry in update.logprobs or []]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _groups(choices: Sequence[ChoiceUpdate], num_candidates: int) -> Iterator[Sequence[ChoiceUpdate]]:
    for first in range(0, len(choices), num_candidates):
        yield choices[first : first + num_candidates]
