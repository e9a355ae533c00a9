"""What the two sides of a hand-over tell the engine that drives them."""

from dataclasses import dataclass
from typing import NamedTuple

from onward.proto.handoff import Grant, Prefill, Ready
from onward.proto.kv_transfer import Endpoint
from onward.proto.request import ErrorInfo


class HandoverKey(NamedTuple):
    """P's name for a hand-over."""

    decode: str
    """Incarnation of the decode instance that numbers it."""
    number: int


@dataclass(frozen=True, slots=True)
class Lease:
    """What D gives to P. See `Grant`."""

    lease_id: str
    endpoint: Endpoint
    num_cached_tokens: int
    block_ids: list[int]
    checksums: bool


@dataclass(frozen=True, slots=True)
class OfferCame:
    """P can run the prompt now. To be answered by `grant` or `refuse`; who holds it for too long is answered for."""

    handover: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """P is done and every block lies in our memory, verified. P was told, and the hand-over is over."""

    handover: int
    ready: Ready


@dataclass(frozen=True, slots=True)
class Ended:
    """It failed, and P was told or has told us."""

    handover: int
    error: ErrorInfo
    lease_id: str | None
    """If it had been granted: to be revoked, since P may not know yet."""


DecodeEvent = OfferCame | Arrived | Ended


@dataclass(frozen=True, slots=True)
class WorkCame:
    """To be answered, at some time, by `offer` or `refuse`."""

    key: HandoverKey
    prefill: Prefill


@dataclass(frozen=True, slots=True)
class Granted:
    """From now on the blocks of the grant may be written, until `ready`, `refuse`, `fail` or `Dropped`."""

    key: HandoverKey
    grant: Grant


@dataclass(frozen=True, slots=True)
class Finished:
    """D has taken it."""

    key: HandoverKey


@dataclass(frozen=True, slots=True)
class Dropped:
    """It is over without success: stop writing, free everything."""

    key: HandoverKey
    error: ErrorInfo


PrefillEvent = WorkCame | Granted | Finished | Dropped
