"""The handoff of a prompt's KV from a prefill instance (P) to a decode instance (D): two machines without I/O.

    D   ask ─────> asked ──Offer──> offered ──grant()──> granted ──Ready and counted()──> Arrived
    P   Prefill ─> queued ─offer()─> offered ──Grant───> granted ──ready()──> ready ──Taken──> Finished

From every state of D a failure leads to `Ended`, from every state of P to `Dropped`, and the other side is told. Words
may be lost, doubled, delayed and reordered: what must be answered is repeated, what is repeated is answered in the same
way, and what is never answered ends with a lease. The messages are described in `onward.proto.handoff`.

Whoever drives a machine gives it everything that has arrived before it calls `tick` with the same time: a message that
comes in the same turn as its deadline is in time. After each turn it takes the events and sends what `drain` returns.
The machines know neither sockets nor clocks, neither blocks nor requests.
"""

from onward.pd.decode_side import DecodeSide
from onward.pd.handoff_events import (
    DecodeEvent,
    GrantedLease,
    GrantReceived,
    HandoffCancelled,
    HandoffCompleted,
    HandoffFailed,
    HandoffKey,
    KvArrived,
    OfferReceived,
    PrefillEvent,
    PrefillRequested,
)
from onward.pd.handoff_timeouts import HandoffTimeouts
from onward.pd.prefill_side import PrefillSide

__all__ = [
    "DecodeEvent",
    "DecodeSide",
    "GrantReceived",
    "GrantedLease",
    "HandoffCancelled",
    "HandoffCompleted",
    "HandoffFailed",
    "HandoffKey",
    "HandoffTimeouts",
    "KvArrived",
    "OfferReceived",
    "PrefillEvent",
    "PrefillRequested",
    "PrefillSide",
]
