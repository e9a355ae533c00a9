"""Routing state of one client stream: instances tried, avoided and reserved, retry times, and the final error."""

from dataclasses import dataclass, field

from onward.obs.request_trace import RequestTrace
from onward.proto.engine import ErrorInfo
from onward.router.client_stream import AttemptFailure, ClientStream, FailureCause
from onward.router.instance_registry import Reservation


@dataclass(frozen=True, slots=True)
class PendingResume:
    """A resume that is under way: the next attempt has not delivered anything yet."""

    cause: FailureCause
    from_instance: str
    """The instance that had it."""
    paused_since_s: float
    """The last delivered event, or else the failure."""


@dataclass(slots=True)
class StreamRoutingState:
    """A `ClientStream` with what the router needs to choose its next attempt. The stream itself holds the events."""

    stream: ClientStream
    opened_at_s: float
    last_write_at_s: float
    """When the client was last sent something."""
    is_continued: bool = False
    """By a client that has had its first token before."""
    first_token_at_s: float | None = None
    final_error: ErrorInfo | None = None
    """How it ends, once that is settled. Set once."""
    final_error_body: bytes | None = None
    """An instance's own words, to be passed on as they are."""
    avoided_instances: set[str] = field(default_factory=set)
    """Instances to keep out if there is another."""
    refused_by: set[str] = field(default_factory=set)
    """Instances that will never take it."""
    resting_until_s: dict[str, float] = field(default_factory=dict)
    """Until when an instance is left alone."""
    next_attempt_at_s: float = 0.0
    grace_instance_id: str | None = None
    """It restarts a process, and may have the stream back if it is quick: until `grace_until_s`."""
    grace_until_s: float = 0.0
    successor_url: str | None = None
    """A new server takes the place of `grace_instance_id` at this URL: the stream waits for it, until `grace_until_s`, and
    is sent there."""
    budget_refused_error: ErrorInfo | None = None
    """The retry budget had nothing left for it, after this error; it is asked again until `budget_deadline_at_s`."""
    budget_deadline_at_s: float = 0.0
    waiting_since_s: float | None = None
    overloaded_since_s: float | None = None
    """Since when instances that begin with it find no room, one after the other or again and again."""
    earliest_overload: AttemptFailure | None = None
    """The failure with the earliest Retry-After among those at overloaded instances."""
    reservation: Reservation | None = None
    prefill_reservations: list[Reservation] = field(default_factory=list)
    pending_resume: PendingResume | None = None
    may_exist_at_unreachable_instance: bool = False
    """An instance that may have it could not be asked. Where it cannot be made again it is not unknown."""
    is_background: bool = False
    """No client waits for it: its outcome is stored, streamed or not."""
    is_deleted: bool = False
    """A response that no client may see any more, while its run ends."""
    trace: RequestTrace | None = None
    """Set for a traced request."""

    def set_final_error(self, error: ErrorInfo, body: bytes | None = None) -> None:
        if self.final_error is None:
            self.final_error, self.final_error_body = error, body

    def excluded_instances(self, now_s: float) -> frozenset[str]:
        self.resting_until_s = {
            instance: until_s for instance, until_s in self.resting_until_s.items() if until_s > now_s
        }
        return frozenset(self.refused_by | self.resting_until_s.keys())

    def release_reservations(self) -> None:
        for reservation in [self.reservation, *self.prefill_reservations]:
            if reservation is not None:
                reservation.release()
        self.reservation = None
        self.prefill_reservations.clear()
