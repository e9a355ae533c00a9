"""The interface by which a simulated client takes, checks and continues a response."""

from abc import ABC, abstractmethod
from typing import Any


class InvariantError(AssertionError):
    """An invariant is violated by what a client has received."""

    def __init__(self, invariant: int, what: str) -> None:
        super().__init__(what)
        self.invariant, self.what = invariant, what


class ReplyChecker(ABC):
    """Checks the response to one request over all tries. The base class is for a response that comes complete or not at
    all."""

    def __init__(self) -> None:
        self.cursor = ""
        """The last cursor, as the client sends it back. Empty if there is no position to resume from."""
        self.resume: dict[str, Any] = {}
        """Fields for the request that continues this one."""
        self.num_tokens = 0
        """Tokens that were received and compared."""
        self.response_id = ""
        """Id by which the response can be retrieved, if it can."""

    @property
    def is_finished(self) -> bool:
        return True

    @property
    def was_given_up(self) -> bool:
        return False

    @property
    def outcome(self) -> str:
        """The end reason of a request that was not refused."""
        return "complete"

    @property
    def text(self) -> str:
        """The text that the next turn of a conversation includes."""
        return ""

    def restart(self) -> None:
        """Discards what was received, because the request is sent again from its beginning."""
        self.num_tokens = 0

    def resume_at_cursor(self) -> None:  # noqa: B027 - most streams have nothing to undo
        """Discards what came after the last event with a cursor, because the client resumes there. Those events are
        sent again."""

    def take_event(self, event_id: str | None, data: dict[str, Any]) -> None:
        raise InvariantError(2, f"an event {data} of what is no stream")

    @abstractmethod
    def take_whole(self, body: bytes) -> None: ...

    @abstractmethod
    def check_end(self) -> None:
        """Checks a response that has ended."""

    def check_partial(self, partial: dict[str, Any]) -> None:
        """Checks the partial output beside an error."""
        raise InvariantError(2, f"a part {partial} of what comes whole or not at all")

    def resume_fields(self) -> dict[str, Any]:
        """Returns fields for the request that continues this one, made from the cursors alone."""
        return {}

    def continue_as_new_request(self) -> None:
        """Discards what the new request sends again, because a request that was given up continues as a new one. Raises
        `InvariantError` for bodies that come whole or not at all."""
        raise InvariantError(1, "it was given up, though it comes whole or not at all")
