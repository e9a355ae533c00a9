"""The durations of a handoff. All follow from three settings, so that they always fit each other.

    P sends an offer or a heartbeat, and D answers it:

    P   sent |---------- lease_s ----------| stops, and reports it
    D        . answered |---------- lease_s ----------|- margin_s -| gives up

D answers after P has sent, and waits longer. So P has stopped when D gives up, as long as the rates of their clocks
differ by less than `lease_margin_s` in `lease_s`, and P checks its clock more often than every `lease_margin_s`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HandoffTimeouts:
    lease_s: float
    offer_hold_s: float
    """How long D may hold an offer before it answers."""
    handoff_timeout_s: float
    """How long one handoff may take in all, including its time in P's queue."""

    def __post_init__(self) -> None:
        assert self.lease_s > 0, "a lease has a duration"
        assert self.offer_hold_s >= 0, "an offer is not held for a negative time"
        assert self.handoff_timeout_s > 0, "a handoff has time to complete"

    @property
    def lease_margin_s(self) -> float:
        return self.lease_s / 5

    @property
    def silence_timeout_s(self) -> float:
        """How long D waits for a message from P."""
        return self.lease_s + self.lease_margin_s

    @property
    def heartbeat_interval_s(self) -> float:
        return heartbeat_interval_s(self.lease_s)

    @property
    def resend_interval_s(self) -> float:
        """Interval between two copies of a message that has not been answered."""
        return self.heartbeat_interval_s / 2


def heartbeat_interval_s(lease_s: float) -> float:
    """Returns an interval with several heartbeats in each lease, because a few may be lost."""
    return min(1.0, lease_s / 5)
