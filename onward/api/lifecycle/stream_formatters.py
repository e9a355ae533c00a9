"""The forms in which an answer is written as events while it grows: for a client, and for a router in front of one."""

from typing import Protocol

import msgspec
from msgspec.structs import replace

from onward.api.lifecycle.best_of import select_best, with_shared_prompt_logprobs
from onward.api.lifecycle.choice_update import ChoiceUpdate, join_updates
from onward.api.lifecycle.chunk_encoder import ChunkEncoder
from onward.api.lifecycle.cursor_tracker import CursorTracker
from onward.api.lifecycle.request_builder import ActiveRequest
from onward.api.lifecycle.request_output import TokenUsage
from onward.api.lifecycle.stream_registry import INTERNAL_ERROR
from onward.proto.engine import ErrorInfo
from onward.proto.router import PromptUsage
from onward.web import sse


class StreamFormatter(Protocol):
    def format_opening(self) -> list[bytes]:
        """What a stream begins with, before there is a token."""
        ...

    def format_updates(self, pieces: list[ChoiceUpdate]) -> list[bytes]: ...
    def format_end(self) -> list[bytes]:
        """What comes behind the last piece."""
        ...

    def format_error(self, info: ErrorInfo) -> list[bytes]:
        """What comes instead of the rest."""
        ...

    @property
    def terminator(self) -> bytes:
        """What ends every stream of this form, however it went."""
        ...

    @property
    def has_sequence_numbers(self) -> bool:
        """Whether the event about a failure is numbered by the tokens before it."""
        ...


class BodyCollector:
    """Everything that was said, for an answer that is written when it is whole."""

    def __init__(self, job: ActiveRequest) -> None:
        self._job = job
        self._said: list[list[ChoiceUpdate]] = [[] for _ in job.output.choices]

    def add(self, pieces: list[ChoiceUpdate]) -> None:
        for piece in pieces:
            self._said[piece.choice_index].append(piece)

    def body(self) -> bytes:
        job, answer, request = self._job, self._job.output, self._job.prepared.request
        choices = [answer.with_completion_ids(join_updates(pieces)) for pieces in self._said]
        choices = with_shared_prompt_logprobs(choices, request.num_candidates)
        if request.selects_best:
            choices = select_best(choices, request)
        return job.writer.whole_body(job.header, choices, answer.usage(), job.resume_fields())

    def partial_body(self, info: ErrorInfo) -> bytes | None:
        """What there is of an answer that has failed for this reason, in its own form. None: nothing."""
        job, answer, request = self._job, self._job.output, self._job.prepared.request
        if not answer.has_partial:
            return None
        choices = [
            answer.partial_update(index, join_updates(pieces) if pieces else None)
            for index, pieces in enumerate(self._said)
        ]
        choices = with_shared_prompt_logprobs(choices, request.num_candidates)
        if request.selects_best:
            choices = select_best(choices, request)
        if request.needs_full_output:
            choices = [replace(piece, error=info) for piece in choices]  # a response says itself why it has failed
        return job.writer.whole_body(job.header, choices, answer.usage(), job.failed_resume_fields())


class ChunkFormatter:
    """What a client reads: chunks."""

    terminator = sse.DONE
    has_sequence_numbers = False

    def __init__(self, job: ActiveRequest) -> None:
        self._job = job
        request = job.prepared.request
        self._include_usage, self._continuous_usage = request.include_usage, request.continuous_usage
        self._chunks = ChunkEncoder(job.writer, job.header, self._include_usage)
        self._cursors = CursorTracker(job.prepared.attempt, job.start_positions, job.reader_positions)

    def format_opening(self) -> list[bytes]:
        """Of all choices at once, with the answer's first event. Whoever goes on with an answer has had them."""
        if self._job.prepared.is_resumed:
            return []
        usage = self._usage_so_far() if self._continuous_usage else None
        openings = [self._chunks.opening(choice.index, usage) for choice in self._job.output.choices]
        return [sse.event(opening) for opening in openings if opening is not None]

    def format_updates(self, pieces: list[ChoiceUpdate]) -> list[bytes]:
        is_end = bool(pieces) and pieces[-1].finish_reason is not None and self._job.output.is_finished
        last = pieces[-1] if is_end else None
        return [self._event(piece, piece is last) for piece in pieces]

    def _event(self, piece: ChoiceUpdate, is_last: bool) -> bytes:
        cursor = self._cursors.advance(piece)
        if not piece.is_known_to_reader:
            beside = self._job.resume_fields() if is_last else None
            usage = self._usage_so_far() if self._continuous_usage else None
            return sse.event(self._chunks.update(piece, beside, usage), cursor)
        return sse.cursor_event(cursor) if self._job.prepared.is_routed and cursor is not None else b""

    def _usage_so_far(self) -> TokenUsage:
        """Up to the piece that is written: others may have come already."""
        return self._job.output.usage(self._cursors.num_tokens)

    def format_end(self) -> list[bytes]:
        if not self._include_usage or self._job.prepared.attempt.usage_sent:
            return []
        return [sse.event(self._chunks.usage(self._job.output.usage()), self._cursors.usage_cursor())]

    def format_error(self, info: ErrorInfo) -> list[bytes]:
        # After a fault of ours nothing that is known of the answer can be trusted.
        partial = None if info is INTERNAL_ERROR else self._job.partial_stream_body()
        return [sse.error_event(info, None if partial is None else msgspec.json.encode(partial))]


class RoutedChunkFormatter:
    """The same for a router, which is told more."""

    terminator = sse.DONE
    has_sequence_numbers = False

    def __init__(self, job: ActiveRequest) -> None:
        self._chunks = ChunkFormatter(job)
        self._facts = PromptUsageEvent(job)

    def format_opening(self) -> list[bytes]:
        return self._chunks.format_opening()

    def format_updates(self, pieces: list[ChoiceUpdate]) -> list[bytes]:
        return self._facts.event_before(pieces) + self._chunks.format_updates(pieces)

    def format_end(self) -> list[bytes]:
        return self._chunks.format_end()

    def format_error(self, info: ErrorInfo) -> list[bytes]:
        return self._chunks.format_error(info)


class RoutedBodyFormatter:
    """For a router whose client wants the answer as a whole: the tokens as they come, the body at the end."""

    terminator = sse.DONE
    has_sequence_numbers = False

    def __init__(self, job: ActiveRequest) -> None:
        self._facts = PromptUsageEvent(job)
        self._cursors = CursorTracker(job.prepared.attempt, job.start_positions, job.reader_positions)
        self._collected = BodyCollector(job)
        self._collected.add(job.replayed_updates)

    def format_opening(self) -> list[bytes]:
        return []

    def format_updates(self, pieces: list[ChoiceUpdate]) -> list[bytes]:
        self._collected.add(pieces)
        cursors = [self._cursors.advance(piece) for piece in pieces]
        return self._facts.event_before(pieces) + [sse.cursor_event(cursor) for cursor in cursors if cursor is not None]

    def format_end(self) -> list[bytes]:
        return [sse.named_event("answer", self._collected.body())]

    def format_error(self, info: ErrorInfo) -> list[bytes]:
        return [sse.error_event(info, None if info is INTERNAL_ERROR else self._collected.partial_body(info))]


def make_formatter(job: ActiveRequest) -> StreamFormatter:
    if not job.prepared.is_routed:
        return ChunkFormatter(job)
    return (RoutedBodyFormatter if job.prepared.returns_whole_body else RoutedChunkFormatter)(job)


class PromptUsageEvent:
    """What a router is told before the first token."""

    def __init__(self, job: ActiveRequest) -> None:
        self._answer = job.output
        self._is_told = False

    def event_before(self, pieces: list[ChoiceUpdate]) -> list[bytes]:
        """Not before the engine has said what was cached, which comes with the first token."""
        cached = (choice.num_cached_tokens for choice in self._answer.choices)
        if self._is_told or not pieces or all(one is None for one in cached):
            return []
        self._is_told = True
        usage = self._answer.usage()
        facts = PromptUsage(usage.prompt_tokens, usage.cached_tokens, len(self._answer.choices))
        return [sse.named_event("facts", msgspec.json.encode(facts))]
