"""One client's stream, across all the attempts at it: what the client has, and what became of the attempt under way.

An attempt is begun, its events are passed to `on_event`, and it ends by completing the stream or by failing. Whatever
`on_event` returns must be written to the client before anything else happens to the stream: the tokens count as
delivered from then on. Whether and where another attempt is made is for `core`. Takes events and the time; knows neither
sockets nor instances.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

from onward.errors import RETRY_SOON_S
from onward.proto import SCHEMA_VERSION
from onward.proto.cursor import ChoiceCursor, Cursor
from onward.proto.engine import CallerLimits, ErrorInfo
from onward.proto.finish_reasons import ABORT, PD_RESCHEDULE
from onward.proto.router import Attempt, ChoiceSnapshot, PromptUsage, StreamProgress
from onward.proto.trace import TraceContext
from onward.router.upstream_events import (
    BLANK_LINE,
    CompleteBody,
    DoneEvent,
    HeldChunk,
    PlainChunk,
    TokenEvent,
    UpstreamErrorEvent,
    UpstreamEvent,
)

RESTARTING_ENGINE = "-"
DRAINING = "draining"
"""The code of an instance's error when it hands its streams over."""
NO_DECODE_BLOCKS = "pd_no_decode_blocks"
"""The code of an instance's error when it has no room for a prompt that others would compute."""
MAX_OPENING_CHUNKS = 128
MAX_HELD_CHUNKS = 4096
"""Events that an instance wants to be told together."""
BYTES_PER_TOKEN = 36
"""Of an id in a list, for estimates."""


class FailureCause(Enum):
    """Why an attempt ended before the stream did."""

    REFUSED = "refused"
    """The instance is not taking requests. No attempt was made."""
    UNREACHABLE = "unreachable"
    """No connection to the instance could be made. No attempt was made."""
    OVERLOADED = "overloaded"
    REJECTED = "rejected"
    """By a 4xx: this instance will never take it."""
    DRAIN = "drain"
    LOST = "lost"
    STALL = "stall"
    RESTART = "restart"
    GONE = "gone"
    ERROR = "error"
    PROTOCOL = "protocol"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    cause: FailureCause
    error: ErrorInfo
    body: bytes | None = None
    """The error as the instance has written it: of an HTTP response, or of an event, which may have `partial`."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """Fixed before the first attempt, and the same for all of them."""

    request_id: str
    seed: int
    created_s: int
    arrived_at_s: float
    """By this router's clock."""
    path: str
    body: bytes
    is_streaming: bool
    wants_usage: bool = False
    client_request_id: str = ""
    caller: str = ""
    """The name of the client's key; empty where there are no keys."""
    caller_limits: CallerLimits | None = None
    caller_priority: int | None = None
    deadline_at_s: float | None = None
    """This process's clock."""
    has_client_deadline: bool = False
    """It is the client's, and holds however often it comes back. Any other is for one connection."""
    generated_token_ids: tuple[list[int], ...] = ()
    """Tokens that the client brought along from an earlier answer, of each choice. Their ends are told again."""
    skip_to: tuple[ChoiceCursor, ...] = ()
    usage_sent: bool = False
    """The client has it from an earlier attempt that nobody else remembers."""
    prompt_token_ids: list[int] | None = None
    """Made for the request, and passed on."""
    tokenizer_hash: str = ""
    """Of the tokenizer and template that made them."""
    routing_token_ids: list[int] | None = None
    """Where the request itself has token ids, or they were made: for choosing."""
    cache_salt: str = ""
    max_output: int | None = None
    session_key: str = ""
    default_max_tokens: int = 0
    """Of completions; see `Attempt`."""
    strict_fields: bool = False
    """Unknown fields of the body are refused."""
    trace: TraceContext | None = None
    """With the span of the latest attempt."""


@dataclass(slots=True)
class DeliveredChoice:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class ClientStream:
    def __init__(
        self,
        client_request: ClientRequest,
        retry_limit: int,
        *,
        epoch: int = 0,
        choices: list[DeliveredChoice] | None = None,
    ) -> None:
        self.request = client_request
        self.epoch = epoch
        self.choices: list[DeliveredChoice] = choices or []
        """Empty until the first place is known; from then on the client has had the openings too."""
        self.num_cached_tokens: int | None = None
        self.num_prompt_tokens: int | None = None
        self.fingerprint: str | None = None
        """Numerics that its tokens were made with."""
        self.num_failures = 0
        """Attempts that failed since the last delivered token."""
        self.num_resumes = 0
        self.ignored_fields: str | None = None
        """Names of the request's unknown fields, as the instance wrote them."""
        self.is_last_attempt = False
        """Nothing follows the next attempt, whatever was counted."""
        self.was_accepted = False
        self.attempt_advanced = False
        """By the attempt under way, or the last one."""
        self.is_complete = False
        self.response_body: bytes | None = None
        """For a client that does not stream."""
        self.failure: AttemptFailure | None = None
        """How the attempt under way has ended, if it has."""
        self.instance_id: str | None = None
        """Which has the attempt under way, or had the last one."""
        self.is_attempt_running = False
        self.is_sending = False
        """To the client, who may be slow: no fault of the instance."""
        self.last_progress_at_s = 0.0
        self.last_delivery_at_s: float | None = None
        self.num_stale_events = 0
        self._retry_limit = retry_limit
        self._usage_sent = client_request.usage_sent
        self._pending_chunks: list[bytes] = []
        self._progress: StreamProgress | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def has_progress(self) -> bool:
        """Whether the next attempt resumes something that the client, or the router for it, has."""
        return bool(self.choices)

    @property
    def has_tokens(self) -> bool:
        return any(choice.token_ids for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """That the client has, over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def was_aborted(self) -> bool:
        return any(choice.finish_reason == ABORT for choice in self.choices)

    @property
    def is_final(self) -> bool:
        """Whether an attempt that fails now, without progress, is the last one."""
        return self.is_last_attempt or self.num_failures >= self._retry_limit

    @property
    def reports_restart(self) -> bool:
        return self._progress is not None and self._progress.engine == RESTARTING_ENGINE

    @property
    def all_finished(self) -> bool:
        return bool(self.choices) and all(choice.finish_reason is not None for choice in self.choices)

    @property
    def is_out_of_reach_of_aborts(self) -> bool:
        """Every choice of a whole answer has ended, and none was given up: an abort finds nothing to end. The answer has
        logprobs, which nothing but the attempt under way knows."""
        is_given_up = any(choice.finish_reason == PD_RESCHEDULE for choice in self.choices)
        return not self.request.is_streaming and self.all_finished and not is_given_up

    @property
    def has_reached_cursor(self) -> bool:
        """Whether the tokens that are known reach the place that the client has named."""
        if not self.request.skip_to:
            return True
        pairs = zip(self.choices, self.request.skip_to, strict=True) if self.choices else ()
        return bool(self.choices) and all(
            len(choice.token_ids) >= choice_cursor.position for choice, choice_cursor in pairs
        )

    def begin_attempt(self, instance: str, now_s: float) -> None:
        assert not self.is_attempt_running, "a stream has one attempt at a time"
        assert not self.is_complete, "a complete stream needs no attempt"
        assert not self.is_sending, "the last attempt's events are written before another attempt begins"
        self.epoch += 1
        self.instance_id = instance
        self.is_attempt_running = True
        self.attempt_advanced = False
        self.failure = None
        self.last_progress_at_s = now_s
        self._pending_chunks.clear()
        self._progress = None

    def build_attempt(self, now_s: float, prefill_peers: list[str]) -> Attempt:
        client_request = self.request
        return Attempt(
            schema_version=SCHEMA_VERSION,
            path=client_request.path,
            body=client_request.body,
            request_id=client_request.request_id,
            attempt_epoch=self.epoch,
            seed=client_request.seed,
            created_s=client_request.created_s,
            waited_s=max(0.0, now_s - client_request.arrived_at_s),
            client_request_id=client_request.client_request_id,
            caller=client_request.caller,
            caller_limits=client_request.caller_limits,
            caller_priority=client_request.caller_priority,
            deadline_in_s=None
            if client_request.deadline_at_s is None
            else max(0.0, client_request.deadline_at_s - now_s),
            choices=[ChoiceSnapshot(list(choice.token_ids), choice.finish_reason) for choice in self.choices],
            num_cached_tokens=self.num_cached_tokens,
            prompt_token_ids=client_request.prompt_token_ids,
            prefill_peers=prefill_peers,
            is_final=self.is_final,
            reader_positions=list(client_request.skip_to),
            usage_sent=self._usage_sent,
            default_max_tokens=client_request.default_max_tokens,
            was_accepted=self.was_accepted,
            strict_fields=client_request.strict_fields,
            trace=client_request.trace,
        )

    def on_accepted(self, now_s: float) -> None:
        """The instance has begun to answer."""
        assert self.is_attempt_running, "an instance accepts a running attempt"
        self.was_accepted = True
        self.last_progress_at_s = now_s

    def on_event(self, event: UpstreamEvent, now_s: float) -> bytes | None:
        """What of the event is for the client, without its closing blank line."""
        assert self.is_attempt_running, "events belong to a running attempt"
        assert self.failure is None, "a failed attempt takes no more events"
        assert not self.is_complete, "a complete stream takes no more events"
        match event:
            case TokenEvent():
                return self._on_tokens(event, now_s)
            case StreamProgress():
                self._note_progress(event, now_s)
            case PlainChunk():
                self.last_progress_at_s = now_s
                return self._on_plain_chunk(event)
            case HeldChunk():
                self.last_progress_at_s = now_s
                self._hold(event.raw)
            case PromptUsage():
                self.last_progress_at_s = now_s
                self._note_facts(event)
            case CompleteBody():
                self.response_body, self.is_complete = event.body, True
            case UpstreamErrorEvent():
                self.fail(_CAUSES.get(event.info.code, FailureCause.ERROR), event.info, event.body or None)
            case DoneEvent():
                self.on_done()
        return None

    @property
    def lacks_only_end_marker(self) -> bool:
        """All that is missing is `[DONE]`, and anybody can write that."""
        return self.request.is_streaming and self.all_finished and (self._usage_sent or not self.request.wants_usage)

    def on_done(self) -> None:
        """The instance has ended its answer. That is the end of the stream only if nothing is missing."""
        self.fail(FailureCause.LOST, _lost("the instance ended the stream before it was complete"))

    def fail_lost(self, cause: FailureCause, reason: str) -> None:
        """The attempt has ended without a word of the instance: its connection broke, or we end it."""
        self.fail(cause, _lost(reason))

    def fail(self, cause: FailureCause, error: ErrorInfo, body: bytes | None = None) -> None:
        if self.failure is not None or self.is_complete:
            return  # decided once
        assert self.is_attempt_running, "only a running attempt fails"
        if self.lacks_only_end_marker:
            self.is_complete = True
        else:
            self.failure = AttemptFailure(cause, error, body)

    def end_attempt(self) -> AttemptFailure | None:
        """Nothing more of it will be heard. Returns how it failed, if it did, and counts that."""
        assert self.is_attempt_running, "an attempt ends once"
        self.is_attempt_running = False
        failure = self.failure
        if failure is not None and failure.cause in _COUNTED:
            self.num_failures += 1
        return failure

    def _on_tokens(self, event: TokenEvent, now_s: float) -> bytes | None:
        cursor = event.cursor
        if cursor.attempt_epoch != self.epoch or cursor.request_id != self.request_id:
            self.num_stale_events += 1
            return None
        if cursor.usage_sent:
            return self._on_plain_chunk(event)
        choices = self.choices or self._first_choices(len(cursor.choices))
        if _is_simple_append(choices, cursor):
            choices[0].token_ids += cursor.new_tokens[0]
            assert len(choices[0].token_ids) == cursor.choices[0].position, "the tokens end at the event's position"
            return self._deliver(choices, event, now_s)
        problem = _cursor_mismatch(choices, cursor)
        if problem is not None:
            return self._reject_cursor(problem)
        if self._ends_too_early(choices, cursor):
            self.fail(FailureCause.ERROR, _GAVE_UP)
            return None
        _apply(choices, cursor)
        return self._deliver(choices, event, now_s)

    def _deliver(self, choices: list[DeliveredChoice], event: TokenEvent, now_s: float) -> bytes | None:
        self.choices = choices
        self.last_progress_at_s = self.last_delivery_at_s = now_s
        self.attempt_advanced = True
        self.num_failures = 0
        if not self.request.is_streaming:
            return None
        if event.has_data:
            return self._with_pending_chunks(event.raw)
        # Whoever goes on from here believes that the client has had them.
        return self._with_pending_chunks(None) if self._pending_chunks else None

    def _reject_cursor(self, problem: str) -> None:
        if problem == _DUPLICATE:
            self.num_stale_events += 1
        else:
            error = ErrorInfo("upstream_protocol", f"the instance's cursor does not fit: {problem}", 502, True)
            self.fail(FailureCause.PROTOCOL, error)

    def _first_choices(self, num_choices: int) -> list[DeliveredChoice]:
        initial = self.request.generated_token_ids or [[] for _ in range(num_choices)]
        return [DeliveredChoice(list(token_ids)) for token_ids in initial]

    def _ends_too_early(self, choices: list[DeliveredChoice], cursor: Cursor) -> bool:
        """The instance gives a choice up in the client's form although more attempts may follow."""
        if self.is_final:
            return False
        return any(
            new.finish_reason == PD_RESCHEDULE and old.finish_reason is None
            for old, new in zip(choices, cursor.choices, strict=True)
        )

    def _on_plain_chunk(self, event: PlainChunk | TokenEvent) -> bytes | None:
        if not self.request.is_streaming:
            return None
        if self.choices:
            return self._on_usage(event)
        # Openings wait for the first token, so that the client has all of them or none.
        if len(self._pending_chunks) < MAX_OPENING_CHUNKS:
            self._pending_chunks.append(event.raw)
        return None

    def _on_usage(self, event: PlainChunk | TokenEvent) -> bytes | None:
        if self._usage_sent:
            self.num_stale_events += 1
            return None
        self._usage_sent = self.all_finished
        return event.raw

    def _hold(self, raw: bytes) -> None:
        if len(self._pending_chunks) >= MAX_HELD_CHUNKS:
            self.fail(
                FailureCause.PROTOCOL, ErrorInfo("upstream_protocol", "the instance holds too many events", 502, True)
            )
        elif self.request.is_streaming:
            self._pending_chunks.append(raw)

    def _with_pending_chunks(self, raw: bytes | None) -> bytes:
        if raw is not None and not self._pending_chunks:
            return raw
        joined = BLANK_LINE.join(self._pending_chunks if raw is None else [*self._pending_chunks, raw])
        self._pending_chunks.clear()
        return joined

    def _note_progress(self, progress: StreamProgress, now_s: float) -> None:
        if progress != self._progress:
            self.last_progress_at_s = now_s
            self._progress = progress

    def _note_facts(self, usage: PromptUsage) -> None:
        self.num_prompt_tokens = usage.num_prompt_tokens
        if self.num_cached_tokens is None:
            self.num_cached_tokens = usage.num_cached_tokens

    def size_bytes(self) -> int:
        num_tokens = self.num_tokens + len(self.request.prompt_token_ids or ())
        return len(self.request.body) + BYTES_PER_TOKEN * num_tokens


_COUNTED = frozenset(
    {
        FailureCause.LOST,
        FailureCause.STALL,
        FailureCause.RESTART,
        FailureCause.GONE,
        FailureCause.ERROR,
        FailureCause.PROTOCOL,
    }
)
_CAUSES = {DRAINING: FailureCause.DRAIN, NO_DECODE_BLOCKS: FailureCause.OVERLOADED}
_GAVE_UP = ErrorInfo("pd_preempted", "PD Error: the instance gave the request up", 503, True, stage="decode")
_DUPLICATE = "duplicate"


def _lost(reason: str) -> ErrorInfo:
    return ErrorInfo("upstream_lost", reason, 503, True, retry_after_s=RETRY_SOON_S)


def _is_simple_append(choices: list[DeliveredChoice], cursor: Cursor) -> bool:
    """The next tokens of the only choice, which stays open: nearly every event. All others go the long way."""
    if len(choices) != 1 or len(cursor.choices) != 1:
        return False
    choice, choice_cursor, new = choices[0], cursor.choices[0], cursor.new_tokens.get(0)
    return (
        new is not None
        and choice.finish_reason is None
        and choice_cursor.finish_reason is None
        and choice_cursor.position == len(choice.token_ids) + len(new)
    )


def _cursor_mismatch(choices: list[DeliveredChoice], cursor: Cursor) -> str | None:
    """What is wrong with an event's place, if something is: it must continue each list by its new tokens exactly."""
    if len(cursor.choices) != len(choices):
        return f"{len(cursor.choices)} choices instead of {len(choices)}"
    has_new = repeats = False
    for index, (choice, choice_cursor) in enumerate(zip(choices, cursor.choices, strict=True)):
        num_known, num_new = len(choice.token_ids), len(cursor.new_tokens.get(index, ()))
        if choice_cursor.position > num_known + num_new:
            return f"choice {index} goes from {num_known} to {choice_cursor.position} with {num_new} tokens"
        if choice_cursor.position < num_known + num_new:
            repeats = True
        elif choice.finish_reason is None:
            has_new = has_new or num_new > 0 or choice_cursor.finish_reason is not None
        elif num_new:
            return f"choice {index} goes on after its end"
    if repeats and has_new:
        return "it repeats tokens and has new ones"
    return None if has_new else _DUPLICATE


def _apply(choices: list[DeliveredChoice], cursor: Cursor) -> None:
    for index, token_ids in cursor.new_tokens.items():
        choices[index].token_ids.extend(token_ids)
    for choice, choice_cursor in zip(choices, cursor.choices, strict=True):
        if choice.finish_reason is None and choice_cursor.finish_reason is not None:
            choice.finish_reason = choice_cursor.finish_reason


def covers_cursor(stream: ClientStream, cursor: Cursor) -> bool:
    """Whether what is known of a stream is at least what its client has."""
    if len(cursor.choices) != len(stream.choices) or cursor.seed != stream.request.seed:
        return False
    pairs = zip(stream.choices, cursor.choices, strict=True)
    return all(choice_cursor.position <= len(choice.token_ids) for choice, choice_cursor in pairs)


def resume_at_cursor(
    stream: ClientStream, cursor: Cursor, retry_limit: int, deadline_at_s: float | None
) -> ClientStream | None:
    """The same stream from a place that its client names: tokens beyond it are made again. None: it was never there.
    `deadline_at_s`: unless the client has its own."""
    if not covers_cursor(stream, cursor):
        return None
    if stream.request.has_client_deadline:
        deadline_at_s = stream.request.deadline_at_s
    choices = [
        DeliveredChoice(choice.token_ids[: choice_cursor.position], choice_cursor.finish_reason)
        for choice, choice_cursor in zip(stream.choices, cursor.choices, strict=True)
    ]
    client_request = replace(
        stream.request, is_streaming=True, deadline_at_s=deadline_at_s, skip_to=(), usage_sent=cursor.usage_sent
    )
    resumed = ClientStream(client_request, retry_limit, epoch=max(stream.epoch, cursor.attempt_epoch), choices=choices)
    resumed.num_cached_tokens = stream.num_cached_tokens
    resumed.num_prompt_tokens = stream.num_prompt_tokens
    resumed.fingerprint = stream.fingerprint
    return resumed
