"""The router's decisions: which stream is tried where and when, when that is given up, and who hears of it.

    open ──> next_step ──Dispatch──> begun, accepted, (events), ended ──> next_step ──> … ──> Finish or GiveUp ──> close
                 └──Wait──> next_step

Joins the instances, the choice among them, the retry budget and all streams. Takes messages and the time, and returns
what to do; sockets, tasks and clocks are the business of `serving`.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from typing import Any

from onward.config import RouterConfig
from onward.errors import Conflict, DeadlineExceeded, NotFound, Overloaded, Unavailable
from onward.obs.metrics import LabelValues, Registry
from onward.proto.block_hash import BlockHash, extend, root
from onward.proto.cursor import Cursor
from onward.proto.request import ErrorInfo
from onward.proto.router import Attempt, RegisterAnswer, Registration
from onward.router.budget import RetryBudget
from onward.router.overview import instances_shown
from onward.router.policy import Chance, Chooser, Pair, RouteFacts, can_hold, may_take
from onward.router.records import Records, Tombstones, is_meant
from onward.router.replicas import Replica, Replicas, State
from onward.router.resumes import Resumes
from onward.router.retrying import BUDGET_STEP_S, Retrying
from onward.router.route import Route
from onward.router.router_metrics import RouterMetrics
from onward.router.stream import Cause, Failed, Origin, Stream, continued
from onward.web.failures import info_of

MAX_WAIT_S = 60.0
"""For an instance, where the client has set no deadline."""
WAIT_STEP_S = 1.0
DEADLINE_MARGIN_S = 1.0
"""An instance ends what is over its deadline by itself, in better words."""
SILENT_S = 2.0
"""A stream that moves on an instance that is gone from the books is left alone."""
MAX_UNREAD_S = 120.0
"""A client that takes nothing for so long counts as gone."""

ABORTED = ErrorInfo("aborted", "the request was aborted", 409)
STREAM_UNKNOWN = "stream_unknown"


@dataclass(frozen=True, slots=True)
class Dispatch:
    instance: str
    url: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    info: ErrorInfo
    body: bytes | None


@dataclass(frozen=True, slots=True)
class Finish:
    pass


Step = Dispatch | Wait | GiveUp | Finish


@dataclass(frozen=True, slots=True)
class Aborted:
    routes: list[Route]
    """Those that run, and whose attempt ends now."""
    left: list[Stream]
    """By their client, and dropped by this."""
    ids: list[str]
    """Theirs, and those of streams whose client has gone."""
    known: Set[str]
    """Which of the names were known; the ids, where all were meant."""
    idle: dict[str, set[str]] = field(default_factory=dict)
    """Responses that instances keep and that nothing runs: by id, the names that mean them."""


class RouterCore:
    def __init__(self, config: RouterConfig, incarnation: str, registry: Registry, chance: Chance) -> None:
        self.config = config
        self.incarnation = incarnation
        policies = (config.policy, config.prefill_policy, config.decode_policy)
        self.replicas = Replicas(incarnation, wants_kv_events="prefix" in policies)
        for url in filter(None, (one.strip() for one in config.instances.split(","))):
            self.replicas.add_static(url)
        self._chooser = Chooser(*policies, chance, self.replicas.index)
        self._budget = RetryBudget(config.retry_budget)
        self.records = Records(config.detach_ttl_s)
        self._tombstones = Tombstones()
        self.metrics = RouterMetrics(registry, self._count_streams, self._count_instances, self._count_records)
        self._routes: dict[str, Route] = {}
        self._labels: dict[tuple[str, str], str] = {}
        """By caller and label: what somebody else calls a request is nobody's business."""
        self._told: dict[str, Registration] = {}
        self._num_waiting = 0
        """New requests for which there is no instance."""
        self._resumes = Resumes(self.metrics)
        self._retrying = Retrying(config, self.replicas, self._budget, self.metrics, self._resumes)
        self._now_s = 0.0

    # Streams begin.

    def open(self, origin: Origin, now_s: float, *, epoch: int = 0) -> Route:
        """A client's request. `epoch`: the highest that was ever used for it."""
        if origin.request_id in self._routes:
            raise Conflict(f"Last-Event-ID: the stream {origin.request_id} is under way already")
        if origin.label and (origin.caller, origin.label) in self._labels:
            raise Conflict(
                f"X-Request-Id: {origin.label!r} is the label of a request that is under way", code="label_in_use"
            )
        self._budget.request(now_s)
        return self._add(Stream(origin, self.config.preempt_retry_count, epoch=epoch), now_s)

    def continue_stream(self, known: Stream, place: Cursor, now_s: float) -> Route | None:
        """A client has come back for a stream, at the place it names. None: what is known of it does not reach so far."""
        self.check_alive(place.request_id, now_s)
        stream = continued(known, place, self.config.preempt_retry_count, self._new_deadline(now_s))
        if stream is None:
            return None
        self.records.drop(place.request_id)
        return self._add(stream, now_s)

    def check_alive(self, request_id: str, now_s: float) -> None:
        if self._tombstones.has(request_id, now_s):
            raise NotFound(f"Last-Event-ID: the stream {request_id} was aborted", code=STREAM_UNKNOWN)

    def routes(self) -> list[Route]:
        return list(self._routes.values())

    def live(self, request_id: str) -> Route | None:
        return self._routes.get(request_id)

    def _new_deadline(self, now_s: float) -> float | None:
        timeout_s = self.config.request_timeout_s
        return None if timeout_s is None else now_s + timeout_s

    def _add(self, stream: Stream, now_s: float) -> Route:
        assert stream.request_id not in self._routes, "ids are unique among live streams"
        route = Route(stream, opened_s=now_s, spoken_s=now_s)
        self._routes[stream.request_id] = route
        if stream.origin.label:
            self._labels[stream.origin.caller, stream.origin.label] = stream.request_id
        return route

    # What to do next.

    def next_step(self, route: Route, now_s: float) -> Step:
        self._now_s = now_s
        stream = route.stream
        assert not stream.is_under_way, "an attempt is under way"
        if stream.is_complete and stream.is_out_of_reach_of_aborts:
            return Finish()
        if route.verdict is not None:
            return GiveUp(route.verdict, route.verdict_body)
        if stream.is_complete or stream.owes_only_the_end:
            return Finish()
        deadline_at_s = stream.origin.deadline_at_s
        if deadline_at_s is not None and now_s >= deadline_at_s:
            return self._give_up(route, info_of(DeadlineExceeded("the request's deadline has passed")))
        if route.crowded_since_s is not None and now_s >= route.crowded_since_s + MAX_WAIT_S:
            assert stream.failed is not None, "somebody has said that there is no room"
            return self._give_up(route, stream.failed.info)
        pause_s = self._retrying.pause_s(route, now_s)
        if pause_s > 0:
            return Wait(pause_s)
        if route.owes_budget is not None and not self._retrying.has_paid(route, now_s):
            return self._without_budget(route, route.owes_budget, now_s)
        pair = self._chooser.choose(self._facts(route, now_s), self.replicas.all(now_s), now_s)
        return self._without_instance(route, now_s) if pair is None else self._dispatch(route, pair, now_s)

    def _facts(self, route: Route, now_s: float) -> RouteFacts:
        stream, origin = route.stream, route.stream.origin
        num_prompt = stream.num_prompt_tokens
        if num_prompt is None and origin.known_prompt is not None:
            num_prompt = self._minded_length(origin.known_prompt, origin.max_output, now_s)
        return RouteFacts(
            num_prompt_tokens=num_prompt,
            max_output=origin.max_output,
            session=origin.session,
            prompt_hashes=self._hashes(origin),
            avoid=frozenset(route.avoid),
            exclude=route.excluded(now_s),
            fingerprint=stream.fingerprint,
        )

    def _minded_length(self, prompt: list[int], max_output: int | None, now_s: float) -> int | None:
        """None for what nobody can hold: an instance will refuse it, instead of us waiting for a larger one."""
        facts = RouteFacts(num_prompt_tokens=len(prompt), max_output=max_output)
        return len(prompt) if any(can_hold(replica, facts) for replica in self.takers(now_s)) else None

    def _hashes(self, origin: Origin) -> list[BlockHash]:
        """Of the prompt's full blocks, where anybody will look at them."""
        if self.replicas.index is None or not origin.known_prompt:
            return []
        size = next((told.block_size for told in self._told.values() if told.block_size), 0)
        return block_hashes(origin.known_prompt, size, origin.cache_salt) if size else []

    def _without_instance(self, route: Route, now_s: float) -> Step:
        stream, failed = route.stream, route.stream.failed
        if failed is not None and failed.cause is Cause.REJECTED:
            return self._give_up(route, failed.info)
        if failed is not None and failed.cause is Cause.OVERLOADED and not stream.accepted_once:
            soonest = route.soonest_room or failed
            return self._give_up(route, soonest.info, soonest.body)
        if route.waiting_since_s is None:
            if not stream.accepted_once and self._num_waiting >= self.config.max_queue:
                self.metrics.overloads.inc()
                problem = f"{self.config.max_queue} requests wait for an instance already; try again later"
                return self._give_up(route, info_of(Overloaded(problem, retry_after_s=1.0)))
            self._start_waiting(route, now_s)
        assert route.waiting_since_s is not None
        left_s = route.waiting_since_s + MAX_WAIT_S - now_s
        if left_s <= 0:
            problem = f"no instance could take the request for {MAX_WAIT_S:g} s"
            return self._give_up(route, info_of(Unavailable(problem, retry_after_s=5.0)))
        soonest_s = min((until_s - now_s for until_s in route.resting.values()), default=WAIT_STEP_S)
        deadline_at_s = stream.origin.deadline_at_s
        until_deadline_s = WAIT_STEP_S if deadline_at_s is None else deadline_at_s - now_s
        return Wait(max(0.001, min(left_s, soonest_s, until_deadline_s, WAIT_STEP_S)))

    def _without_budget(self, route: Route, info: ErrorInfo, now_s: float) -> Step:
        if now_s >= route.budget_until_s:
            return self._give_up(route, info)
        return Wait(min(BUDGET_STEP_S, route.budget_until_s - now_s))

    def _give_up(self, route: Route, info: ErrorInfo, body: bytes | None = None) -> GiveUp:
        route.settle(info, body)
        assert route.verdict is not None
        return GiveUp(route.verdict, route.verdict_body)

    def _dispatch(self, route: Route, pair: Pair, now_s: float) -> Dispatch:
        instance, stream = pair.instance, route.stream
        has_ids = stream.origin.prompt_token_ids is not None
        if has_ids and not stream.has_progress and instance.text_hash != stream.origin.text_hash:
            # It has come since the ids were made, with another tokenizer. What has begun with them goes on with them.
            stream.origin = replace(stream.origin, prompt_token_ids=None)
        route.booking = self.replicas.book(instance.instance)
        route.prefill_bookings = [self.replicas.book(peer.instance) for peer in pair.prefill[:1]]
        route.stream.begin(instance.instance, now_s)
        peers = [peer.handoff_address for peer in pair.prefill]
        return Dispatch(instance.instance, instance.url, route.stream.attempt(now_s, peers))

    # An attempt's life.

    def accepted(self, route: Route, now_s: float) -> None:
        if not route.stream.accepted_once:
            self.metrics.queue_wait.observe(now_s - route.opened_s)
        self._stop_waiting(route)
        route.stream.accepted(now_s)

    def advanced(self, route: Route, now_s: float) -> None:
        """Its first event has come: the instance works, and a resume has succeeded."""
        stream = route.stream
        assert stream.instance is not None
        self.replicas.succeeded(stream.instance, now_s)
        route.crowded_since_s = None
        for booking in route.prefill_bookings:
            booking.release()
        replica = self.replicas.get(stream.instance)
        fingerprint = replica.fingerprint if replica is not None else stream.fingerprint
        if route.resuming is not None:
            exact = stream.fingerprint in (None, fingerprint)
            self._resumes.end(route, "exact" if exact else "inexact", now_s)
        stream.fingerprint = fingerprint

    def ended(self, route: Route, now_s: float) -> None:
        """The attempt is over, and its connection closed or given back."""
        stream = route.stream
        assert stream.instance is not None
        route.release()
        if stream.failed is not None:
            stream.failed = self._seen_rightly(stream.failed, stream.instance)
        failed = stream.end_attempt()
        undone = "done" if stream.is_complete else "cancelled"
        self.metrics.attempts.inc(undone if failed is None else failed.cause.value)
        if failed is not None and route.verdict is None:
            self._retrying.judge(route, failed, stream.instance, now_s)

    def _seen_rightly(self, failed: Failed, instance: str) -> Failed:
        """What breaks off at an instance that is going is a part of its going."""
        replica = self.replicas.get(instance)
        is_going = replica is not None and replica.state is State.DRAINING
        if not (is_going and failed.info.retryable and failed.cause in (Cause.LOST, Cause.STALL, Cause.ERROR)):
            return failed
        return replace(failed, cause=Cause.DRAIN)

    def _start_waiting(self, route: Route, now_s: float) -> None:
        route.waiting_since_s = now_s
        self._num_waiting += not route.stream.accepted_once

    def _stop_waiting(self, route: Route) -> None:
        if route.waiting_since_s is not None:
            route.waiting_since_s = None
            self._num_waiting -= not route.stream.accepted_once

    # Streams end.

    def close(self, route: Route, now_s: float, *, keep: bool) -> None:
        """The client has its end, or has gone. `keep`: it may come back."""
        stream = route.stream
        self._routes.pop(stream.request_id, None)
        label = stream.origin.caller, stream.origin.label
        if self._labels.get(label) == stream.request_id:
            del self._labels[label]
        self._stop_waiting(route)
        route.release()
        if stream.is_under_way:
            stream.end_attempt()
        if route.resuming is not None:
            ok = stream.is_complete or stream.owes_only_the_end
            self._resumes.end(route, "exact" if ok else "failed", now_s)
        self.metrics.stale_events.inc(by=stream.num_stale)
        if keep and _is_of_use(route):
            self.records.keep(stream, now_s)

    def abort(self, names: Iterable[str] | None, now_s: float, caller: str | None = None) -> Aborted:
        """Ends streams by id or label, or all, running or left by their client; a caller's own, or everybody's. An attempt
        that has only the whole answer left to send is not ended, and no other one follows it."""
        wanted = None if names is None else frozenset(names)
        routes = [route for route in self._routes.values() if is_meant(route.stream, wanted, caller)]
        for route in routes:
            route.settle(ABORTED)
        left = self.records.drop_meant(wanted, caller)
        origins = [one.origin for one in (*(route.stream for route in routes), *left)]
        for origin in origins:
            self._tombstones.add(origin.request_id, now_s)
        ids = [origin.request_id for origin in origins]
        labels = [origin.label for origin in origins]
        cut = [route for route in routes if not route.stream.is_out_of_reach_of_aborts]
        return Aborted(cut, left, ids, {*ids} if wanted is None else wanted.intersection((*ids, *labels)))

    # Instances.

    def register(self, registration: Registration, now_s: float) -> RegisterAnswer:
        answer = self.replicas.register(registration, now_s)
        self._note_told(registration)
        return answer

    def probed(self, url: str, registration: Registration | None, now_s: float) -> str | None:
        error = self.replicas.probed(url, registration, now_s)
        if registration is not None:
            self._note_told(registration)
        return error

    def _note_told(self, registration: Registration) -> None:
        if self.replicas.get(registration.instance) is not None:
            self._told[registration.instance] = registration

    def tick(self, now_s: float) -> list[Route]:
        """Streams whose attempt must end now; each says why."""
        self._now_s = now_s
        for instance in self.replicas.tick(now_s):
            self._told.pop(instance, None)
        self.records.expire(now_s)
        replicas = {replica.instance: replica for replica in self.replicas.all(now_s)}
        cut: list[Route] = []
        for route in self._routes.values():
            stream = route.stream
            if stream.is_under_way and not stream.is_sending and not stream.is_complete and stream.failed is None:
                self._inspect(route, replicas, now_s)
                if stream.failed is not None or stream.is_complete:
                    cut.append(route)
        return cut

    def unread(self, now_s: float) -> list[Route]:
        """Streams whose client has stopped reading. They may come back for the rest."""
        streams = [route for route in self._routes.values() if route.stream.is_sending]
        return [route for route in streams if now_s - route.stream.moved_s >= MAX_UNREAD_S]

    def _inspect(self, route: Route, replicas: dict[str, Replica], now_s: float) -> None:
        stream = route.stream
        deadline_at_s, still_s = stream.origin.deadline_at_s, now_s - stream.moved_s
        replica = replicas.get(stream.instance or "")
        if deadline_at_s is not None and now_s > deadline_at_s + DEADLINE_MARGIN_S:
            stream.fail(Cause.DEADLINE, info_of(DeadlineExceeded("the request's deadline has passed")))
        elif still_s >= self.config.stall_timeout_s and not stream.reports_restart:
            stream.lose(Cause.STALL, f"nothing moved for {still_s:.1f} s")
        elif replica is None and still_s >= SILENT_S:
            stream.lose(Cause.GONE, "the instance is gone")
        elif replica is not None and replica.state is State.DRAINING:
            if self._has_other(route, replicas, now_s):
                stream.lose(Cause.DRAIN, "the instance is being drained")
        elif stream.reports_restart and self._restarts_too_long(route, replicas, still_s, now_s):
            stream.lose(Cause.RESTART, f"the instance restarts a process for {still_s:.1f} s now")

    def _restarts_too_long(self, route: Route, replicas: dict[str, Replica], still_s: float, now_s: float) -> bool:
        if still_s < self.config.restart_grace_s:
            return False
        return still_s >= MAX_WAIT_S or self._has_other(route, replicas, now_s)

    def _has_other(self, route: Route, replicas: dict[str, Replica], now_s: float) -> bool:
        facts = self._facts(route, now_s)
        others = [replica for name, replica in replicas.items() if name != route.stream.instance]
        return any(replica.state is State.READY and may_take(replica, facts) for replica in others)

    # What others are shown.

    def status(self, now_s: float) -> dict[str, Any]:
        instances = instances_shown(self.replicas.all(now_s), self._told, self._routes.values())
        return {"instances": instances, "resumes": self._resumes.shown(now_s)}

    def can_serve(self, now_s: float) -> bool:
        return any(may_take(replica, RouteFacts()) for replica in self.replicas.all(now_s))

    def takers(self, now_s: float) -> list[Replica]:
        """Those that may know of a stream."""
        return [one for one in self.replicas.all(now_s) if one.role != "prefill" and one.state is not State.STARTING]

    def _count_streams(self) -> dict[LabelValues, float]:
        running = sum(route.stream.is_under_way for route in self._routes.values())
        return {("running",): running, ("waiting",): len(self._routes) - running}

    def _count_instances(self) -> dict[LabelValues, float]:
        counts: dict[LabelValues, float] = {}
        for replica in self.replicas.all(self._now_s):
            key = (replica.role, replica.state.value)
            counts[key] = counts.get(key, 0.0) + 1
        return counts

    def _count_records(self) -> dict[LabelValues, float]:
        return {(): float(len(self.records))}


def _is_of_use(route: Route) -> bool:
    """When nobody carries it any more."""
    stream = route.stream
    if route.is_deleted:
        return False
    if route.verdict is not None and route.verdict.code == ABORTED.code:
        return False  # here, or at another router
    if stream.was_aborted:
        return False  # at an instance
    return stream.accepted_once if route.is_asked_for_later else stream.origin.streams and stream.has_progress


def block_hashes(token_ids: list[int], block_size: int, cache_salt: str) -> list[BlockHash]:
    """Names of a prompt's full blocks."""
    hashes: list[BlockHash] = []
    parent = root(cache_salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = extend(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


def unknown_stream(request_id: str) -> NotFound:
    return NotFound(
        f"Last-Event-ID: nobody has the stream {request_id} any more; send the request again", code=STREAM_UNKNOWN
    )


def out_of_reach(param: str) -> Unavailable:
    """Clients believe a 404, and do not ask again."""
    return Unavailable(f"{param}: an instance that may have it does not answer; ask again", retry_after_s=1.0)
