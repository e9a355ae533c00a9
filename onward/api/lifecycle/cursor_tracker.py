"""The `id:` lines of one answer's events: each says where the stream stands after the whole tokens that it covers."""

from onward.api.lifecycle.choice_update import ChoiceUpdate
from onward.proto.cursor import ChoiceCursor, format_cursor_head, format_cursor_tail
from onward.proto.router import Attempt


class CursorTracker:
    """Follows one answer, event by event, from these positions on. `reader_positions`: where the reader of the
    events stands, which may be further along."""

    def __init__(self, attempt: Attempt, positions: list[int], reader_positions: list[ChoiceCursor]) -> None:
        self._head = format_cursor_head(attempt.request_id, attempt.created_s, attempt.seed, attempt.attempt_epoch)
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
