"""Messages between a router and the instances behind it.

The router owns the client's stream. It sends the request as the client wrote it, with the tokens that were delivered so
far. It reads tokens and ends from the `id:` lines of the answer, and does not interpret the tokens.

    POST                        from, to             body, and the answer
    /internal/attempt           router -> instance   Attempt; a stream of events, see below
    /internal/close             router -> instance   CloseAttempt, how an attempt's answer ends; ClosedAttempt
    /internal/register          instance -> router   Registration, once a second; RegistrationReply
    /internal/probe             router -> instance   RegistrationReply; Registration. If it does not register itself
    /internal/find              router -> instance   FindStream; StreamRecord, or 404
    /internal/abort             router -> instance   a client's abort, as JSON, and its caller; JSON
    /internal/tokenize          router -> instance   a client's request to /tokenize, as JSON; JSON
    /internal/detokenize        router -> instance   a client's request to /detokenize, as JSON; JSON
    /internal/embeddings        router -> instance   an Attempt at a path that embeds texts; JSON
    /internal/tokenizer_info    router -> instance   a client's question, as JSON; JSON
    /internal/count_tokens      router -> instance   a client's request to /v1/messages/count_tokens, as JSON; JSON
    /internal/input_tokens      router -> instance   a client's request to /v1/responses/input_tokens, as JSON; JSON
    /internal/text              router -> instance   QueryTokenizerFiles; the tokenizer and the chat template
    /internal/response          router -> instance   QueryResponse; the response as a client gets it

Bodies are msgpack unless the table says JSON. With a cluster key, each request has the header `X-Onward-Proof`; see
`transport.cluster_signature`.

The events of an attempt's answer, in order:

    : progress ...              each second without another event; see `StreamProgress`
    event: facts                once, before the first token: PromptUsage, as JSON
    id: CURSOR  data: CHUNK     whole tokens, as the client gets them
    id: CURSOR                  for the router alone: tokens of an answer that is not streamed, or that were skipped
    data: CHUNK                 without an id: openings (not for a resumed choice) and, if requested, usage
    : held                      before an event that goes to the client with the next one that has an id, or not at all
    event: answer               instead of chunks, for a client that does not stream: data is the whole body
    event: error                the attempt has failed: data is the error as JSON, with `partial` if there are tokens.
                                `retryable` says whether another attempt may succeed
    data: [DONE]
"""

from typing import Annotated, Literal

import msgspec

from onward.proto.cursor import MAX_CHOICES, ChoiceCursor
from onward.proto.engine import CallerLimits, ErrorInfo
from onward.proto.field_types import (
    Count,
    Duration,
    Priority,
    RetryDelay,
    Serial,
    SerialOrNone,
    TimeLeft,
    WallSecond,
    Word64,
)
from onward.proto.kv_events import KvEvents
from onward.proto.kv_transfer import KvLayout
from onward.proto.step import TokenLogprobs
from onward.proto.trace import TraceContext

SIGNATURE_HEADER = "x-onward-proof"
INTERNAL_PREFIX = "/internal/"
CALLER_HEADER = "x-onward-caller"
"""The caller on whose behalf a router sends a request, if the message does not contain it."""
IGNORED_FIELDS_HEADER = "x-onward-ignored-fields"
"""In an answer: the names of request fields that the instance does not know. A router passes it on."""
ATTEMPT_PATH = "/internal/attempt"
CLOSE_PATH = "/internal/close"
REGISTER_PATH = "/internal/register"
PROBE_PATH = "/internal/probe"
FIND_PATH = "/internal/find"
TOKENIZER_FILES_PATH = "/internal/text"
ABORT_PATH = "/internal/abort"
TOKENIZE_PATH = "/internal/tokenize"
EMBED_PATH = "/internal/embeddings"
DETOKENIZE_PATH = "/internal/detokenize"
TOKENIZER_INFO_PATH = "/internal/tokenizer_info"
COUNT_TOKENS_PATH = "/internal/count_tokens"
INPUT_TOKENS_PATH = "/internal/input_tokens"
RESPONSE_PATH = "/internal/response"


MAX_MODEL_NAMES = 16
"""Aliases of one instance."""
MAX_MODEL_NAME_CHARS = 256

ModelTag = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{8})?$")]


class ChoiceSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """A choice as far as the client has it."""

    token_ids: list[Count] = []
    finish_reason: str | None = None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is fixed before the first attempt, and what has happened since."""

    schema_version: Count
    path: str
    """Path of the client's request."""
    body: bytes
    """As the client sent it, without whitespace between its tokens."""
    request_id: str
    attempt_epoch: Serial
    """Epoch of this attempt, higher than that of any earlier one. It is part of the cursors."""
    seed: Word64
    created_s: WallSecond
    """Also the clock of chat templates."""
    waited_s: Duration = 0.0
    """Since it came to the router, by the router's clock. See `Submit.waited_s`."""
    client_request_id: str = ""
    deadline_in_s: TimeLeft | None = None
    """Time that is left, as a duration."""
    choices: list[ChoiceSnapshot] = []
    """Empty at the first attempt: the number of choices is the body's to say."""
    num_cached_tokens: Count | None = None
    """Prefix-cache hit of the first admission, once known."""
    prompt_token_ids: list[Count] | None = None
    """Where the router has made them, by a tokenizer that this instance has too. The body's text is not looked at."""
    prefill_peers: list[str] = []
    """Handoff addresses that a decode instance may ask, best first. Empty: its own."""
    is_final: bool = False
    """No attempt follows: a give-up is answered in the client's own form (`pd_reschedule`), not by an error event."""
    reader_positions: list[ChoiceCursor] = []
    """What the client has of each choice although no process has the tokens any more. They are generated again from the
    seed. Their events have only `id:` lines; chunks begin behind these positions."""
    usage_sent: bool = False
    """The client has everything but the end."""
    was_accepted: bool = False
    """An earlier attempt was let in. Until then each instance may turn it away, as it does with any new request."""
    caller: str = ""
    """Name of the API key that the request came with; empty without keys."""
    caller_limits: CallerLimits | None = None
    """The caller's, as they were when this attempt was made."""
    caller_priority: Priority | None = None
    """The best that the caller's requests may ask for. None: any."""
    default_max_tokens: Count = 0
    """Output limit of a completion whose body has none, fixed where the request arrived first, so that every attempt
    has the same one. 0: what fits into the context."""
    strict_fields: bool = False
    """The router refuses unknown fields of the body, whatever this instance does for its own clients."""
    trace: TraceContext | None = None
    """None: no trace is known, and an instance that traces decides for itself."""
    model_tag: ModelTag = ""
    """`cursor.model_tag` of the model that the body names, where the client asked for it by another name. The cursors have
    it, so that a client that sends its own request again gets the same model."""
    max_prompt_tokens: Count | None = None
    """Number of tokens that `truncate_prompt_tokens: -1` cuts a prompt to, fixed by the first instance, so that another one
    with another context continues the same prompt. None: the body does not ask for it, or no instance has fixed it."""
    completed_s: WallSecond | None = None
    """When the output was complete. Set by the process that completed it, and repeated by all later ones, so that a
    response keeps its `completed_at`. None: it is not complete, or the sender does not know."""


class CloseAttempt(msgspec.Struct, frozen=True):
    """A router gives a request up, and asks how its answer ends after the tokens that the client has."""

    attempt: Attempt
    """With these tokens. It is not run."""
    error: ErrorInfo
    """With the code `aborted`, every choice that is open ends with `abort`. Where none is open, and the whole answer would
    lack logprobs, it ends with the error."""


class ClosedAttempt(msgspec.Struct, frozen=True):
    status: Annotated[int, msgspec.Meta(ge=200, le=599)]
    """Status of a response that has not been started yet."""
    body: bytes
    """For a stream, the missing events without `[DONE]`; otherwise the whole body."""


class PromptUsage(msgspec.Struct, frozen=True):
    num_prompt_tokens: Count
    num_cached_tokens: Count
    num_choices: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)]
    max_prompt_tokens: Count | None = None
    """See `Attempt.max_prompt_tokens`."""


class StreamProgress(msgspec.Struct, frozen=True, array_like=True):
    """`: progress ENGINE STEP COMPUTED QUEUE`. As long as one of these moves, the request is not stalled."""

    engine: str
    """Incarnation; `-` while the instance restarts one."""
    step: Serial
    num_computed: Serial
    """Tokens of the request, over all choices, whose KV is computed."""
    queue_position: Serial
    """How many are served before it; 0 when it runs."""


class InstanceLoad(msgspec.Struct, frozen=True):
    running: Count = 0
    waiting: Count = 0
    max_running: Count = 0
    free_blocks: Count = 0
    """Free or merely cached."""
    num_blocks: Count = 0


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as it is now. Silence makes it suspect, then gone; a clean leaving says so."""

    schema_version: Count
    instance: str
    """Incarnation of the instance."""
    url: str
    role: str
    state: str
    """`starting`, `ready`, `restarting` (a process of it), `draining` or `leaving`."""
    model: str
    """The name that its answers give; the version that a stream keeps to."""
    fingerprint: str
    """Fingerprint of the numerics: instances with equal ones continue each other's streams bit by bit."""
    kv_layout: KvLayout | None
    handoff_address: str = ""
    """Where decode instances ask it for prefills; empty: nowhere."""
    max_tokens: Count = 0
    """The longest prompt plus output that it can hold."""
    block_size: Count = 0
    engine: str = ""
    step: Serial = 0
    load: InstanceLoad = InstanceLoad()
    kv_events: KvEvents | None = None
    pids_by_role: dict[str, list[Count]] = {}
    oom_kills: dict[str, Count] = {}
    """Processes that the kernel killed for lack of memory, by role."""
    tokenizer_hash: str = ""
    """Hash of the tokenizer and the chat template: equal ones give the same token ids. Empty: the instance accepts only
    token ids."""
    model_aliases: list[str] = []
    """Further names that clients may ask for the model by."""
    name: str = ""
    """Name of the instance in its cluster, which stays when the instance is started anew."""
    generation: Serial = 0
    """Number of the start under this name, on whatever machine. A router keeps only the highest one of a name. 0: the name
    may be shared."""
    node: str = ""
    """The machine, as people are shown it."""


class RegistrationReply(msgspec.Struct, frozen=True):
    router: str
    """Incarnation of the router: a new one knows no instances yet."""
    interval_s: RetryDelay
    error: str = ""
    """Why it is not taken: another model, another layout."""
    wants_kv_events: bool = False
    next_kv_event: SerialOrNone = -1
    """The number to go on from; -1: everything."""
    num_other_instances: SerialOrNone = -1
    """Other instances that are ready to take streams; -1: not known."""


class FindStream(msgspec.Struct, frozen=True):
    request_id: str


class QueryTokenizerFiles(msgspec.Struct, frozen=True):
    """Nothing to say: an instance has one model."""


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a stream whose client has gone, kept for a while so that the client can resume it."""

    attempt: Attempt
    """As it would be sent again, with all tokens that were made."""
    is_live: bool = False
    """The stream is running, as far as the sender knows."""
    logprobs: list[TokenLogprobs] = []
    """For a stored response: the logprobs of its tokens, if requested."""
    error: ErrorInfo | None = None
    """For a stored response: the error that it failed with."""
    is_cancelled: bool = False
    """For a stored response: it was cancelled."""

    @property
    def is_finished(self) -> bool:
        """Nothing will follow."""
        has_ended = bool(self.attempt.choices) and all(one.finish_reason is not None for one in self.attempt.choices)
        return has_ended or self.error is not None or self.is_cancelled


class InstanceAbortReply(msgspec.Struct, frozen=True):
    """An instance's reply to a request at `ABORT_PATH`."""

    aborted: list[str]
    idle: dict[str, list[str]] = {}
    """Responses that it keeps and that nothing runs there: by id, the names that mean them. They are left as they are."""


class QueryResponse(msgspec.Struct, frozen=True, kw_only=True):
    """About a response of which the router has found this record. An instance knows what the tokens mean."""

    action: Literal["show", "events", "whole", "rest", "input_items", "context", "keep", "take_up", "delete"]
    """`whole`, `rest`: a response that is over, for the client that it is written to, stored or not: as it is shown, or the
    events that are missing. `context`: its items, for one that goes on from it. `keep` it as it is; if it is cancelled,
    whatever runs of it at the instance ends. The answer is the record that is kept, which may have completed before.
    `take_up`: the instance generates the rest. `delete` it, and end what runs of it."""
    record: StreamRecord
    after_event: SerialOrNone = -1
    """The number of the last event that the client has."""
    num_told: Count | None = None
    """With `rest`: number of tokens whose events the client has. None: it has no event yet."""
    query: dict[str, str] = {}
