"""The trace that a request belongs to, and what the engine reports of traced requests.

`TraceContext` is part of `Attempt`, and so of every record of a stream: whichever process continues a stream, its spans
join the trace that the first attempt belongs to.
"""

from typing import Annotated, Literal

import msgspec

from onward.proto.field_types import Duration, Serial

MAX_TRACE_STATE = 512
"""Characters of a `tracestate` header that are passed on, as the W3C recommends."""

TraceId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
SpanId = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")]
"""Empty: there is none."""


class TraceContext(msgspec.Struct, frozen=True, array_like=True):
    trace_id: TraceId
    is_sampled: bool
    """Decided once, where the request arrived first."""
    span_id: SpanId = ""
    """The span of the latest attempt: what an instance does for the attempt is below it, and the next attempt links to it.
    Empty: no attempt has begun."""
    client_span_id: SpanId = ""
    """The client's own span, as its `traceparent` said."""
    trace_state: Annotated[str, msgspec.Meta(max_length=MAX_TRACE_STATE)] = ""


EnginePhase = Literal["queue", "prefill", "decode", "handoff", "transfer", "ended"]
"""`handoff`: another instance computes the prompt. `transfer`: a prefill instance has computed a prompt for a peer, and
sends the rest of its KV."""
PhaseCause = Literal["", "preemption", "worker_crash", "handoff_failed"]
"""Why a request left the phase before, if not by progress."""


class PhaseChange(msgspec.Struct, frozen=True, array_like=True):
    phase: EnginePhase
    ago_s: Duration
    """Before the message was sent. Clocks of two processes are never compared."""
    cause: PhaseCause = ""
    num_tokens: Serial = 0
    """Output tokens that the request had then."""
    num_cached_tokens: Serial = 0
    """Prompt tokens that the prefix cache had, where a prefill begins."""


class RequestPhases(msgspec.Struct, frozen=True, array_like=True, tag="phases"):
    """Phase changes of one traced request since the last such message."""

    request_id: str
    epoch: Serial
    changes: list[PhaseChange]
    prefill_peer: str = ""
    """Handoff address of the prefill instance that reports these phases. Empty: they are the engine's own."""
