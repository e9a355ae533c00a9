"""Between a decode instance (D) and a prefill instance (P). D owns the request; P works for it and decides nothing.

    D -> P   Prefill     the request and its tokens so far
    P -> D   Offer       when it can run the prompt now
    D -> P   Grant       blocks under a lease          or Refuse
    P -> D   Ready       tokens; all KV was written, nothing will follow. Repeated until Taken or Cancel
    D -> P   Taken       P frees
    either   Cancel, Heartbeat, Gone

D numbers handoffs; every message carries the number. D is known to P by its incarnation, which is also the identity of
its socket; P's messages carry P's. Anything may be lost, doubled, delayed or reordered. Times are durations.
"""

import msgspec

from onward.proto.engine import ErrorInfo
from onward.proto.field_types import Count, Duration, LeaseId, Priority, Serial, SerialOrNone, TimeLeft, Word64
from onward.proto.kv_transfer import KvEndpoint, KvLayout
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import TokenLogprobs


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
    """Of workers that died under it without progress: P runs it alone from the second one on."""
    rescore_from: SerialOrNone | None = None
    """See `Assign.score_from`."""
    max_draft_tokens: Count = 0
    """How many guesses for what follows are of use."""


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
    """Of the P that it is for."""
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
    """Of the list, how many P did not have to compute."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    draft_token_ids: list[Count] = []
    """Guesses for what follows. They take no position."""
    checksums: list[Word64] = []
    """Of each block that was written, where the grant asked for it."""
    grammar_done: bool = False
    """See `Tokens.grammar_done`."""


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
    """That incarnation is no more, or its KV memory is not: all it had under way is over."""

    incarnation: str


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """D to P: is that still you? Asked twice a second while something is under way, and answered at once."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    incarnation: str


ToPrefill = (
    PrefillRequest | LeaseGrant | RefuseHandoff | PrefillTaken | CancelHandoff | HandoffHeartbeat | PeerGone | Ping
)
ToDecode = PrefillOffer | PrefillDone | RefuseHandoff | CancelHandoff | HandoffHeartbeat | PeerGone | Pong
