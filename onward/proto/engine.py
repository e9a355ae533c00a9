"""Between api and engine. Identity is (request id, epoch, position).

The api issues epochs, each higher than any it used for that request before; the engine echoes them. The position is the
index in the whole output. Anything may be lost here: `HeldRequestsReport`, once a second, shows each side what the other
has.
"""

from typing import Literal

import msgspec

from onward.proto.field_types import Count, Duration, HttpError, Priority, Serial, SerialOrNone, TimeLeft
from onward.proto.kv_events import KvEvents
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import TokenLogprobs
from onward.proto.trace import RequestPhases

CRASHES_TO_ISOLATE = 2
"""Deaths of workers, or of engines, without progress: then a request is a suspect, and runs with no other beside it."""


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A typed error, as data. `code` is for machines, `message` for people."""

    code: str
    message: str
    status: HttpError = 500
    retryable: bool = False
    param: str | None = None
    retry_after_s: Duration | None = None
    stage: str | None = None
    """Of a handoff between instances: where it failed (`prefill`, `offer`, `transfer`, `decode`), or how (`silence`,
    `worker_crash`)."""


class CallerLimits(msgspec.Struct, frozen=True, array_like=True):
    """What one caller may have and use at a time, as its key says. None: no limit."""

    max_in_flight: Serial | None = None
    """Output sequences: a request of n choices counts n."""
    tokens_per_minute: Serial | None = None
    """Prompt and output together. Also what may be used at once, after a pause."""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Run this request, from the tokens so far. Also the one way to recover from anything."""

    seq: Serial
    """Numbers what one api process sends, so that `HeldRequestsReport` can say how far the engine had read."""
    request_id: str
    """Includes the choice: unique for each output sequence."""
    epoch: Serial
    prompt_token_ids: list[Count]
    sampling_params: SamplingParams
    generated_token_ids: list[Count] = []
    waited_s: Duration = 0.0
    """Since the request came to the router or api process that first took it, by that process's own clock. Clocks of
    different machines are never compared. The engine counts a bounded part of it as time in its queue."""
    deadline_in_s: TimeLeft | None = None
    """Time left, as a duration."""
    priority: Priority = 0
    """Smaller is served first."""
    cache_salt: str = ""
    worker_crashes: Count = 0
    """How many worker crashes without progress this request was part of."""
    engine_crashes: Count = 0
    """How many engines have died, without progress of this request, while they held it among others."""
    num_cached_tokens: Count | None = None
    """Prefix hit of the first admission, once known. Later admissions do not change what the client is told."""
    client_request_id: str = ""
    """The client's own name for the request, by which it may abort it."""
    rescore_from: SerialOrNone | None = None
    """A position of the output: from there on, the logprobs of `generated_token_ids` are wanted again. -1: those of the
    prompt too."""
    prefill_peers: list[str] = []
    """Handoff addresses that may be asked for this one, best first. Empty: those that the engine knows."""
    is_routed: bool = False
    """A router is in front: what cannot go on here goes on elsewhere, so nobody waits for blocks."""
    caller: str = ""
    """Whose request it is, by the name of the key; empty where there are no keys."""
    caller_limits: CallerLimits | None = None
    """The caller's, as they are now."""
    admit_as_new: bool = False
    """It passes the door as a new one, though the epoch is a later one: other instances have turned it away before, or a
    client's cursor says so, which nobody can prove."""
    max_draft_tokens: Count | None = None
    """Tokens that it may draft in a step. None: as many as the instance does."""
    restart_cause: Literal["", "engine", "lost"] = ""
    """Why an api process submits the request again, for metrics: its engine died, or a message was lost."""
    trace_id: str = ""
    """Of a sampled trace: the engine reports the phases of this request. Empty: it does not."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Ends a request. Without an epoch it ends every epoch of the id, and later ones for a while."""

    seq: Serial
    request_id: str
    epoch: Serial | None = None
    reason: str = "abort"
    """`abort`, or `stop` when the api has found a stop string."""
    num_tokens: Count | None = None
    """With `stop`: the output is cut to this length."""


class AbortByName(msgspec.Struct, frozen=True, array_like=True, tag="abort_by_name"):
    """Ends requests by what clients call them: exact request ids without the choice, or labels; or all there are."""

    seq: Serial
    query_id: Serial
    names: list[str]
    abort_all: bool = False
    received_ago_s: Duration | None = None
    """Said again to an engine that is new: how long ago it was said first. A request that came later is another one, though
    it may have the same label."""
    caller: str | None = None
    """Only this caller's requests are meant. None: everybody's."""


class QueryKvEvents(msgspec.Struct, frozen=True, array_like=True, tag="ask_kv_events"):
    """What has changed in the prefix cache since the change of this number; -1: all that it knows."""

    seq: Serial
    query_id: Serial
    next_event: SerialOrNone


ToEngine = Submit | Abort | AbortByName | QueryKvEvents


class RequestAccepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The engine holds this request now."""

    request_id: str
    epoch: Serial


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="delta"):
    """What a step added to one request's output."""

    request_id: str
    epoch: Serial
    position: Count
    """Index of the first of `token_ids` in the whole output; also how many were sent before."""
    token_ids: list[Count]
    num_prompt_tokens: Count
    num_cached_tokens: Count
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, `error` or `pd_reschedule`; decided where the stop happened."""
    error: ErrorInfo | None = None
    logprobs: list[TokenLogprobs] | None = None
    """Where asked for: one for each of `token_ids`."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Where asked for, with the first delta: of the prompt's tokens from the second one on."""
    rescored_logprobs: list[TokenLogprobs] | None = None
    """With `Submit.score_from`, with the first delta: of the given tokens from there on."""
    embedding: bytes | None = None
    """Of a request that wants a vector: that, with its end. See `proto.step.Embedding`."""
    num_draft_tokens: Serial = 0
    """How many tokens were guessed. The first `len(token_ids) - 1` were right: these are among `token_ids`."""


class AbortReply(msgspec.Struct, frozen=True, array_like=True, tag="abort_answer"):
    """Which of the names were aborted, and which nobody here has."""

    query_id: Serial
    aborted: list[str]
    unknown: list[str]


class TokenDeltas(msgspec.Struct, frozen=True, array_like=True, tag="deltas"):
    """All that one step has for one api process, in one message."""

    step: Serial
    deltas: list[TokenDelta]


class WorkerCrashReport(msgspec.Struct, frozen=True, array_like=True, tag="charged"):
    """The worker died under this request. The count travels with resubmissions, until a token past this place comes."""

    request_id: str
    epoch: Serial
    worker_crashes: Count


class HeldRequest(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    epoch: Serial
    position: Count
    """Next position the engine will send."""
    num_computed: Serial = 0
    """Tokens whose KV is there; while a peer computes it, how often the peer has said so. Moves as long as work does."""
    queue_position: Serial = 0
    """How many are served before it; 0 when it runs."""


class HeldRequestsReport(msgspec.Struct, frozen=True, array_like=True, tag="holding"):
    """Once a second: what the engine holds for this api process, having read its messages up to `seq`."""

    engine_incarnation: str
    seq: Serial
    step: Serial
    held: list[HeldRequest]


class KvEventsReply(msgspec.Struct, frozen=True, array_like=True, tag="kv_events"):
    query_id: Serial
    events: KvEvents


FromEngine = (
    RequestAccepted | TokenDeltas | WorkerCrashReport | HeldRequestsReport | AbortReply | KvEventsReply | RequestPhases
)
