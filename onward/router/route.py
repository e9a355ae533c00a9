"""Where one stream has been, and what that means for where it may go next. The book-keeping beside a `Stream`."""

from dataclasses import dataclass, field

from onward.proto.request import ErrorInfo
from onward.router.replicas import Booking
from onward.router.stream import Cause, Failed, Stream


@dataclass(frozen=True, slots=True)
class Resuming:
    """A stream is being carried on, and has not moved yet."""

    cause: Cause
    left: str
    """The instance that had it."""
    since_s: float
    """The last delivered event, or else the failure."""


@dataclass(slots=True)
class Route:
    stream: Stream
    opened_s: float
    spoken_s: float
    """When the client was last sent something."""
    verdict: ErrorInfo | None = None
    """How it ends, once that is settled. Set once."""
    verdict_body: bytes | None = None
    """An instance's own words, to be passed on as they are."""
    avoid: set[str] = field(default_factory=set)
    """Instances to keep out if there is another."""
    exclude: set[str] = field(default_factory=set)
    """Instances that will never take it."""
    resting: dict[str, float] = field(default_factory=dict)
    """Until when an instance is left alone."""
    not_before_s: float = 0.0
    grace_instance: str | None = None
    """It restarts a process, and may have the stream back if it is quick: until `grace_until_s`."""
    grace_until_s: float = 0.0
    owes_budget: ErrorInfo | None = None
    """The retry budget had nothing left for it, after this error; it is asked again until `budget_until_s`."""
    budget_until_s: float = 0.0
    waiting_since_s: float | None = None
    crowded_since_s: float | None = None
    """Since when instances that begin with it find no room, one after the other or again and again."""
    soonest_room: Failed | None = None
    """Of the instances that were full, what the one has said that will have room first."""
    booking: Booking | None = None
    prefill_bookings: list[Booking] = field(default_factory=list)
    resuming: Resuming | None = None
    may_be_kept: bool = False
    """An instance that may have it could not be asked. Where it cannot be made again it is not unknown."""
    is_asked_for_later: bool = False
    """Whoever wants it does not wait for it: what became of it is kept, streamed or not."""
    is_deleted: bool = False
    """A response that no client may see any more, while its run ends."""

    def settle(self, verdict: ErrorInfo, body: bytes | None = None) -> None:
        if self.verdict is None:
            self.verdict, self.verdict_body = verdict, body

    def excluded(self, now_s: float) -> frozenset[str]:
        self.resting = {instance: until_s for instance, until_s in self.resting.items() if until_s > now_s}
        return frozenset(self.exclude | self.resting.keys())

    def release(self) -> None:
        for booking in [self.booking, *self.prefill_bookings]:
            if booking is not None:
                booking.release()
        self.booking = None
        self.prefill_bookings.clear()
