"""The `id:` lines of one answer's events: each says where the stream stands after the whole tokens that it covers."""

from onward.api.pieces import Piece
from onward.proto.cursor import ChoiceCursor, Cursor, format_cursor
from onward.proto.router import Attempt


class Cursors:
    """Follows one answer, event by event, from these positions on. `known`: where whoever reads them stands, which may be
    further along."""

    def __init__(self, attempt: Attempt, positions: list[int], known: list[ChoiceCursor]) -> None:
        self._attempt = attempt
        self._positions = list(positions)
        self._choices = list(known)

    @property
    def num_tokens(self) -> int:
        """Of all choices, up to here."""
        return sum(self._positions)

    def at_usage(self) -> str:
        """When that has been told too."""
        told = self._attempt
        return format_cursor(
            Cursor(told.request_id, told.seed, told.epoch, self._choices, {}, told.created_s, usage_told=True)
        )

    def after(self, piece: Piece) -> str | None:
        """None if the piece says nothing new."""
        index, token_ids, known = piece.choice, piece.token_ids, self._choices[piece.choice]
        position = self._positions[index] = self._positions[index] + len(token_ids)
        if known.finish_reason is not None:
            return None  # made again for its logprobs, up to the end that is known
        self._choices[index] = ChoiceCursor(position, piece.finish_reason)
        new_tokens = {index: token_ids} if token_ids else {}
        told = self._attempt
        cursor = Cursor(told.request_id, told.seed, told.epoch, self._choices, new_tokens, told.created_s)
        return format_cursor(cursor)
