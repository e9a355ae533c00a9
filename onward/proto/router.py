"""Between a router and the instances behind it: who is there, and one attempt at a client's request.

The router owns the client's stream. It sends the request as the client wrote it, with the tokens that were delivered so
far, and reads tokens and ends from the `id:` lines of the answer; what the tokens mean it need not know.

    POST /internal/attempt      router -> instance   an Attempt; answered by a stream of events
    POST /internal/close        router -> instance   a Close: how an attempt's answer ends; answered by a Closed
    POST /internal/register     instance -> router   a Registration, each second; answered by a RegisterAnswer
    POST /internal/probe        router -> instance   what it would answer to a Registration; answered by a Registration
    POST /internal/find         router -> instance   a Find: who has this stream's record? answered by a Record, or 404
    POST /internal/abort        router -> instance   an abort as clients ask for it, and whose; JSON both ways
    POST /internal/tokenize     router -> instance   as clients ask it at /tokenize; JSON both ways
    POST /internal/detokenize   router -> instance   as clients ask it at /detokenize; JSON both ways
    POST /internal/text         router -> instance   an AskText: the tokenizer and template; answered by a ModelText
    POST /internal/response     router -> instance   an AskResponse: what a record says; answered as a client would be

Bodies are msgpack both ways but where it says JSON, and for an attempt's answer. The probe is for instances that do not
register by themselves.
All of them carry the header `X-Onward-Proof` where there is a cluster key; see `transport.cluster_signature`.

The events of an attempt's answer, in order:

    : progress …                each second while nothing else is said; see `Progress`
    event: facts                once, before the first token: data is a Facts, as JSON
    id: CURSOR  data: CHUNK     as the client gets it, whole tokens each
    id: CURSOR                  for the router alone: tokens of an answer that is not streamed, or that were skipped
    data: CHUNK                 without an id: openings (not for a resumed choice) and, where asked for, usage
    : held                      in front of an event: it goes to the client with the next one that has an id, or not at all
    event: answer               instead of chunks, for a client that does not stream: data is the whole body
    event: error                it cannot go on: data is the error as JSON, with `partial` where there are tokens.
                                `retryable` says whether another attempt may
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
"""For whom a router asks, where the message does not say it."""
IGNORED_FIELDS_HEADER = "x-onward-ignored-fields"
"""Of an answer: the names of the request's fields that the instance does not know. A router passes it on."""
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
RESPONSE_PATH = "/internal/response"


class ChoiceSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """One choice as far as the client has it."""

    token_ids: list[Count] = []
    finish_reason: str | None = None


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is fixed before the first attempt, and what has happened since."""

    schema_version: Count
    path: str
    """Of the client's request."""
    body: bytes
    """As the client sent it, without whitespace between its tokens."""
    request_id: str
    attempt_epoch: Serial
    """Of this attempt: higher than any before. It stands in the cursors."""
    seed: Word64
    created_s: WallSecond
    """Also the clock of chat templates."""
    waited_s: Duration = 0.0
    """Since it came to the router, by the router's clock. See `Submit.waited_s`."""
    client_request_id: str = ""
    deadline_in_s: TimeLeft | None = None
    """What is left, as a duration."""
    choices: list[ChoiceSnapshot] = []
    """Empty at the first attempt: the number of choices is the body's to say."""
    num_cached_tokens: Count | None = None
    """Of the first admission, once known."""
    prompt_token_ids: list[Count] | None = None
    """Where the router has made them, by a tokenizer that this instance has too. The body's text is not looked at."""
    prefill_peers: list[str] = []
    """Handoff addresses that a decode instance may ask, best first. Empty: its own."""
    is_final: bool = False
    """No attempt follows: a give-up is answered in the client's own form (`pd_reschedule`), not by an error event."""
    reader_positions: list[ChoiceCursor] = []
    """What the client has of each choice although nobody has the tokens any more. They are made again from the seed and
    told by `id:` lines alone, without openings; the chunks begin behind these places."""
    usage_sent: bool = False
    """The client has everything but the end."""
    was_accepted: bool = False
    """An earlier attempt was let in. Until then each instance may turn it away, as it does with any new request."""
    caller: str = ""
    """Whose request it is, by the name of the key; empty where there are no keys."""
    caller_limits: CallerLimits | None = None
    """The caller's, as they were when this attempt was made."""
    caller_priority: Priority | None = None
    """The best that the caller's requests may ask for. None: any."""
    default_max_tokens: Count = 0
    """Output limit of a completion whose body names none, as it was where the request arrived first: every attempt has the
    same one. 0: what fits."""
    strict_fields: bool = False
    """The router refuses unknown fields of the body, whatever this instance does for its own clients."""
    trace: TraceContext | None = None
    """None: no trace is known, and an instance that traces decides for itself."""


class CloseAttempt(msgspec.Struct, frozen=True):
    """A router gives a request up, and asks how its answer ends after the tokens that the client has."""

    attempt: Attempt
    """With these tokens. It is not run."""
    error: ErrorInfo
    """With the code `aborted`, every choice that is open ends with `abort`. Where none is open, and the whole answer would
    lack logprobs, it ends with the error."""


class ClosedAttempt(msgspec.Struct, frozen=True):
    status: Annotated[int, msgspec.Meta(ge=200, le=599)]
    """Of a response that has none yet."""
    body: bytes
    """Of a stream the events that are missing, but for `[DONE]`; else the whole body."""


class PromptUsage(msgspec.Struct, frozen=True):
    num_prompt_tokens: Count
    num_cached_tokens: Count
    num_choices: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)]


class StreamProgress(msgspec.Struct, frozen=True, array_like=True):
    """`: progress ENGINE STEP COMPUTED QUEUE`. As long as one of these moves, the request is not stalled."""

    engine: str
    """Incarnation; `-` while the instance restarts one."""
    step: Serial
    num_computed: Serial
    """Tokens of the request, over all choices, whose KV is there."""
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
    """Its incarnation."""
    url: str
    role: str
    state: str
    """`starting`, `ready`, `restarting` (a process of it), `draining` or `leaving`."""
    model: str
    fingerprint: str
    """Of the numerics: equal ones continue each other's streams bit by bit."""
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
    """Of the tokenizer and the chat template: equal ones make the same token ids. Empty: it takes token ids only."""


class RegistrationReply(msgspec.Struct, frozen=True):
    router: str
    """Its incarnation: a new one knows nothing yet."""
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
    """A stream whose client has gone, kept for a while so that it can come back."""

    attempt: Attempt
    """As it would be sent again, with all tokens that were made."""
    is_live: bool = False
    """It is under way, as far as whoever tells this knows."""
    logprobs: list[TokenLogprobs] = []
    """Of a response that is kept: those of its tokens, where they were asked for."""
    error: ErrorInfo | None = None
    """Of a response: why it has failed."""
    is_cancelled: bool = False
    """Of a response: its client does not want the rest."""

    @property
    def is_finished(self) -> bool:
        """Nothing will follow."""
        has_ended = bool(self.attempt.choices) and all(one.finish_reason is not None for one in self.attempt.choices)
        return has_ended or self.error is not None or self.is_cancelled


class InstanceAbortReply(msgspec.Struct, frozen=True):
    """What an instance answers to a router's `ABORT_PATH`."""

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
    """With `rest`: how many tokens the client has been told of. None: it has no event yet."""
    query: dict[str, str] = {}
