"""The forms in which an answer is written as events while it grows: for a client, and for a router in front of one."""

from typing import Protocol

import msgspec
from msgspec.structs import replace

from onward.api.answer import Usage
from onward.api.best_of import best_of_each, with_shared_prompts
from onward.api.chunks import Chunks
from onward.api.cursors import Cursors
from onward.api.jobs import Job
from onward.api.pieces import Piece, joined
from onward.api.streams import BROKEN
from onward.proto.request import ErrorInfo
from onward.proto.router import Facts
from onward.web import sse


class Form(Protocol):
    def opening(self) -> list[bytes]:
        """What a stream begins with, before there is a token."""
        ...

    def news(self, pieces: list[Piece]) -> list[bytes]: ...
    def end(self) -> list[bytes]:
        """What comes behind the last piece."""
        ...

    def failed(self, info: ErrorInfo) -> list[bytes]:
        """What comes instead of the rest."""
        ...

    @property
    def done(self) -> bytes:
        """What ends every stream of this form, however it went."""
        ...

    @property
    def has_numbers(self) -> bool:
        """Whether the event about a failure is numbered by the tokens before it."""
        ...


class Collected:
    """Everything that was said, for an answer that is written when it is whole."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._said: list[list[Piece]] = [[] for _ in job.answer.choices]

    def add(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self._said[piece.choice].append(piece)

    def body(self) -> bytes:
        job, answer, request = self._job, self._job.answer, self._job.prepared.request
        choices = [answer.with_ids(joined(pieces)) for pieces in self._said]
        choices = with_shared_prompts(choices, request.num_candidates)
        if request.picks_best:
            choices = best_of_each(choices, request)
        return job.writer.whole(job.head, choices, answer.usage(), job.to_continue())

    def partial(self, info: ErrorInfo) -> bytes | None:
        """What there is of an answer that has failed for this reason, in its own form. None: nothing."""
        job, answer, request = self._job, self._job.answer, self._job.prepared.request
        if not answer.has_partial:
            return None
        choices = [
            answer.partial_piece(index, joined(pieces) if pieces else None) for index, pieces in enumerate(self._said)
        ]
        choices = with_shared_prompts(choices, request.num_candidates)
        if request.picks_best:
            choices = best_of_each(choices, request)
        if request.tells_all:
            choices = [replace(piece, error=info) for piece in choices]  # a response says itself why it has failed
        return job.writer.whole(job.head, choices, answer.usage(), job.after_failure())


class ChunkForm:
    """What a client reads: chunks."""

    done = sse.DONE
    has_numbers = False

    def __init__(self, job: Job) -> None:
        self._job = job
        request = job.prepared.request
        self._include_usage, self._continuous_usage = request.include_usage, request.continuous_usage
        self._chunks = Chunks(job.writer, job.head, self._include_usage)
        self._cursors = Cursors(job.prepared.attempt, job.positions, job.known)

    def opening(self) -> list[bytes]:
        """Of all choices at once, with the answer's first event. Whoever goes on with an answer has had them."""
        if self._job.prepared.is_continued:
            return []
        usage = self._usage_so_far() if self._continuous_usage else None
        openings = [self._chunks.opening(choice.index, usage) for choice in self._job.answer.choices]
        return [sse.event(opening) for opening in openings if opening is not None]

    def news(self, pieces: list[Piece]) -> list[bytes]:
        is_end = bool(pieces) and pieces[-1].finish_reason is not None and self._job.answer.finished
        last = pieces[-1] if is_end else None
        return [self._event(piece, piece is last) for piece in pieces]

    def _event(self, piece: Piece, is_last: bool) -> bytes:
        cursor = self._cursors.after(piece)
        if not piece.skipped:
            beside = self._job.to_continue() if is_last else None
            usage = self._usage_so_far() if self._continuous_usage else None
            return sse.event(self._chunks.piece(piece, beside, usage), cursor)
        return sse.bare_event(cursor) if self._job.prepared.is_routed and cursor is not None else b""

    def _usage_so_far(self) -> Usage:
        """Up to the piece that is written: others may have come already."""
        return self._job.answer.usage(self._cursors.num_tokens)

    def end(self) -> list[bytes]:
        if not self._include_usage or self._job.prepared.attempt.usage_told:
            return []
        return [sse.event(self._chunks.usage(self._job.answer.usage()), self._cursors.at_usage())]

    def failed(self, info: ErrorInfo) -> list[bytes]:
        # After a fault of ours nothing that is known of the answer can be trusted.
        partial = None if info is BROKEN else self._job.partial_of_stream()
        return [sse.error_event(info, None if partial is None else msgspec.json.encode(partial))]


class RoutedChunkForm:
    """The same for a router, which is told more."""

    done = sse.DONE
    has_numbers = False

    def __init__(self, job: Job) -> None:
        self._chunks = ChunkForm(job)
        self._facts = FactsOnce(job)

    def opening(self) -> list[bytes]:
        return self._chunks.opening()

    def news(self, pieces: list[Piece]) -> list[bytes]:
        return self._facts.before(pieces) + self._chunks.news(pieces)

    def end(self) -> list[bytes]:
        return self._chunks.end()

    def failed(self, info: ErrorInfo) -> list[bytes]:
        return self._chunks.failed(info)


class RoutedWholeForm:
    """For a router whose client wants the answer as a whole: the tokens as they come, the body at the end."""

    done = sse.DONE
    has_numbers = False

    def __init__(self, job: Job) -> None:
        self._facts = FactsOnce(job)
        self._cursors = Cursors(job.prepared.attempt, job.positions, job.known)
        self._collected = Collected(job)
        self._collected.add(job.replayed)

    def opening(self) -> list[bytes]:
        return []

    def news(self, pieces: list[Piece]) -> list[bytes]:
        self._collected.add(pieces)
        cursors = [self._cursors.after(piece) for piece in pieces]
        return self._facts.before(pieces) + [sse.bare_event(cursor) for cursor in cursors if cursor is not None]

    def end(self) -> list[bytes]:
        return [sse.named_event("answer", self._collected.body())]

    def failed(self, info: ErrorInfo) -> list[bytes]:
        return [sse.error_event(info, None if info is BROKEN else self._collected.partial(info))]


def form_of(job: Job) -> Form:
    if not job.prepared.is_routed:
        return ChunkForm(job)
    return (RoutedWholeForm if job.prepared.is_whole else RoutedChunkForm)(job)


class FactsOnce:
    """What a router is told before the first token."""

    def __init__(self, job: Job) -> None:
        self._answer = job.answer
        self._is_told = False

    def before(self, pieces: list[Piece]) -> list[bytes]:
        """Not before the engine has said what was cached, which comes with the first token."""
        cached = (choice.num_cached_tokens for choice in self._answer.choices)
        if self._is_told or not pieces or all(one is None for one in cached):
            return []
        self._is_told = True
        usage = self._answer.usage()
        facts = Facts(usage.prompt_tokens, usage.cached_tokens, len(self._answer.choices))
        return [sse.named_event("facts", msgspec.json.encode(facts))]
