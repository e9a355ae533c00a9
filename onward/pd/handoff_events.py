"""Events that the two sides of a handoff report to the engine that drives them."""

from dataclasses import dataclass
from typing import NamedTuple

from onward.proto.engine import ErrorInfo
from onward.proto.handoff import LeaseGrant, PrefillDone, PrefillRequest


class HandoffKey(NamedTuple):
    """Identifies a handoff on P's side."""

    decode_incarnation: str
    """Incarnation of the decode instance that numbers it."""
    handoff_id: int


@dataclass(frozen=True, slots=True)
class OfferReceived:
    """P can run the prompt now. The engine answers by `grant` or `refuse`; an offer that it holds for too long is
    refused."""

    handoff_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KvArrived:
    """P is done, and every block is in D's memory and verified. P was informed, and the handoff is over."""

    handoff_id: int
    ready: PrefillDone


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """The handoff failed. D has informed P, or P has informed D. The engine must revoke a granted lease, because P may
    not know of the failure yet."""

    handoff_id: int
    error: ErrorInfo


DecodeEvent = OfferReceived | KvArrived | HandoffFailed


@dataclass(frozen=True, slots=True)
class PrefillRequested:
    """D wants a prompt to be computed. The engine answers, at some time, by `offer` or `refuse`."""

    key: HandoffKey
    prefill: PrefillRequest


@dataclass(frozen=True, slots=True)
class GrantReceived:
    """From now on the blocks of the grant may be written, until `ready`, `refuse`, `fail` or `HandoffCancelled`."""

    key: HandoffKey
    grant: LeaseGrant


@dataclass(frozen=True, slots=True)
class HandoffCompleted:
    """D has taken the KV."""

    key: HandoffKey


@dataclass(frozen=True, slots=True)
class HandoffCancelled:
    """The handoff ended without success. The engine must stop writing and free everything."""

    key: HandoffKey
    error: ErrorInfo


PrefillEvent = PrefillRequested | GrantReceived | HandoffCompleted | HandoffCancelled
