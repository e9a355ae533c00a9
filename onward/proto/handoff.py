"""Messages between a decode instance (D) and a prefill instance (P). D owns the request; P works for it.

    D -> P   PrefillRequest   the request and its tokens so far
    P -> D   PrefillOffer     P has room for the prompt now
    D -> P   LeaseGrant       blocks under a lease; or RefuseHandoff
    P -> D   PrefillDone      tokens; all KV was written, no write will follow. Repeated until PrefillTaken or CancelHandoff
    D -> P   PrefillTaken     P frees its blocks
    P -> D   PrefillPhases    of a traced request: what P did. Sent once, before the handoff ends
    either   CancelHandoff, HandoffHeartbeat, PeerGone

D numbers handoffs; every message contains the number. P knows D by its incarnation, which is also the identity of its
socket; P's messages contain P's incarnation. Messages may be lost, duplicated, delayed or reordered. Times are
durations.
"""

import msgspec

from onward.proto.engine import ErrorInfo
from onward.proto.field_types import Count, Duration, LeaseId, Priority, Serial, SerialOrNone, TimeLeft, Word64
from onward.proto.kv_transfer import KvEndpoint, KvLayout
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import TokenLogprobs
from onward.proto.trace import PhaseChange


class PrefillRequest(msgspec.Struct, frozen=True, array_like=True, tag="prefill"):
    """Compute the KV of this list and draw the token that follows. Repeated until P is heard of."""

    handoff_id: Serial
    kv_layout: KvLayout
    request_id: str
    """For logs; what identifies the work is the number."""
    token_ids: list[Count]
    num_prompt: Count
    sampling_params: SamplingParams
    priority: Priority = 0
    waited_s: Duration = 0.0
    """At the decode instance, see `Submit.waited_s`."""
    deadline_in_s: TimeLeft | None = None
    cache_salt: str = ""
    worker_crashes: Count = 0
    """Workers that died while they ran it without progress. From the second one on, P runs it alone."""
    rescore_from: SerialOrNone | None = None
    """See `AssignSlot.score_from`."""
    max_draft_tokens: Count = 0
    """How many draft tokens the decode instance can use."""
    client_request_id: str = ""
    """The client's label of the request, for logs."""
    is_traced: bool = False
    """P reports its phases of this request, see `PrefillPhases`."""


class PrefillOffer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """P can run it now, and asks for this many blocks: those of the whole list."""

    handoff_id: Serial
    incarnation: str
    """P's, as in everything that P sends."""
    num_blocks: Count


class LeaseGrant(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    """The answer to an Offer; the same one, however often it is asked for.

    list    |-- num_cached_tokens: D has them, pinned until the end --|-- block_ids: to be written --|
    """

    handoff_id: Serial
    incarnation: str
    """Incarnation of the P that the message is for."""
    lease_id: LeaseId
    endpoint: KvEndpoint
    num_cached_tokens: Count
    block_ids: list[Count]
    lease_s: Duration
    """P counts from when it sent the offer, or the last heartbeat that was answered; D counts from its answer."""
    checksums: bool


class RefuseHandoff(msgspec.Struct, frozen=True, array_like=True, tag="refuse"):
    """No: from P to a Prefill, from D to an Offer. The handoff is over, on both sides."""

    handoff_id: Serial
    error: ErrorInfo
    incarnation: str = ""
    """P's: of the sender, or of the one that it is for. Empty: any."""


class PrefillDone(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """All is computed and written, and no write will follow."""

    handoff_id: Serial
    incarnation: str
    token_ids: list[Count]
    """From position len(generated) on."""
    num_cached_tokens: Count
    """Number of tokens in the list that P did not have to compute."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    draft_token_ids: list[Count] = []
    """Draft tokens that follow the first token. They take no position."""
    checksums: list[Word64] = []
    """Checksum of each block that was written, if the grant asked for them."""
    grammar_done: bool = False
    """See `SlotTokens.grammar_done`."""


class PrefillPhases(msgspec.Struct, frozen=True, array_like=True, tag="prefill_phases"):
    """The phases of a traced request at P, for the spans that D's api process sends. A lost message is not repeated."""

    handoff_id: Serial
    incarnation: str
    changes: list[PhaseChange]


class PrefillTaken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """D has verified it and goes on by itself. Repeated whenever P says Ready again."""

    handoff_id: Serial


class CancelHandoff(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """It is over, for this reason. Also the answer to anything about a handoff that one does not have."""

    handoff_id: Serial
    error: ErrorInfo
    incarnation: str = ""
    """P's: of the sender, or of the one that it is for. Empty: any."""


class HandoffHeartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """P, each second and whenever a Prefill is repeated: I still have these. D answers with the same number and those
    it still wants, which extends their leases; what is missing from the answer is over."""

    number: Serial
    handoff_ids: list[Serial]
    incarnation: str = ""
    """P's: of the sender, or of the one that it is for. Empty: any."""


class PeerGone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """The named incarnation has ended, or its KV memory has: all of its handoffs are over."""

    incarnation: str


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """D to P: is that still you? Asked twice a second while something is under way, and answered at once."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    incarnation: str


ToPrefill = (
    PrefillRequest | LeaseGrant | RefuseHandoff | PrefillTaken | CancelHandoff | HandoffHeartbeat | PeerGone | Ping
)
ToDecode = (
    PrefillOffer | PrefillDone | PrefillPhases | RefuseHandoff | CancelHandoff | HandoffHeartbeat | PeerGone | Pong
)
