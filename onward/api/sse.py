"""Server-sent events: bytes only. An event covers whole tokens, and its `id:` line says where the stream stands."""

from onward.api.answer import Answer, Piece
from onward.api.failures import error_body
from onward.proto.cursor import ChoiceCursor, Cursor, format_cursor
from onward.proto.request import ErrorInfo

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"
EPOCH = 1
"""Of the wire to whoever reads the stream. A router would issue it; a client has one attempt."""


def event(data: bytes, cursor: str | None = None) -> bytes:
    if cursor is None:
        return b"data: %b\n\n" % data
    return b"id: %b\ndata: %b\n\n" % (cursor.encode(), data)


def error_event(error: ErrorInfo) -> bytes:
    return b"event: error\ndata: %b\n\n" % error_body(error)


class Cursors:
    """Follows one answer, event by event."""

    def __init__(self, request_id: str, seed: int, answer: Answer) -> None:
        self._request_id = request_id
        self._seed = seed
        self._choices = [ChoiceCursor(choice.position) for choice in answer.choices]

    def after(self, piece: Piece) -> str:
        position = self._choices[piece.choice].position + len(piece.token_ids)
        self._choices[piece.choice] = ChoiceCursor(position, piece.finish_reason)
        new_tokens = {piece.choice: piece.token_ids} if piece.token_ids else {}
        return format_cursor(Cursor(self._request_id, self._seed, EPOCH, self._choices, new_tokens))
