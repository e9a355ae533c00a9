"""Table of the requests that this api process has submitted to the engine, without I/O. It resubmits what is lost, with the
tokens so far.

Takes messages, events and the time; returns messages to send and outputs to deliver. Every token that it delivers is the
next one of its choice: a message that the engine or the wire loses, repeats or delays is repaired or dropped here, and
counted. A choice that the engine gives up (`pd_reschedule`) has ended: it cannot continue on this instance, so the router
or client continues it elsewhere. Knows nothing of sockets, text or HTTP.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from onward.api.lifecycle.draft_stats import DraftCounts
from onward.obs.metrics import Registry
from onward.obs.shared_counters import resubmissions_counter, stale_events_counter
from onward.proto.engine import (
    CRASHES_TO_ISOLATE,
    Abort,
    AbortByName,
    ErrorInfo,
    FromEngine,
    HeldRequest,
    HeldRequestsReport,
    QueryKvEvents,
    RequestAccepted,
    Submit,
    ToEngine,
    TokenDelta,
    TokenDeltas,
    WorkerCrashReport,
)
from onward.proto.finish_reasons import ABORT, INCOMPLETE_REASONS, PD_RESCHEDULE
from onward.proto.request_ids import external_id
from onward.proto.router import StreamProgress
from onward.proto.step import TokenLogprobs

ENGINE_WAIT_S = 60.0
"""How long a request waits for an engine that accepts it."""
MAX_RESUBMISSIONS_WITHOUT_PROGRESS = 16
"""Resubmissions of one request without a new token in between. Engine restarts do not count: the supervisor bounds
them."""
FIRST_REPLY_TIMEOUT_S = 3.0
"""How long a new engine may be silent before a request is sent to it again."""
MAX_REPORTS_WITHOUT_READ = 3
"""After this many `HeldRequestsReport`s in a row that do not cover a submission's `seq`, the next one counts as covering
it, since the submission may be lost. Only the last message sent needs this: a later one that is read shows the loss."""
EPOCHS_PER_ATTEMPT = 1 << 20
MAX_ATTEMPT = 1 << 40
"""Keeps an epoch within 64 bits."""
ABORT_REPLAY_S = 30.0
MAX_FINISHED_EPOCHS = 4096
MAX_REPLAYED_ABORTS = 1024
"""At most this many aborts by name are kept, for `ABORT_REPLAY_S`, and sent again to a new engine. Other processes may
resubmit the aborted requests to it."""
DEADLINE_MARGIN_S = 2.0
"""The engine ends a request at its deadline. If that message is lost, the tracker ends the request this much later."""

NO_ENGINE = ErrorInfo("unavailable", "no engine took the request in time; try again later", 503, True)
ISOLATED_CRASHES_TO_FAIL = 2
"""A request fails after this many engines have died while they ran it alone. One such death may be a coincidence."""
CRASHED_ENGINE = ErrorInfo(
    "crashed_engine",
    "engines died again and again while they ran this request alone; it is not tried again",
    500,
)
ENGINE_LOST_REQUEST = ErrorInfo("engine_lost_request", "the engine lost this request again and again", 500, True)
ABORTED = ErrorInfo("aborted", "the request was aborted", 409)
DEADLINE_EXCEEDED = ErrorInfo("deadline_exceeded", "the request's deadline has passed", 504)
PD_PREEMPTED = ErrorInfo("pd_preempted", "PD Error: this instance gave the request up", 503, True, stage="decode")

NO_PROGRESS = StreamProgress("-", 0, 0, 0)
"""Reported while there is no engine."""


def base_epoch(attempt_epoch: int) -> int:
    """Returns the epoch of a new `Submit`. The epochs of this attempt's submissions are higher than it, and lower than
    those of the next attempt."""
    return (attempt_epoch - 1) * EPOCHS_PER_ATTEMPT


class EngineOutput(msgspec.Struct, frozen=True, gc=False):
    """New output of one choice. Without tokens and finish reason it means that the engine has accepted the choice.

    One is created for every token: a struct takes a fifth of the time of a frozen dataclass."""

    request_id: str
    token_ids: list[int] = []
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    error: ErrorInfo | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, if requested."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Sent once, with the first tokens, if requested."""
    rescored_logprobs: list[TokenLogprobs] | None = None
    """With `Submit.rescore_from`: logprobs of the given tokens from that position on. Sent once, before all others."""
    embedding: bytes | None = None
    draft_counts: DraftCounts = ()
    """One entry for each step that had drafts. A merged output keeps the entries of all its parts."""

    @property
    def failed(self) -> bool:
        """Whether this fails the whole request. A choice that was given up or aborted keeps what was generated."""
        return self.error is not None and self.finish_reason not in INCOMPLETE_REASONS


@dataclass(slots=True)
class TrackerActions:
    send: list[ToEngine] = field(default_factory=list)
    deliver: list[EngineOutput] = field(default_factory=list)


@dataclass(slots=True)
class ChoiceSubmission:
    """What was submitted to the engine for one choice and what came back, as tokens. ChoiceOutput has the text."""

    spec: Submit
    """The first submission. Later ones replace only what has changed since."""
    tokens: list[int]
    arrived_at_s: float
    """Arrival by this process's clock, less the time that the request had waited before."""
    deadline_at_s: float | None = None
    epoch: int = 0
    submitted_seq: int | None = None
    """Sequence number of the last Submit to the current engine. None if the choice is not submitted to it."""
    num_unread_reports: int = 0
    accepted: bool = False
    """An engine has accepted the choice once. From then on a refusal makes it wait, and does not fail it."""
    worker_crashes: int = 0
    engine_crashes: int = 0
    """Engines that have died since the last token while they held this choice among others."""
    isolated_crashes: int = 0
    """Engines that have died since the last token while they ran this choice alone."""
    num_cached_tokens: int | None = None
    rescore_from: int | None = None
    """None once no tokens are left to be rescored."""
    resubmissions_without_progress: int = 0
    waiting_since_s: float | None = None
    """Time since which no engine is known to hold the choice."""
    retry_at_s: float | None = None
    restart_cause: Literal["", "engine", "lost"] = ""
    """Cause of the last resubmission."""

    base_epoch: int = 0
    """The epochs of this choice's submissions are higher than this one."""

    @property
    def was_submitted(self) -> bool:
        return self.epoch > self.base_epoch

    @property
    def client_names(self) -> set[str]:
        """The names by which a client may abort the request: its external id and its label."""
        return {external_id(self.spec.request_id), self.spec.client_request_id} - {""}

    def matches(self, names: Collection[str], abort_all: bool, caller: str | None) -> bool:
        """Returns whether an abort by name applies to this choice. `caller`: the abort applies to this caller's
        requests; None: to those of all callers."""
        return caller in (None, self.spec.caller) and (abort_all or not self.client_names.isdisjoint(names))


@dataclass(frozen=True, slots=True)
class PendingAbort:
    """An abort by name, kept for replay to a new engine."""

    query_id: int
    names: frozenset[str]
    everything: bool
    received_at_s: float
    expires_at_s: float
    caller: str | None = None
    """The caller whose requests are aborted; None: those of all callers."""

    def to_message(self, seq: int, now_s: float) -> AbortByName:
        age_s = max(0.0, now_s - self.received_at_s)
        return AbortByName(seq, self.query_id, sorted(self.names), self.everything, age_s, self.caller)


class RequestTracker:
    def __init__(self, registry: Registry) -> None:
        self.engine: str | None = None
        self._requests: dict[str, ChoiceSubmission] = {}
        self._held: dict[str, HeldRequest] = {}
        self._finished_epochs: OrderedDict[str, int] = OrderedDict()
        """Last epochs of choices that have ended. A client that has seen nothing of an attempt resumes with the number of
        the attempt before. Late messages of the engine about the ended attempt must not be applied to the new one."""
        self._aborts: deque[PendingAbort] = deque(maxlen=MAX_REPLAYED_ABORTS)
        self._is_new_engine = False
        """The current engine has not sent a `HeldRequestsReport` yet."""
        self._engine_up_s = 0.0
        self._step = 0
        self._seq = 0
        self._stale_events = stale_events_counter(registry)
        self._resubmissions = resubmissions_counter(registry)

    def __len__(self) -> int:
        return len(self._requests)

    def submit(self, spec: Submit, now_s: float) -> TrackerActions:
        """Submits a choice. The durations in `spec` count up to now, and its epoch is the `base_epoch` of its attempt."""
        assert spec.request_id not in self._requests, "request ids are never used twice"
        epoch_before = max(spec.epoch, self._finished_epochs.get(spec.request_id, 0))
        submission = ChoiceSubmission(
            spec,
            list(spec.generated_token_ids),
            arrived_at_s=now_s - spec.waited_s,
            deadline_at_s=None if spec.deadline_in_s is None else now_s + spec.deadline_in_s,
            epoch=epoch_before,
            base_epoch=epoch_before,
            num_cached_tokens=spec.num_cached_tokens,
            rescore_from=spec.rescore_from,
            waiting_since_s=now_s,
        )
        self._requests[spec.request_id] = submission
        if self._was_aborted(spec, now_s):
            actions = TrackerActions()
            self._fail(submission, ABORTED, actions)
            return actions
        return TrackerActions(send=self._resubmit(submission, now_s))

    def stop(self, request_id: str, num_tokens: int) -> TrackerActions:
        """Ends a choice because the text of its first `num_tokens` tokens ends in a stop string."""
        submission = self._requests.get(request_id)
        if submission is None:
            return TrackerActions()
        self._remove(submission)
        if submission.submitted_seq is None:
            return TrackerActions()
        return TrackerActions(send=[Abort(self._next_seq(), request_id, submission.epoch, "stop", num_tokens)])

    def abort(self, request_id: str) -> TrackerActions:
        """Ends a choice without output, because its client is gone or another choice of the request has failed. The client
        may resume the request as another attempt."""
        submission = self._requests.get(request_id)
        if submission is None:
            return TrackerActions()
        self._remove(submission)
        return TrackerActions(
            send=self._abort_messages({request_id: submission.epoch}) if submission.was_submitted else []
        )

    def fail(self, request_ids: Iterable[str], error: ErrorInfo) -> TrackerActions:
        """Ends these choices with this error, which is delivered as their last output."""
        actions = TrackerActions()
        for request_id in request_ids:
            if submission := self._requests.get(request_id):
                self._fail(submission, error, actions)
        return actions

    def abort_by_name(
        self,
        query_id: int,
        names: list[str],
        abort_all: bool,
        now_s: float,
        caller: str | None = None,
    ) -> TrackerActions:
        """Sends an abort to the engine, which has the requests of all api processes. Requests in this process end at
        once, also if there is no engine. The abort is kept for `ABORT_REPLAY_S` and sent again to a new engine, since
        other processes may resubmit these requests to it."""
        actions = TrackerActions()
        until_s = now_s + ABORT_REPLAY_S
        self._aborts.append(PendingAbort(query_id, frozenset(names), abort_all, now_s, until_s, caller))
        if self.engine is not None:
            actions.send.append(AbortByName(self._next_seq(), query_id, names, abort_all, caller=caller))
        for submission in list(self._requests.values()):
            if submission.matches(names, abort_all, caller):
                self._fail(submission, ABORTED, actions)
        return actions

    def query_kv_events(self, query_id: int, next_number: int) -> TrackerActions:
        return TrackerActions(
            send=[] if self.engine is None else [QueryKvEvents(self._next_seq(), query_id, next_number)]
        )

    def matching_names(self, names: list[str], abort_all: bool, caller: str | None = None) -> set[str]:
        """Returns the names that match an unfinished request here, or with `abort_all` the external ids of all of them.
        With `caller`, only that caller's requests are considered."""
        own = [submission for submission in self._requests.values() if caller in (None, submission.spec.caller)]
        if abort_all:
            return {external_id(submission.spec.request_id) for submission in own}
        return {name for submission in own for name in submission.client_names}.intersection(names)

    def engine_up(self, incarnation: str, now_s: float) -> TrackerActions:
        actions = TrackerActions()
        if incarnation == self.engine:
            return actions
        self.engine = incarnation
        self._held = {}
        self._is_new_engine = True
        self._engine_up_s = now_s
        actions.send += self._replayed_aborts(now_s)
        for submission in self._requests.values():
            if submission.was_submitted:
                self._resubmissions.inc("engine_restart")
                submission.restart_cause = "engine"
            actions.send += self._resubmit(submission, now_s)
        return actions

    def engine_gone(self, incarnation: str, now_s: float, isolated_request_id: str | None = None) -> TrackerActions:
        """Marks all choices as not submitted. `isolated_request_id`: the request that the engine ran alone, which is
        therefore the cause of the crash. None: all requests that the engine held are suspects."""
        actions = TrackerActions()
        if incarnation != self.engine:
            return actions
        self.engine = None
        self._held = {}
        for submission in list(self._requests.values()):
            if submission.submitted_seq is not None:
                self._count_engine_crash(submission, isolated_request_id, actions)
            self._mark_unsubmitted(submission, now_s)
        return actions

    def _count_engine_crash(
        self, submission: ChoiceSubmission, isolated_request_id: str | None, actions: TrackerActions
    ) -> None:
        """Counts an engine crash against a choice. Shared crashes only make the engine run it alone (from
        `CRASHES_TO_ISOLATE` on) and never fail it. Crashes while it ran alone fail it."""
        if isolated_request_id is None:
            submission.engine_crashes = min(submission.engine_crashes + 1, CRASHES_TO_ISOLATE)
        elif isolated_request_id == submission.spec.request_id:
            submission.isolated_crashes += 1
            if submission.isolated_crashes >= ISOLATED_CRASHES_TO_FAIL:
                self._fail(submission, CRASHED_ENGINE, actions)

    def receive(self, incarnation: str, message: FromEngine, now_s: float) -> TrackerActions:
        actions = TrackerActions()
        if incarnation != self.engine:
            self._stale_events.inc("incarnation")
            return actions
        match message:
            case TokenDeltas():
                for delta in message.deltas:
                    self._apply_delta(delta, now_s, actions)
            case RequestAccepted():
                if submission := self._find_current(message.request_id, message.epoch):
                    self._mark_accepted(submission, actions)
            case WorkerCrashReport():
                if submission := self._find_current(message.request_id, message.epoch):
                    submission.worker_crashes = message.worker_crashes
            case HeldRequestsReport():
                self._reconcile(message, now_s, actions)
        return actions

    def tick(self, now_s: float) -> TrackerActions:
        """Fails choices whose deadline has passed or that have waited too long for an engine, and resubmits choices
        whose retry is due."""
        actions = TrackerActions()
        for submission in list(self._requests.values()):
            if error := _timeout_error(submission, now_s):
                self._fail(submission, error, actions)
            elif submission.retry_at_s is not None and now_s >= submission.retry_at_s:
                actions.send += self._resubmit(submission, now_s)
        return actions

    def fail_all(self, error: ErrorInfo) -> TrackerActions:
        return self.fail(list(self._requests), error)

    def progress(self, request_ids: Iterable[str]) -> StreamProgress:
        """Returns the progress of these choices by the engine's last report. They are not stalled as long as any of its
        values changes."""
        if self.engine is None:
            return NO_PROGRESS
        held = [self._held[request_id] for request_id in request_ids if request_id in self._held]
        queue = min((held_request.queue_position for held_request in held), default=0)
        return StreamProgress(self.engine, self._step, sum(held_request.num_computed for held_request in held), queue)

    def _apply_delta(self, delta: TokenDelta, now_s: float, actions: TrackerActions) -> None:
        #   tokens we have    |-----------------|
        #   delta                      |--------------|      only the part after our tokens is new
        #                            position        end
        submission = self._find_current(delta.request_id, delta.epoch)
        if submission is None:
            return
        submission.retry_at_s = None
        num_tokens, end = len(submission.tokens), delta.position + len(delta.token_ids)
        if delta.position > num_tokens or (submission.rescore_from is not None and _lacks_scores(delta)):
            self._resubmit_lost(submission, "gap", now_s, actions)
        elif end < num_tokens or (end == num_tokens and delta.token_ids and delta.finish_reason is None):
            self._stale_events.inc("duplicate")
        elif submission.accepted and delta.error is not None and (refusal := _retryable_refusal(delta)) is not None:
            self._wait_and_retry(submission, refusal, now_s)
        else:
            self._accept_tokens(submission, num_tokens - delta.position, delta, actions)

    def _accept_tokens(
        self, submission: ChoiceSubmission, num_known: int, delta: TokenDelta, actions: TrackerActions
    ) -> None:
        """Appends the tokens of a delta after its first `num_known` ones, and delivers them."""
        new_token_ids = delta.token_ids[num_known:]
        rescored_logprobs = None if submission.rescore_from is None else delta.rescored_logprobs
        finish_reason, error = _finish_of(delta)
        if submission.num_cached_tokens is None and (new_token_ids or delta.error is None):
            submission.num_cached_tokens = delta.num_cached_tokens
        if rescored_logprobs is not None:
            submission.rescore_from = None
        if new_token_ids:
            submission.tokens += new_token_ids
            submission.resubmissions_without_progress = 0
            submission.worker_crashes = submission.engine_crashes = submission.isolated_crashes = 0
            submission.accepted, submission.waiting_since_s = True, None
        if finish_reason is not None:
            self._remove(submission)
        actions.deliver.append(
            EngineOutput(
                delta.request_id,
                new_token_ids,
                submission.num_cached_tokens,
                finish_reason,
                error,
                delta.logprobs[num_known:] if delta.logprobs is not None else None,
                delta.prompt_logprobs if num_known == 0 else None,
                rescored_logprobs,
                delta.embedding,
                _draft_counts(delta) if delta.num_draft_tokens else (),
            )
        )

    def _reconcile(self, report: HeldRequestsReport, now_s: float, actions: TrackerActions) -> None:
        """Compares the engine's table of requests with this one, once a second. A message with a `seq` up to the report's
        has been read by the engine, or is lost."""
        if report.engine_incarnation != self.engine:
            self._stale_events.inc("incarnation")
            return
        actions.send += self._replayed_aborts(now_s)
        if self._is_new_engine:
            self._is_new_engine = False
            for submission in self._requests.values():
                if submission.submitted_seq is not None:
                    submission.retry_at_s = None
        held = self._held = {entry.request_id: entry for entry in report.held}
        self._step = report.step
        unknown = {entry.request_id: entry.epoch for entry in report.held if entry.request_id not in self._requests}
        actions.send += self._abort_messages(unknown)
        for submission in list(self._requests.values()):
            if submission.submitted_seq is None:
                continue
            if submission.submitted_seq <= report.seq or submission.num_unread_reports == MAX_REPORTS_WITHOUT_READ:
                self._reconcile_one(submission, held.get(submission.spec.request_id), now_s, actions)
            else:
                submission.num_unread_reports += 1

    def _reconcile_one(
        self, submission: ChoiceSubmission, held: HeldRequest | None, now_s: float, actions: TrackerActions
    ) -> None:
        if held is None or held.epoch != submission.epoch:
            self._resubmit_lost(submission, "lost", now_s, actions)
        elif held.position > len(submission.tokens):
            self._resubmit_lost(submission, "gap", now_s, actions)
        else:
            self._mark_accepted(submission, actions)

    def _find_current(self, request_id: str, epoch: int) -> ChoiceSubmission | None:
        submission = self._requests.get(request_id)
        if submission is None or submission.submitted_seq is None:
            self._stale_events.inc("request")
            return None
        if submission.epoch != epoch:
            self._stale_events.inc("epoch")
            return None
        return submission

    def _mark_accepted(self, submission: ChoiceSubmission, actions: TrackerActions) -> None:
        submission.waiting_since_s = submission.retry_at_s = None
        if not submission.accepted:
            submission.accepted = True
            actions.deliver.append(EngineOutput(submission.spec.request_id))

    def _resubmit_lost(self, submission: ChoiceSubmission, cause: str, now_s: float, actions: TrackerActions) -> None:
        submission.resubmissions_without_progress += 1
        if submission.resubmissions_without_progress > MAX_RESUBMISSIONS_WITHOUT_PROGRESS:
            self._fail(submission, ENGINE_LOST_REQUEST, actions)
            return
        self._resubmissions.inc(cause)
        submission.restart_cause = "lost"
        actions.send += self._resubmit(submission, now_s)

    def _wait_and_retry(self, submission: ChoiceSubmission, error: ErrorInfo, now_s: float) -> None:
        self._mark_unsubmitted(submission, now_s)
        submission.retry_at_s = now_s + (error.retry_after_s or 1.0)

    def _mark_unsubmitted(self, submission: ChoiceSubmission, now_s: float) -> None:
        submission.submitted_seq = None
        submission.retry_at_s = None
        if submission.waiting_since_s is None:
            submission.waiting_since_s = now_s

    def _resubmit(self, submission: ChoiceSubmission, now_s: float) -> list[ToEngine]:
        """Returns a Submit with everything that was fixed at the start and the tokens so far, under a higher epoch. This
        is the only way of recovery."""
        submission.retry_at_s = None
        if self.engine is None:
            return []
        if submission.waiting_since_s is None:
            submission.waiting_since_s = now_s
        submission.epoch += 1
        submission.submitted_seq = self._next_seq()
        submission.num_unread_reports = 0
        if self._is_new_engine:
            # The engine sends reports only to processes from which it has read a message. Our first one may be lost.
            submission.retry_at_s = now_s + FIRST_REPLY_TIMEOUT_S
        deadline_at_s = submission.deadline_at_s
        return [
            msgspec.structs.replace(
                submission.spec,
                seq=submission.submitted_seq,
                epoch=submission.epoch,
                generated_token_ids=list(submission.tokens),
                waited_s=max(0.0, now_s - submission.arrived_at_s),
                deadline_in_s=None if deadline_at_s is None else max(0.0, deadline_at_s - now_s),
                worker_crashes=submission.worker_crashes,
                engine_crashes=submission.engine_crashes,
                num_cached_tokens=submission.num_cached_tokens,
                rescore_from=submission.rescore_from,
                admit_as_new=submission.spec.admit_as_new and submission.epoch == submission.base_epoch + 1,
                restart_cause=submission.restart_cause,
            )
        ]

    def _fail(self, submission: ChoiceSubmission, error: ErrorInfo, actions: TrackerActions) -> None:
        request_id = submission.spec.request_id
        self._remove(submission)
        if submission.was_submitted:
            actions.send += self._abort_messages({request_id: submission.epoch})
        reason = ABORT if error.code == ABORTED.code else "error"
        actions.deliver.append(
            EngineOutput(request_id, [], submission.num_cached_tokens, finish_reason=reason, error=error)
        )

    def _remove(self, submission: ChoiceSubmission) -> None:
        request_id = submission.spec.request_id
        del self._requests[request_id]
        self._finished_epochs[request_id] = submission.epoch
        self._finished_epochs.move_to_end(request_id)
        if len(self._finished_epochs) > MAX_FINISHED_EPOCHS:
            self._finished_epochs.popitem(last=False)

    def _abort_messages(self, epochs: dict[str, int]) -> list[ToEngine]:
        """Returns an abort for each request up to this epoch, and not beyond: the next attempt may already be running."""
        if self.engine is None:
            return []
        return [Abort(self._next_seq(), request_id, epoch) for request_id, epoch in epochs.items()]

    def _replayed_aborts(self, now_s: float) -> list[ToEngine]:
        """Returns the unexpired aborts that are older than the current engine. Another process may still submit the
        aborted requests to it, if it learns of the engine late."""
        pending_aborts = self._unexpired_aborts(now_s)
        return [
            abort.to_message(self._next_seq(), now_s)
            for abort in pending_aborts
            if abort.expires_at_s - ABORT_REPLAY_S <= self._engine_up_s
        ]

    def _was_aborted(self, spec: Submit, now_s: float) -> bool:
        """Returns whether an unexpired abort names the request's id. Ids are unique, so such a submission is late.
        Labels are not compared, because another request may have the label by now."""
        name = external_id(spec.request_id)
        return any(
            name in abort.names and abort.caller in (None, spec.caller) for abort in self._unexpired_aborts(now_s)
        )

    def _unexpired_aborts(self, now_s: float) -> "deque[PendingAbort]":
        while self._aborts and self._aborts[0].expires_at_s <= now_s:
            self._aborts.popleft()
        return self._aborts

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq


def _finish_of(delta: TokenDelta) -> tuple[str | None, ErrorInfo | None]:
    """Returns the finish reason of an output that has ended, and its error. An abort stays an abort, whatever other
    error the delta has."""
    if delta.finish_reason is None:
        return None, delta.error
    if delta.finish_reason == ABORT:
        return ABORT, ABORTED
    if _is_rescheduled(delta):
        return PD_RESCHEDULE, delta.error or PD_PREEMPTED
    return delta.finish_reason, delta.error


def _is_rescheduled(delta: TokenDelta) -> bool:
    """Returns whether the engine has given the choice up so that another instance continues it. If no token was
    generated, the engine may report this as a retryable `pd_` error."""
    if delta.finish_reason == "error" and delta.error is not None:
        return delta.error.retryable and delta.error.code.startswith("pd_")
    return delta.finish_reason == PD_RESCHEDULE


def _retryable_refusal(delta: TokenDelta) -> ErrorInfo | None:
    """Returns the error of a delta with which the engine refuses a choice that it would accept later, else None."""
    if delta.error is None or not delta.error.retryable or delta.finish_reason == ABORT or _is_rescheduled(delta):
        return None
    return delta.error


def _lacks_scores(delta: TokenDelta) -> bool:
    """Returns whether a delta has tokens, but not the rescored logprobs that must precede them."""
    return bool(delta.token_ids) and delta.rescored_logprobs is None


def _timeout_error(submission: ChoiceSubmission, now_s: float) -> ErrorInfo | None:
    deadline_at_s = submission.deadline_at_s
    margin_s = 0.0 if submission.submitted_seq is None else DEADLINE_MARGIN_S
    if deadline_at_s is not None and now_s >= deadline_at_s + margin_s:
        return DEADLINE_EXCEEDED
    waiting_since_s = submission.waiting_since_s
    if waiting_since_s is not None and now_s - waiting_since_s >= ENGINE_WAIT_S:
        return NO_ENGINE
    return None


def _draft_counts(delta: TokenDelta) -> DraftCounts:
    return ((delta.num_draft_tokens, len(delta.token_ids) - 1),)
