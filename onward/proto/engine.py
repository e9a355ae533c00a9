"""Messages between api and engine. Identity is (request id, epoch, position).

The api issues epochs, each higher than any it used for that request before; the engine repeats them. The position is the
index in the whole output. Any message may be lost: `HeldRequestsReport`, once a second, shows each side what the other
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
    """Where a handoff between instances failed (`prefill`, `offer`, `transfer`, `decode`), or how (`silence`,
    `worker_crash`)."""


class CallerLimits(msgspec.Struct, frozen=True, array_like=True):
    """Limits of one caller, from its API key. None: no limit."""

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
    """Prefix-cache hit of the first admission, once known. Later admissions do not change what the client sees."""
    client_request_id: str = ""
    """The client's own name for the request, by which it may abort it."""
    rescore_from: SerialOrNone | None = None
    """A position of the output: from there on, the logprobs of `generated_token_ids` are wanted again. -1: those of the
    prompt too."""
    prefill_peers: list[str] = []
    """Handoff addresses of prefill instances for this request, best first. Empty: those that the engine knows."""
    is_routed: bool = False
    """A router has sent the request and can move it, so it does not wait for blocks here."""
    caller: str = ""
    """Name of the API key that the request came with; empty without keys."""
    caller_limits: CallerLimits | None = None
    """The caller's, as they are now."""
    admit_as_new: bool = False
    """The queue limits apply as to a new request, although the epoch is a later one: other instances have refused it
    before, or only a client's cursor, which proves nothing, says that it has begun."""
    max_draft_tokens: Count | None = None
    """Tokens that it may draft in a step. None: as many as the instance does."""
    restart_cause: Literal["", "engine", "lost"] = ""
    """Why an api process submits the request again, for metrics: its engine died, or a message was lost."""
    trace_id: str = ""
    """Id of a sampled trace: the engine reports the phases of this request. Empty: it does not."""


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
    """Only requests of this caller match. None: requests of all callers."""


class QueryKvEvents(msgspec.Struct, frozen=True, array_like=True, tag="ask_kv_events"):
    """Asks for the changes of the prefix cache since this number; -1 asks for a complete listing."""

    seq: Serial
    query_id: Serial
    next_event: SerialOrNone


ToEngine = Submit | Abort | AbortByName | QueryKvEvents


class RequestAccepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The engine holds this request now."""

    request_id: str
    epoch: Serial


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="delta"):
    """The part of one request's output that a step has added."""

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
    """The vector of an embedding request, sent with its end. See `proto.step.SlotEmbedding`."""
    num_draft_tokens: Serial = 0
    """Number of draft tokens. The first `len(token_ids) - 1` were accepted: these are among `token_ids`."""


class AbortReply(msgspec.Struct, frozen=True, array_like=True, tag="abort_answer"):
    """The names that were aborted, and those that are unknown here."""

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
    """Tokens whose KV is computed; while a peer computes it, the number of its progress reports. Grows as long as work
    continues."""
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
