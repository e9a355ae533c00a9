"""One client's stream across all of its attempts: what the client has, and the state of the running attempt.

An attempt begins, `on_event` gets its events, and it ends by completing the stream or by failing. The caller must write
what `on_event` returns to the client before anything else happens to the stream, because the tokens count as delivered
from then on. `core` decides whether and where another attempt is made. This module takes events and the time; it knows
neither sockets nor instances.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

from onward.errors import RETRY_SOON_S
from onward.proto import SCHEMA_VERSION
from onward.proto.cursor import ChoiceCursor, Cursor, model_tag
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
from onward.web.openai_api import response_ids
from onward.web.openai_api.model_names import with_model
from onward.web.openai_api.response_object import completed_at_of_body, completed_at_of_event

RESTARTING_ENGINE = "-"
DRAINING = "draining"
"""The code of an instance's error when it hands its streams over."""
REPLACED = "replaced"
"""The code of an instance's error when a new server takes over at its address (`onward serve --adopt`)."""
NO_DECODE_BLOCKS = "pd_no_decode_blocks"
"""The code of an instance's error when it has no room for a prompt that others would compute."""
MAX_OPENING_CHUNKS = 128
MAX_HELD_CHUNKS = 4096
"""Events that an instance marks as belonging together."""
BYTES_PER_TOKEN = 36
"""Estimated size of a token id in a JSON list."""


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
    REPLACED = "replaced"
    """A new server takes over at the instance's address."""
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
    """Tokens of an earlier answer that the client sent, for each choice. Their finish events are sent again."""
    skip_to: tuple[ChoiceCursor, ...] = ()
    usage_sent: bool = False
    """The client got the usage from an earlier attempt of which no record is left."""
    prompt_token_ids: list[int] | None = None
    """Made for the request, and passed on."""
    tokenizer_hash: str = ""
    """Hash of the tokenizer and the template that made the token ids."""
    routing_token_ids: list[int] | None = None
    """Where the request itself has token ids, or they were made: for choosing."""
    cache_salt: str = ""
    max_output: int | None = None
    session_key: str = ""
    default_max_tokens: int = 0
    """Default of completions; see `Attempt`."""
    strict_fields: bool = False
    """Unknown fields of the body are refused."""
    trace: TraceContext | None = None
    """With the span of the latest attempt."""
    model: str = ""
    """The name that the body asks for; empty where it names none."""
    model_tag: str = ""
    """Tag of the model that generated the client's tokens, if the client named the model differently."""


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
        self.completed_s: int | None = None
        """When an instance completed a response, as its client was told."""
        self.num_prompt_tokens: int | None = None
        self.max_prompt_tokens: int | None = None
        """See `Attempt.max_prompt_tokens`."""
        self.fingerprint: str | None = None
        """Numerics that its tokens were made with."""
        self.model = ""
        """The model that answers. Fixed with the first token; empty before it is known."""
        self._attempt_body: bytes | None = None
        """The client's body, with `model` instead of the alias or route that the client named. None: they are the
        same."""
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
        """A write to the client is in progress. The client may be slow, which is no fault of the instance."""
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

    def set_model(self, model: str) -> None:
        """Sets the model that the next attempts go to. Their body names it instead of an alias, a route or nothing, so that
        every router, and every instance with a record of the stream, knows which model generated the tokens. Raises
        `InvalidRequest` if the client's body cannot be changed."""
        client_request = self.request
        is_renamed = client_request.model != model
        self._attempt_body = with_model(client_request.body, model) if is_renamed else None
        self.model = model

    @property
    def has_progress(self) -> bool:
        """Whether the next attempt resumes something that the client, or the router for it, has."""
        return bool(self.choices)

    @property
    def is_model_fixed(self) -> bool:
        """Whether the client, or the router for it, has tokens, which no other model may go on with."""
        return self.has_progress or bool(self.request.skip_to)

    @property
    def budget_key(self) -> tuple[str, str]:
        return self.request.caller, self.model

    @property
    def has_tokens(self) -> bool:
        return any(choice.token_ids for choice in self.choices)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the client has, over all choices."""
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
            body=client_request.body if self._attempt_body is None else self._attempt_body,
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
            choices=self._snapshots(),
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
            model_tag=self.model_tag,
            completed_s=self.completed_s,
            max_prompt_tokens=self.max_prompt_tokens,
        )

    def readable_choices(self) -> list[ChoiceSnapshot]:
        """Returns the choices for a client that reads the response while it is generated. An answer that is not streamed
        lacks its last tokens until its body has arrived, which says when the response was completed."""
        choices = self._snapshots()
        has_time = self.completed_s is not None or self.is_complete or self.request.is_streaming
        if has_time or not self.all_finished:
            return choices
        return [ChoiceSnapshot(choice.token_ids[:-1]) for choice in choices]

    def note_completion(self, wall_s: float) -> None:
        """Notes the time at the end of a stream whose output is complete, and whose body was lost with the time in it."""
        if self.completed_s is None and self.all_finished and not self.request.is_streaming:
            self.completed_s = max(self.request.created_s, int(wall_s))

    def _snapshots(self) -> list[ChoiceSnapshot]:
        return [ChoiceSnapshot(list(choice.token_ids), choice.finish_reason) for choice in self.choices]

    @property
    def model_tag(self) -> str:
        """The model tag in cursors: empty if the request itself names the model."""
        client_request = self.request
        is_renamed = self.model not in ("", client_request.model)
        return client_request.model_tag or (model_tag(self.model) if is_renamed else "")

    def on_accepted(self, now_s: float) -> None:
        """Notes that the instance has accepted the running attempt: it has begun its answer with status 200."""
        assert self.is_attempt_running, "an instance accepts a running attempt"
        self.was_accepted = True
        self.last_progress_at_s = now_s

    def on_event(self, event: UpstreamEvent, now_s: float) -> bytes | None:
        """Returns the part of the event that is for the client, without its closing blank line."""
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
                if self.request.path == response_ids.PATH:
                    self.completed_s = self.completed_s or completed_at_of_body(event.body)
            case UpstreamErrorEvent():
                self.fail(_CAUSES.get(event.info.code, FailureCause.ERROR), event.info, event.body or None)
            case DoneEvent():
                self.on_done()
        return None

    @property
    def lacks_only_end_marker(self) -> bool:
        """Whether only `[DONE]` is missing, which the router can write itself."""
        return self.request.is_streaming and self.all_finished and (self._usage_sent or not self.request.wants_usage)

    def on_done(self) -> None:
        """Handles the end of the instance's answer. Completes the stream if only its end marker is missing, else fails
        the attempt as lost."""
        self.fail(FailureCause.LOST, _lost("the instance ended the stream before it was complete"))

    def fail_lost(self, cause: FailureCause, reason: str) -> None:
        """Fails the attempt with a retryable error, for failures that the instance has not reported: its connection
        broke, or the router ends the attempt. Completes the stream instead if only its end marker is missing."""
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
        """Marks the attempt as ended and returns its failure, or None. A failure with a cause in `_COUNTED` increases
        `num_failures`."""
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
        if self.request.path == response_ids.PATH and choices[0].finish_reason is not None:
            self.completed_s = self.completed_s or completed_at_of_event(event.raw)
        if event.has_data:
            return self._with_pending_chunks(event.raw)
        # An instance that resumes from this event assumes that the client has the pending chunks.
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
        """Returns whether the instance gives a choice up in the form meant for clients (`PD_RESCHEDULE`), although more
        attempts may follow. Only the final attempt may do so."""
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
        if self.max_prompt_tokens is None:
            self.max_prompt_tokens = usage.max_prompt_tokens
        if self.num_cached_tokens is None:
            self.num_cached_tokens = usage.num_cached_tokens

    def size_bytes(self) -> int:
        num_tokens = self.num_tokens + len(self.request.prompt_token_ids or ())
        return len(self.request.body) + len(self._attempt_body or b"") + BYTES_PER_TOKEN * num_tokens


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
_CAUSES = {DRAINING: FailureCause.DRAIN, REPLACED: FailureCause.REPLACED, NO_DECODE_BLOCKS: FailureCause.OVERLOADED}
_GAVE_UP = ErrorInfo("pd_preempted", "PD Error: the instance gave the request up", 503, True, stage="decode")
_DUPLICATE = "duplicate"


def _lost(reason: str) -> ErrorInfo:
    return ErrorInfo("upstream_lost", reason, 503, True, retry_after_s=RETRY_SOON_S)


def _is_simple_append(choices: list[DeliveredChoice], cursor: Cursor) -> bool:
    """Returns whether an event only appends tokens to the only choice, which stays open. Nearly all events do; all
    others take the full check of `_cursor_mismatch`."""
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
    """Returns what is wrong with an event's cursor, or None. It must extend each list of tokens exactly by the event's
    new ones."""
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
    """Returns whether the known tokens of a stream reach the positions of its client's cursor. False if the number of
    choices or the seed differs."""
    if len(cursor.choices) != len(stream.choices) or cursor.seed != stream.request.seed:
        return False
    pairs = zip(stream.choices, cursor.choices, strict=True)
    return all(choice_cursor.position <= len(choice.token_ids) for choice, choice_cursor in pairs)


def resume_at_cursor(
    stream: ClientStream, cursor: Cursor, retry_limit: int, deadline_at_s: float | None
) -> ClientStream | None:
    """Returns a copy of the stream that continues at the client's cursor, or None if the known tokens do not reach it.
    Tokens after the cursor are dropped and generated again. `deadline_at_s` applies unless the client has set its own
    deadline."""
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
    resumed.num_cached_tokens, resumed.completed_s = stream.num_cached_tokens, stream.completed_s
    resumed.num_prompt_tokens = stream.num_prompt_tokens
    resumed.max_prompt_tokens = stream.max_prompt_tokens
    resumed.fingerprint = stream.fingerprint
    if stream.model:
        resumed.set_model(stream.model)
    return resumed
