"""The formatters that write an output as events while it grows, for a client or for a router, or as one body."""

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
    """Makes the `id:` lines of one response's events. Each is a cursor: the stream's state after the event's tokens.

    It starts at `positions` and advances event by event. `reader_positions`: the positions of the events' reader, which
    may be further.
    """

    def __init__(self, attempt: Attempt, positions: list[int], reader_positions: list[ChoiceCursor]) -> None:
        self._head = format_cursor_head(
            attempt.request_id,
            attempt.created_s,
            attempt.seed,
            attempt.attempt_epoch,
            trace_id=trace_id_in_cursor(attempt.request_id, attempt.trace),
            model_tag=attempt.model_tag,
        )
        self._positions = list(positions)
        self._choices = list(reader_positions)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all choices up to the last event."""
        return sum(self._positions)

    def usage_cursor(self) -> str:
        """Returns the cursor of the usage chunk."""
        return self._head + format_cursor_tail(self._choices, {}, usage_told=True)

    def advance(self, update: ChoiceUpdate) -> str | None:
        """Returns the cursor of an update, or None if the reader already has the end of its choice."""
        index, token_ids, reader_position = update.choice_index, update.token_ids, self._choices[update.choice_index]
        position = self._positions[index] = self._positions[index] + len(token_ids)
        if reader_position.finish_reason is not None:
            return None  # generated again for its logprobs, up to the known end
        self._choices[index] = ChoiceCursor(position, update.finish_reason)
        if len(self._choices) == 1 and len(token_ids) == 1 and update.finish_reason is None:
            return f"{self._head}{position};0:{token_ids[0]}"  # the same as below, for nearly every event
        return self._head + format_cursor_tail(self._choices, {index: token_ids} if token_ids else {})


class StreamFormatter(ABC):
    terminator = sse.DONE
    """The bytes that end every stream of this form, also after an error."""

    @property
    def has_sequence_numbers(self) -> bool:
        """Whether an error event has a sequence number that depends on the tokens before it."""
        return False

    def format_opening(self) -> list[bytes]:
        """Returns the events before the first token."""
        return []

    @abstractmethod
    def format_updates(self, updates: list[ChoiceUpdate]) -> list[bytes]: ...
    @abstractmethod
    def format_end(self) -> list[bytes]:
        """Returns the events after the last update."""

    @abstractmethod
    def format_error(self, info: ErrorInfo) -> list[bytes]:
        """Returns the events that end a stream with an error."""


class BodyCollector:
    """Collects all ChoiceUpdates of a request whose response is one body."""

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
        """Returns the output so far of a request that has failed with this error, as a body. None: there is no output."""
        output = self._active.output
        if not output.has_partial:
            return None
        choices = [
            output.partial_update(index, join_updates(updates) if updates else None)
            for index, updates in enumerate(self._updates)
        ]
        if self._active.prepared.request.needs_full_output:
            choices = [replace(update, error=info) for update in choices]  # a response object contains its error
        return self._write(choices, self._active.resume_fields())

    def _write(self, choices: list[ChoiceUpdate], resume_fields: dict[str, object]) -> bytes:
        active, request = self._active, self._active.prepared.request
        choices = with_shared_prompt_logprobs(choices, request.num_candidates)
        if request.selects_best:
            choices = select_best(choices, request)
        return active.writer.whole_body(active.header, choices, active.output.usage(), resume_fields)


class ChunkFormatter(StreamFormatter):
    """Writes the chunks of a stream for a client."""

    def __init__(self, active: ActiveRequest) -> None:
        self._active = active
        request = active.prepared.request
        self._include_usage, self._continuous_usage = request.include_usage, request.continuous_usage
        self._chunks = ChunkEncoder(active.writer, active.header, self._include_usage)
        self._cursors = _new_cursor_tracker(active)

    def format_opening(self) -> list[bytes]:
        """Returns the opening chunks of all choices. A resumed stream has none, since its client already has them."""
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
        """Returns the usage up to the chunk that is being written. The output may already have more tokens."""
        return self._active.output.usage(self._cursors.num_tokens)

    def format_end(self) -> list[bytes]:
        if not self._include_usage or self._active.prepared.attempt.usage_sent:
            return []
        return [sse.event(self._chunks.usage(self._active.output.usage()), self._cursors.usage_cursor())]

    def format_error(self, info: ErrorInfo) -> list[bytes]:
        # After an internal error the output so far cannot be trusted.
        partial = None if info is INTERNAL_ERROR else self._active.partial_stream_body()
        return [sse.error_event(info, None if partial is None else msgspec.json.encode(partial))]


class RoutedChunkFormatter(ChunkFormatter):
    """Writes the chunks of a stream for a router, with an additional event about the prompt's usage."""

    def __init__(self, active: ActiveRequest) -> None:
        super().__init__(active)
        self._prompt_usage = PromptUsageEvent(active)

    def format_updates(self, updates: list[ChoiceUpdate]) -> list[bytes]:
        return self._prompt_usage.event_before(updates) + super().format_updates(updates)


class RoutedBodyFormatter(StreamFormatter):
    """Writes events for a router whose client does not stream: cursors with new tokens, and the body at the end."""

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
    """The event that reports the prompt's usage to a router, before the first token."""

    def __init__(self, active: ActiveRequest) -> None:
        self._output = active.output
        self._max_prompt_tokens = active.prepared.attempt.max_prompt_tokens
        self._is_sent = False

    def event_before(self, updates: list[ChoiceUpdate]) -> list[bytes]:
        """Returns the event to be sent before these updates, once. It waits for the engine's count of cached tokens, which
        comes with the first token."""
        cached_counts = (choice.num_cached_tokens for choice in self._output.choices)
        if self._is_sent or not updates or all(count is None for count in cached_counts):
            return []
        self._is_sent = True
        usage = self._output.usage()
        num_choices = len(self._output.choices)
        prompt_usage = PromptUsage(usage.prompt_tokens, usage.cached_tokens, num_choices, self._max_prompt_tokens)
        return [sse.named_event("facts", msgspec.json.encode(prompt_usage))]


def with_shared_prompt_logprobs(choices: Sequence[ChoiceUpdate], num_candidates: int) -> list[ChoiceUpdate]:
    """Returns the choices with the prompt logprobs of the first choice of their prompt, which computes them for all."""
    return [
        replace(update, prompt_logprobs=group[0].prompt_logprobs)
        for group in _groups(choices, num_candidates)
        for update in group
    ]


def select_best(choices: Sequence[ChoiceUpdate], request: GenerationRequest) -> list[ChoiceUpdate]:
    """Returns the choices that the response includes: the likeliest candidates of each prompt, by the mean logprob of
    their tokens. They are renumbered, the best of each prompt first; equally likely ones keep their order."""
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
