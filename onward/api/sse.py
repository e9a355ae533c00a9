"""Server-sent events: bytes only. An event covers whole tokens, and its `id:` line says where the stream stands."""

from onward.api.answer import Piece
from onward.api.failures import error_body
from onward.proto.cursor import ChoiceCursor, Cursor, format_cursor
from onward.proto.request import ErrorInfo
from onward.proto.router import Attempt, Progress

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"


def event(data: bytes, cursor: str | None = None) -> bytes:
    if cursor is None:
        return b"data: %b\n\n" % data
    return b"id: %b\ndata: %b\n\n" % (cursor.encode(), data)


def bare_event(cursor: str) -> bytes:
    """For whoever follows the tokens: a client has nothing to read in it."""
    return b"id: %b\ndata:\n\n" % cursor.encode()


def named_event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def error_event(error: ErrorInfo) -> bytes:
    return named_event("error", error_body(error))


def progress_comment(progress: Progress) -> bytes:
    said = f": progress {progress.engine} {progress.step} {progress.computed} {progress.queue}\n\n"
    return said.encode()


class Cursors:
    """Follows one answer, event by event, from these positions on. `known`: where whoever reads them stands, which may be
    further along."""

    def __init__(self, attempt: Attempt, positions: list[int], known: list[ChoiceCursor]) -> None:
        self._attempt = attempt
        self._positions = list(positions)
        self._choices = list(known)

    def after(self, piece: Piece) -> str | None:
        """None if the piece says nothing new."""
        index, token_ids, known = piece.choice, piece.token_ids, self._choices[piece.choice]
        position = self._positions[index] = self._positions[index] + len(token_ids)
        if known.finish_reason is not None:
            return None  # made again for its logprobs, up to the end that is known
        self._choices[index] = ChoiceCursor(position, piece.finish_reason)
        new_tokens = {index: token_ids} if token_ids else {}
        attempt = self._attempt
        return format_cursor(Cursor(attempt.request_id, attempt.seed, attempt.epoch, self._choices, new_tokens))
