"""What a simulated client needs of whatever it receives: to take it in, to check it, and to know how to go on."""

from abc import ABC, abstractmethod
from typing import Any


class InvariantError(AssertionError):
    """The client got what it should not have got."""

    def __init__(self, invariant: int, what: str) -> None:
        super().__init__(what)
        self.invariant, self.what = invariant, what


class ReplyChecker(ABC):
    """Of one request, over all attempts to have it answered. As it stands here, one that comes whole or not at all."""

    def __init__(self) -> None:
        self.cursor = ""
        """As the client sends it back; empty: there is no place to go on from."""
        self.resume: dict[str, Any] = {}
        """To be put into the request that continues this one."""
        self.num_tokens = 0
        """Told and compared."""
        self.response_id = ""
        """By which it can be asked for, if it can."""

    @property
    def is_finished(self) -> bool:
        return True

    @property
    def was_given_up(self) -> bool:
        return False

    @property
    def outcome(self) -> str:
        """How one ends that was not refused."""
        return "complete"

    @property
    def text(self) -> str:
        """What a talk goes on from."""
        return ""

    def restart(self) -> None:
        """The request is sent anew, from its beginning."""
        self.num_tokens = 0

    def take_event(self, event_id: str | None, data: dict[str, Any]) -> None:
        raise InvariantError(2, f"an event {data} of what is no stream")

    @abstractmethod
    def take_whole(self, body: bytes) -> None: ...

    @abstractmethod
    def check_end(self) -> None:
        """It claims to be complete."""

    def check_partial(self, partial: dict[str, Any]) -> None:
        """What came of it next to an error."""
        raise InvariantError(2, f"a part {partial} of what comes whole or not at all")

    def resume_fields(self) -> dict[str, Any]:
        """To be put into a request that goes on with this one, from the cursors alone."""
        return {}

    def continue_as_new_request(self) -> None:
        """What was given up goes on as a new request."""
        raise InvariantError(1, "it was given up, though it comes whole or not at all")
