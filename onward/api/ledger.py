"""What this api process has promised its clients, and how it keeps it: by resubmitting with the tokens so far.

Takes messages, events and the time; returns messages to send and tokens to deliver. Every token it hands out is the next
one of its request: whatever the engine or the wire loses, repeats or sends too late is repaired or dropped here, and
counted. A request that the engine gives up (`pd_reschedule`) has ended: the engine has tried all there is here, and who
asked carries on elsewhere. Knows nothing of sockets, text or HTTP.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from onward.api.draft_stats import Drafts
from onward.obs.metrics import Registry
from onward.obs.shared_counters import resubmissions, stale_events
from onward.proto.request import (
    CRASHES_TO_RUN_ALONE,
    Abort,
    AbortByName,
    Accepted,
    AskKvEvents,
    CallerLimits,
    Charged,
    Deltas,
    ErrorInfo,
    FromEngine,
    Held,
    Holding,
    Submit,
    ToEngine,
    TokenDelta,
)
from onward.proto.router import Progress
from onward.proto.sampling import Sampling
from onward.proto.step import TokenLogprobs

MAX_WAIT_S = 60.0
"""How long a request waits for an engine that takes it."""
MAX_FRUITLESS_RESUBMISSIONS = 16
"""Repairs of one request without a new token in between. Engine restarts do not count: the supervisor bounds those."""
FIRST_WORD_S = 3.0
"""How long we wait for the first word of an engine before we send a request again."""
MAX_UNREAD_HOLDINGS = 3
"""So many comparisons in a row that an engine makes without having read a submission mean that it never came. Only the
last message of all can be lost in this way; a later one that is read shows the loss at once."""
EPOCHS_PER_ATTEMPT = 1 << 20
MAX_ATTEMPT = 1 << 40
"""So that an epoch is a number of 64 bits."""
ABORT_HOLDS_S = 30.0
MAX_ENDED = 4096
MAX_ABORTS = 1024
"""So many, for so long, are said again to an engine that is new: who else serves these requests resubmits them to it."""
DEADLINE_MARGIN_S = 2.0
"""The engine ends a request at its deadline; if its word is lost, we do, this much later."""

NO_ENGINE = ErrorInfo("unavailable", "no engine took the request in time; try again later", 503, True)
LONE_DEATHS_TO_FAIL = 2
"""Engines that died while they ran a request and no other. One such death may be a coincidence."""
CRASHED_ENGINE = ErrorInfo(
    "crashed_engine",
    "engines died again and again while they ran this request alone; it is not tried again",
    500,
)
NOT_REPAIRABLE = ErrorInfo("engine_lost_request", "the engine lost this request again and again", 500, True)
ABORTED = ErrorInfo("aborted", "the request was aborted", 409)
TOO_LATE = ErrorInfo("deadline_exceeded", "the request's deadline has passed", 504)
GIVEN_UP = ErrorInfo("pd_preempted", "PD Error: this instance gave the request up", 503, True, stage="decode")

NO_PROGRESS = Progress("-", 0, 0, 0)
"""While there is no engine."""

RESCHEDULE = "pd_reschedule"
"""The finish reason of an output that may be continued elsewhere."""
ABORT = "abort"
"""The finish reason of an output that a client has ended by `/v1/abort`."""
CUT = frozenset({RESCHEDULE, ABORT})
"""Finish reasons of an output that is not complete. The client is told how to continue it."""


@dataclass(frozen=True, slots=True)
class Order:
    """Everything about one output sequence that is fixed before the first attempt."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    generated_token_ids: list[int] = field(default_factory=list)
    arrived_at_s: float = 0.0
    """By this process's clock, less the time that it had waited before it came here."""
    deadline_at_s: float | None = None
    priority: int = 0
    cache_salt: str = ""
    label: str = ""
    score_from: int | None = None
    """From this position of the output on, the logprobs of `generated_token_ids` are wanted too; -1: all of them, and
    the prompt's."""
    attempt: int = 1
    """Numbered by whoever is above us: a higher one takes the place of this one, also if it comes to another process."""
    num_cached_tokens: int | None = None
    """Of the first admission, if there was one before."""
    prefill_peers: list[str] = field(default_factory=list)
    may_move: bool = False
    caller: str = ""
    caller_limits: CallerLimits | None = None
    asks_anew: bool = False
    """Nobody is known to have let it in before, whatever number the attempt has: a client's cursor may say any."""
    max_drafts: int | None = None

    @property
    def epoch_before(self) -> int:
        """Epochs of one attempt are higher than all of the one before."""
        return (self.attempt - 1) * EPOCHS_PER_ATTEMPT

    @property
    def name(self) -> str:
        """What our answer calls it: the id without the choice."""
        return self.request_id.rpartition("-")[0]

    @property
    def names(self) -> set[str]:
        """What the client may call it."""
        return {self.name, self.label} if self.label else {self.name}

    def is_meant(self, names: Collection[str], everything: bool, caller: str | None) -> bool:
        """By whoever ends requests by name: of this caller's; None: of everybody's."""
        return caller in (None, self.caller) and (everything or not self.names.isdisjoint(names))


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """News of one request. Without tokens and without an end it says that the engine has accepted it.

    There is one for every token: a struct is made in a fifth of the time that a frozen dataclass takes."""

    request_id: str
    token_ids: list[int] = []
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    error: ErrorInfo | None = None
    logprobs: list[TokenLogprobs] | None = None
    """Where asked for: one for each of `token_ids`."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Where asked for, once, with the first tokens."""
    rescored: list[TokenLogprobs] | None = None
    embedding: bytes | None = None
    """With `Order.score_from`, once, before all others: of the given tokens from there on."""
    drafts: Drafts = ()

    @property
    def failed(self) -> bool:
        """Whether this fails the whole answer. An output that was given up or aborted keeps what was generated."""
        return self.error is not None and self.finish_reason not in CUT


@dataclass(slots=True)
class Actions:
    send: list[ToEngine] = field(default_factory=list)
    deliver: list[Delivery] = field(default_factory=list)


@dataclass(slots=True)
class Promise:
    """One unfinished request."""

    order: Order
    tokens: list[int]
    epoch: int = 0
    submitted_seq: int | None = None
    """None while no engine has been asked."""
    num_unread_holdings: int = 0
    accepted: bool = False
    """Some engine has taken it once. From then on a refusal means to wait, not to fail."""
    crash_charges: int = 0
    engine_deaths: int = 0
    """Since its last token: engines that died while they held it among others."""
    lone_deaths: int = 0
    """Since its last token: engines that died while they ran it alone."""
    num_cached_tokens: int | None = None
    score_from: int | None = None
    """None once there is nothing left to be scored again."""
    fruitless_resubmissions: int = 0
    waiting_since_s: float | None = None
    """Since when no engine is known to hold it."""
    retry_at_s: float | None = None

    epoch_before: int = 0
    """All of its own are higher."""

    @property
    def was_submitted(self) -> bool:
        return self.epoch > self.epoch_before


@dataclass(frozen=True, slots=True)
class GivenAbort:
    """Somebody has asked us to end requests by name."""

    ask_id: int
    names: frozenset[str]
    everything: bool
    given_at_s: float
    until_s: float
    caller: str | None = None
    """Whose are meant; None: everybody's."""

    def again(self, seq: int, now_s: float) -> AbortByName:
        ago_s = max(0.0, now_s - self.given_at_s)
        return AbortByName(seq, self.ask_id, sorted(self.names), self.everything, ago_s, self.caller)


class Ledger:
    def __init__(self, registry: Registry) -> None:
        self.engine: str | None = None
        self._promises: dict[str, Promise] = {}
        self._held: dict[str, Held] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()
        """Their last epochs. A client that has seen nothing of an attempt comes back with the number of the one before:
        what the engine still says of the first must not be taken for a word about the second."""
        self._aborts_given: deque[GivenAbort] = deque(maxlen=MAX_ABORTS)
        self._is_new_engine = False
        """It has not told us yet what it holds."""
        self._engine_up_s = 0.0
        self._step = 0
        self._seq = 0
        self._stale_events = stale_events(registry)
        self._resubmissions = resubmissions(registry)

    def __len__(self) -> int:
        return len(self._promises)

    def submit(self, order: Order, now_s: float) -> Actions:
        assert order.request_id not in self._promises, "request ids are never used twice"
        epoch_before = max(order.epoch_before, self._ended.get(order.request_id, 0))
        promise = Promise(
            order,
            list(order.generated_token_ids),
            epoch=epoch_before,
            epoch_before=epoch_before,
            num_cached_tokens=order.num_cached_tokens,
            score_from=order.score_from,
            waiting_since_s=now_s,
        )
        self._promises[order.request_id] = promise
        if self._was_aborted(order, now_s):
            actions = Actions()
            self._fail(promise, ABORTED, actions)
            return actions
        return Actions(send=self._attempt(promise, now_s))

    def stop(self, request_id: str, num_tokens: int) -> Actions:
        """The text of the first `num_tokens` tokens ended in a stop string."""
        promise = self._promises.get(request_id)
        if promise is None:
            return Actions()
        self._forget(promise)
        if promise.submitted_seq is None:
            return Actions()
        return Actions(send=[Abort(self._next_seq(), request_id, promise.epoch, "stop", num_tokens)])

    def abort(self, request_id: str) -> Actions:
        """The client is gone, or another choice of the request has failed. It may come back as another attempt."""
        promise = self._promises.get(request_id)
        if promise is None:
            return Actions()
        self._forget(promise)
        return Actions(send=self._aborts({request_id: promise.epoch}) if promise.was_submitted else [])

    def fail(self, request_ids: Iterable[str], error: ErrorInfo) -> Actions:
        """Somebody here has decided that these end now, with this error."""
        actions = Actions()
        for request_id in request_ids:
            if promise := self._promises.get(request_id):
                self._fail(promise, error, actions)
        return actions

    def abort_by_name(
        self,
        ask_id: int,
        names: list[str],
        everything: bool,
        now_s: float,
        caller: str | None = None,
    ) -> Actions:
        """Asks the engine, which knows everybody's requests. Our own end at once, also if no engine has them now. It holds
        for a while, whatever becomes of the engine: other processes may have promised these requests too."""
        actions = Actions()
        until_s = now_s + ABORT_HOLDS_S
        self._aborts_given.append(GivenAbort(ask_id, frozenset(names), everything, now_s, until_s, caller))
        if self.engine is not None:
            actions.send.append(AbortByName(self._next_seq(), ask_id, names, everything, caller=caller))
        for promise in list(self._promises.values()):
            if promise.order.is_meant(names, everything, caller):
                self._fail(promise, ABORTED, actions)
        return actions

    def ask_kv_events(self, ask_id: int, next_number: int) -> Actions:
        return Actions(send=[] if self.engine is None else [AskKvEvents(self._next_seq(), ask_id, next_number)])

    def known(self, names: list[str], everything: bool, caller: str | None = None) -> set[str]:
        """Which of these names belong to something unfinished here; or the ids of all that is. Of this caller's only,
        if one is given."""
        orders = [one.order for one in self._promises.values() if caller in (None, one.order.caller)]
        if everything:
            return {order.name for order in orders}
        return {name for order in orders for name in order.names}.intersection(names)

    def engine_up(self, incarnation: str, now_s: float) -> Actions:
        actions = Actions()
        if incarnation == self.engine:
            return actions
        self.engine = incarnation
        self._held = {}
        self._is_new_engine = True
        self._engine_up_s = now_s
        actions.send += self._aborts_again(now_s)
        for promise in self._promises.values():
            if promise.was_submitted:
                self._resubmissions.inc("engine_restart")
            actions.send += self._attempt(promise, now_s)
        return actions

    def engine_gone(self, incarnation: str, now_s: float, alone: str | None = None) -> Actions:
        """`alone`: the request that it ran by itself, which so is the cause. Else all that it held are suspects."""
        actions = Actions()
        if incarnation != self.engine:
            return actions
        self.engine = None
        self._held = {}
        for promise in list(self._promises.values()):
            if promise.submitted_seq is not None:
                self._charge_death(promise, alone, actions)
            self._lose_engine(promise, now_s)
        return actions

    def _charge_death(self, promise: Promise, alone: str | None, actions: Actions) -> None:
        """A request that shared the engine with others runs alone from the second death on, and is never refused for it."""
        if alone is None:
            promise.engine_deaths = min(promise.engine_deaths + 1, CRASHES_TO_RUN_ALONE)
        elif alone == promise.order.request_id:
            promise.lone_deaths += 1
            if promise.lone_deaths >= LONE_DEATHS_TO_FAIL:
                self._fail(promise, CRASHED_ENGINE, actions)

    def receive(self, incarnation: str, message: FromEngine, now_s: float) -> Actions:
        actions = Actions()
        if incarnation != self.engine:
            self._stale_events.inc("incarnation")
            return actions
        match message:
            case Deltas():
                for delta in message.deltas:
                    self._take(delta, now_s, actions)
            case Accepted():
                if promise := self._current(message.request_id, message.epoch):
                    self._accept(promise, actions)
            case Charged():
                if promise := self._current(message.request_id, message.epoch):
                    promise.crash_charges = message.crash_charges
            case Holding():
                self._compare(message, now_s, actions)
        return actions

    def tick(self, now_s: float) -> Actions:
        """What only the passing of time brings: deadlines, waits that are over, refusals to be tried again."""
        actions = Actions()
        for promise in list(self._promises.values()):
            if error := _overdue(promise, now_s):
                self._fail(promise, error, actions)
            elif promise.retry_at_s is not None and now_s >= promise.retry_at_s:
                actions.send += self._attempt(promise, now_s)
        return actions

    def fail_all(self, error: ErrorInfo) -> Actions:
        return self.fail(list(self._promises), error)

    def progress(self, request_ids: Iterable[str]) -> Progress:
        """As the engine has last said it. As long as something of it moves, these are not stalled."""
        if self.engine is None:
            return NO_PROGRESS
        held = [self._held[request_id] for request_id in request_ids if request_id in self._held]
        queue = min((one.queue for one in held), default=0)
        return Progress(self.engine, self._step, sum(one.computed for one in held), queue)

    def _take(self, delta: TokenDelta, now_s: float, actions: Actions) -> None:
        #   tokens we have    |-----------------|
        #   delta                      |--------------|      only what lies behind ours is new
        #                            position        end
        promise = self._current(delta.request_id, delta.epoch)
        if promise is None:
            return
        promise.retry_at_s = None
        have, end = len(promise.tokens), delta.position + len(delta.token_ids)
        if delta.position > have or (promise.score_from is not None and _lacks_scores(delta)):
            self._repair(promise, "gap", now_s, actions)
        elif end < have or (end == have and delta.token_ids and delta.finish_reason is None):
            self._stale_events.inc("duplicate")
        elif promise.accepted and delta.error is not None and (refusal := _passing_refusal(delta)) is not None:
            self._wait_and_retry(promise, refusal, now_s)
        else:
            self._advance(promise, have - delta.position, delta, actions)

    def _advance(self, promise: Promise, num_known: int, delta: TokenDelta, actions: Actions) -> None:
        """Takes what a delta has behind its first `num_known` tokens."""
        new = delta.token_ids[num_known:]
        rescored = None if promise.score_from is None else delta.rescored
        reason, error = _end(delta)
        if promise.num_cached_tokens is None and (new or delta.error is None):
            promise.num_cached_tokens = delta.num_cached_tokens
        if rescored is not None:
            promise.score_from = None
        if new:
            promise.tokens += new
            promise.fruitless_resubmissions = 0
            promise.crash_charges = promise.engine_deaths = promise.lone_deaths = 0
            promise.accepted, promise.waiting_since_s = True, None
        if reason is not None:
            self._forget(promise)
        actions.deliver.append(
            Delivery(
                delta.request_id,
                new,
                promise.num_cached_tokens,
                reason,
                error,
                delta.logprobs[num_known:] if delta.logprobs is not None else None,
                delta.prompt_logprobs if num_known == 0 else None,
                rescored,
                delta.embedding,
                _drafts(delta) if delta.num_drafted else (),
            )
        )

    def _compare(self, holding: Holding, now_s: float, actions: Actions) -> None:
        """Both sides' views, once a second. Whatever was sent before this message has been read by now, or is lost."""
        if holding.engine_incarnation != self.engine:
            self._stale_events.inc("incarnation")
            return
        actions.send += self._aborts_again(now_s)
        if self._is_new_engine:
            self._is_new_engine = False
            for promise in self._promises.values():
                if promise.submitted_seq is not None:
                    promise.retry_at_s = None
        held = self._held = {one.request_id: one for one in holding.held}
        self._step = holding.step
        unknown = {one.request_id: one.epoch for one in holding.held if one.request_id not in self._promises}
        actions.send += self._aborts(unknown)
        for promise in list(self._promises.values()):
            if promise.submitted_seq is None:
                continue
            if promise.submitted_seq <= holding.seq or promise.num_unread_holdings == MAX_UNREAD_HOLDINGS:
                self._compare_one(promise, held.get(promise.order.request_id), now_s, actions)
            else:
                promise.num_unread_holdings += 1

    def _compare_one(self, promise: Promise, held: Held | None, now_s: float, actions: Actions) -> None:
        if held is None or held.epoch != promise.epoch:
            self._repair(promise, "lost", now_s, actions)
        elif held.position > len(promise.tokens):
            self._repair(promise, "gap", now_s, actions)
        else:
            self._accept(promise, actions)

    def _current(self, request_id: str, epoch: int) -> Promise | None:
        promise = self._promises.get(request_id)
        if promise is None or promise.submitted_seq is None:
            self._stale_events.inc("request")
            return None
        if promise.epoch != epoch:
            self._stale_events.inc("epoch")
            return None
        return promise

    def _accept(self, promise: Promise, actions: Actions) -> None:
        promise.waiting_since_s = promise.retry_at_s = None
        if not promise.accepted:
            promise.accepted = True
            actions.deliver.append(Delivery(promise.order.request_id))

    def _repair(self, promise: Promise, cause: str, now_s: float, actions: Actions) -> None:
        promise.fruitless_resubmissions += 1
        if promise.fruitless_resubmissions > MAX_FRUITLESS_RESUBMISSIONS:
            self._fail(promise, NOT_REPAIRABLE, actions)
            return
        self._resubmissions.inc(cause)
        actions.send += self._attempt(promise, now_s)

    def _wait_and_retry(self, promise: Promise, error: ErrorInfo, now_s: float) -> None:
        self._lose_engine(promise, now_s)
        promise.retry_at_s = now_s + (error.retry_after_s or 1.0)

    def _lose_engine(self, promise: Promise, now_s: float) -> None:
        promise.submitted_seq = None
        promise.retry_at_s = None
        if promise.waiting_since_s is None:
            promise.waiting_since_s = now_s

    def _attempt(self, promise: Promise, now_s: float) -> list[ToEngine]:
        """The one recovery: everything that was fixed at the start, and the tokens so far, under a higher epoch."""
        promise.retry_at_s = None
        if self.engine is None:
            return []
        order = promise.order
        if promise.waiting_since_s is None:
            promise.waiting_since_s = now_s
        promise.epoch += 1
        promise.submitted_seq = self._next_seq()
        promise.num_unread_holdings = 0
        if self._is_new_engine:
            # It tells what it holds to those that it has heard of. Our first word to it may be the one that is lost.
            promise.retry_at_s = now_s + FIRST_WORD_S
        return [
            Submit(
                seq=promise.submitted_seq,
                request_id=order.request_id,
                epoch=promise.epoch,
                prompt_token_ids=order.prompt_token_ids,
                sampling=order.sampling,
                generated_token_ids=list(promise.tokens),
                waited_s=max(0.0, now_s - order.arrived_at_s),
                deadline_s=None if order.deadline_at_s is None else max(0.0, order.deadline_at_s - now_s),
                priority=order.priority,
                cache_salt=order.cache_salt,
                crash_charges=promise.crash_charges,
                engine_deaths=promise.engine_deaths,
                num_cached_tokens=promise.num_cached_tokens,
                label=order.label,
                score_from=promise.score_from,
                prefill_peers=order.prefill_peers,
                may_move=order.may_move,
                caller=order.caller,
                caller_limits=order.caller_limits,
                asks_anew=order.asks_anew and promise.epoch == promise.epoch_before + 1,
                max_drafts=order.max_drafts,
            )
        ]

    def _fail(self, promise: Promise, error: ErrorInfo, actions: Actions) -> None:
        request_id = promise.order.request_id
        self._forget(promise)
        if promise.was_submitted:
            actions.send += self._aborts({request_id: promise.epoch})
        reason = ABORT if error.code == ABORTED.code else "error"
        actions.deliver.append(Delivery(request_id, [], promise.num_cached_tokens, finish_reason=reason, error=error))

    def _forget(self, promise: Promise) -> None:
        request_id = promise.order.request_id
        del self._promises[request_id]
        self._ended[request_id] = promise.epoch
        self._ended.move_to_end(request_id)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _aborts(self, epochs: dict[str, int]) -> list[ToEngine]:
        """Each up to its epoch and no further: the next attempt may be under way."""
        if self.engine is None:
            return []
        return [Abort(self._next_seq(), request_id, epoch) for request_id, epoch in epochs.items()]

    def _aborts_again(self, now_s: float) -> list[ToEngine]:
        """Of those that an earlier engine was to carry out: this one may be given what they mean at any time, by a process
        that learns of it late."""
        standing = self._standing_aborts(now_s)
        return [
            one.again(self._next_seq(), now_s) for one in standing if one.until_s - ABORT_HOLDS_S <= self._engine_up_s
        ]

    def _was_aborted(self, order: Order, now_s: float) -> bool:
        """Ids are given once, so whoever brings one of these comes too late. A label may be another request's by now."""
        standing = self._standing_aborts(now_s)
        return any(order.name in given.names and given.caller in (None, order.caller) for given in standing)

    def _standing_aborts(self, now_s: float) -> "deque[GivenAbort]":
        while self._aborts_given and self._aborts_given[0].until_s <= now_s:
            self._aborts_given.popleft()
        return self._aborts_given

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq


def _end(delta: TokenDelta) -> tuple[str | None, ErrorInfo | None]:
    """Why the output has ended, if it has. Decided here once: an abort stays one, whatever else befell the request."""
    if delta.finish_reason is None:
        return None, delta.error
    if delta.finish_reason == ABORT:
        return ABORT, ABORTED
    if _is_given_up(delta):
        return RESCHEDULE, delta.error or GIVEN_UP
    return delta.finish_reason, delta.error


def _is_given_up(delta: TokenDelta) -> bool:
    """By the engine, for another instance to carry on. Without any token it may call that an error."""
    if delta.finish_reason == "error" and delta.error is not None:
        return delta.error.retryable and delta.error.code.startswith("pd_")
    return delta.finish_reason == RESCHEDULE


def _passing_refusal(delta: TokenDelta) -> ErrorInfo | None:
    """The error of an engine that would take the request a little later."""
    if delta.error is None or not delta.error.retryable or delta.finish_reason == ABORT or _is_given_up(delta):
        return None
    return delta.error


def _lacks_scores(delta: TokenDelta) -> bool:
    """Tokens came, and not the logprobs that were to come before them."""
    return bool(delta.token_ids) and delta.rescored is None


def _overdue(promise: Promise, now_s: float) -> ErrorInfo | None:
    deadline_s = promise.order.deadline_at_s
    margin_s = 0.0 if promise.submitted_seq is None else DEADLINE_MARGIN_S
    if deadline_s is not None and now_s >= deadline_s + margin_s:
        return TOO_LATE
    waiting_since_s = promise.waiting_since_s
    if waiting_since_s is not None and now_s - waiting_since_s >= MAX_WAIT_S:
        return NO_ENGINE
    return None


def _drafts(delta: TokenDelta) -> Drafts:
    return ((delta.num_drafted, len(delta.token_ids) - 1),)
