"""What the two sides of a handoff tell the engine that drives them."""

from dataclasses import dataclass
from typing import NamedTuple

from onward.proto.engine import ErrorInfo
from onward.proto.handoff import LeaseGrant, PrefillDone, PrefillRequest


class HandoffKey(NamedTuple):
    """P's name for a handoff."""

    decode_incarnation: str
    """Incarnation of the decode instance that numbers it."""
    handoff_id: int


@dataclass(frozen=True, slots=True)
class OfferReceived:
    """P can run the prompt now. To be answered by `grant` or `refuse`; who holds it for too long is answered for."""

    handoff_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KvArrived:
    """P is done and every block lies in our memory, verified. P was told, and the handoff is over."""

    handoff_id: int
    ready: PrefillDone


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """It failed, and P was told or has told us. A lease that it was granted is to be revoked, since P may not know yet."""

    handoff_id: int
    error: ErrorInfo


DecodeEvent = OfferReceived | KvArrived | HandoffFailed


@dataclass(frozen=True, slots=True)
class PrefillRequested:
    """To be answered, at some time, by `offer` or `refuse`."""

    key: HandoffKey
    prefill: PrefillRequest


@dataclass(frozen=True, slots=True)
class GrantReceived:
    """From now on the blocks of the grant may be written, until `ready`, `refuse`, `fail` or `Dropped`."""

    key: HandoffKey
    grant: LeaseGrant


@dataclass(frozen=True, slots=True)
class HandoffCompleted:
    """D has taken it."""

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class HandoffCancelled:
    """It is over without success: stop writing, free everything."""

    key: HandoffKey
    error: ErrorInfo


PrefillEvent = PrefillRequested | GrantReceived | HandoffCompleted | HandoffCancelled
