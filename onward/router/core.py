"""The router's decisions: where and when a stream is attempted, when it is given up, and which error its client gets.

    open ──> next_action ──Dispatch──> begun, accepted, (events), ended ──> next_action ──> … ──> Finish or GiveUp ──> close
                 └──Wait──> next_action

`RouterCore` joins the instance registry, the routing policy, the retry budget and all streams. It takes messages and the
time, and returns actions; `stream_runner` does the I/O.
"""

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from typing import Any

from onward.config import RouterConfig
from onward.errors import RETRY_SOON_S, Conflict, DeadlineExceeded, NotFound, OnwardError, Overloaded, Unavailable
from onward.obs.metrics import LabelValues, Registry
from onward.proto.block_hash import BlockHash, block_hashes
from onward.proto.cursor import Cursor
from onward.proto.engine import ErrorInfo
from onward.proto.error_info import to_error_info
from onward.proto.router import Attempt, Registration, RegistrationReply
from onward.router.client_stream import AttemptFailure, ClientRequest, ClientStream, FailureCause, resume_at_cursor
from onward.router.instance_registry import InstanceInfo, InstanceRegistry, InstanceState
from onward.router.instance_status import describe_instances
from onward.router.model_routing import ModelSelector, parse_routes
from onward.router.resumable_streams import ResumableStreams, Tombstones, matches
from onward.router.resume_log import ResumeLog
from onward.router.retry_budget import RetryBudget
from onward.router.retry_policy import BUDGET_STEP_S, RetryPolicy
from onward.router.router_metrics import RouterMetrics
from onward.router.routing_policy import (
    InstanceSelector,
    RandBelow,
    RoutingCriteria,
    RoutingDecision,
    can_take_request,
    fits_context,
)
from onward.router.stream_routing_state import StreamRoutingState
from onward.web.json_body import short_repr

MAX_INSTANCE_WAIT_S = 60.0
"""For an instance, where the client has set no deadline."""
WAIT_STEP_S = 1.0
DEADLINE_MARGIN_S = 1.0
"""An instance ends what is over its deadline by itself, in better words."""
GONE_INSTANCE_GRACE_S = 2.0
"""A stream that moves on an instance that is gone from the books is left alone."""
CLIENT_STALL_TIMEOUT_S = 120.0
"""How long a client may read nothing before it counts as gone."""

ABORTED = ErrorInfo("aborted", "the request was aborted", 409)
STREAM_UNKNOWN = "stream_unknown"


@dataclass(frozen=True, slots=True)
class Dispatch:
    instance_id: str
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


StreamAction = Dispatch | Wait | GiveUp | Finish


@dataclass(frozen=True, slots=True)
class AbortResult:
    running: list[StreamRoutingState]
    """Running streams whose attempt ends now."""
    left: list[ClientStream]
    """By their client, and dropped by this."""
    ids: list[str]
    """Their ids, and those of streams whose client has gone."""
    known_names: Set[str]
    """Which of the names were known; the ids, where all were meant."""
    idle: dict[str, set[str]] = field(default_factory=dict)
    """Responses that instances keep and that nothing runs: by id, the names that mean them."""


class RouterCore:
    def __init__(
        self,
        config: RouterConfig,
        incarnation: str,
        registry: Registry,
        randbelow: RandBelow,
        settled_at_s: float = 0.0,
    ) -> None:
        """`settled_at_s`: from this time on, every running instance counts as registered. Before it, a request for an
        unknown model waits instead of failing."""
        self.config = config
        self.incarnation = incarnation
        policies = (config.policy, config.prefill_policy, config.decode_policy)
        self.instances = InstanceRegistry(incarnation, wants_kv_events="prefix" in policies)
        for url in filter(None, (part.strip() for part in config.instances.split(","))):
            self.instances.add_static(url)
        self.models = ModelSelector(parse_routes(config.route), self.instances, settled_at_s)
        self._selector = InstanceSelector(*policies, randbelow, self.instances.index)
        self._budget = RetryBudget(config.retry_budget)
        self.resumable_streams = ResumableStreams(config.detach_ttl_s)
        self._tombstones = Tombstones()
        self.metrics = RouterMetrics(registry, self._count_streams, self._count_instances, self._count_records)
        self._live: dict[str, StreamRoutingState] = {}
        self._client_request_ids: dict[tuple[str, str], str] = {}
        """Request ids by caller and label, so that a label of one caller never names another caller's request."""
        self._registrations: dict[str, Registration] = {}
        self._num_waiting = 0
        """New requests for which there is no instance."""
        self._resumes = ResumeLog(self.metrics)
        self._retry_policy = RetryPolicy(config, self.instances, self._budget, self.metrics, self._resumes)
        self._now_s = 0.0

    # Streams begin.

    def open_stream(self, client_request: ClientRequest, now_s: float, *, epoch: int = 0) -> StreamRoutingState:
        """Opens a stream for a client's request. `epoch` is the highest one that was used for it. Raises `Conflict` if its
        id or label is in use."""
        if client_request.request_id in self._live:
            raise Conflict(f"Last-Event-ID: the stream {client_request.request_id} is already running")
        if (
            client_request.client_request_id
            and (client_request.caller, client_request.client_request_id) in self._client_request_ids
        ):
            raise Conflict(
                f"X-Request-Id: {client_request.client_request_id!r} is the label of a request that is still running",
                code="label_in_use",
            )
        return self._add(ClientStream(client_request, self.config.preempt_retry_count, epoch=epoch), now_s)

    def resume_stream(self, known_stream: ClientStream, cursor: Cursor, now_s: float) -> StreamRoutingState | None:
        """Opens a stream again at the cursor of a client that has come back. Returns None if the known tokens do not
        reach the cursor. Raises `NotFound` if the stream was aborted."""
        self.check_not_aborted(cursor.request_id, now_s)
        stream = resume_at_cursor(known_stream, cursor, self.config.preempt_retry_count, self._new_deadline(now_s))
        if stream is None:
            return None
        self.resumable_streams.drop(cursor.request_id)
        return self._add(stream, now_s)

    def check_not_aborted(self, request_id: str, now_s: float) -> None:
        if self._tombstones.has(request_id, now_s):
            raise NotFound(f"Last-Event-ID: the stream {request_id} was aborted", code=STREAM_UNKNOWN)

    def live_streams(self) -> list[StreamRoutingState]:
        return list(self._live.values())

    def find_live(self, request_id: str) -> StreamRoutingState | None:
        return self._live.get(request_id)

    def _new_deadline(self, now_s: float) -> float | None:
        timeout_s = self.config.request_timeout_s
        return None if timeout_s is None else now_s + timeout_s

    def _add(self, stream: ClientStream, now_s: float) -> StreamRoutingState:
        assert stream.request_id not in self._live, "ids are unique among live streams"
        is_continued = stream.has_progress or bool(stream.request.skip_to)
        routing = StreamRoutingState(stream, opened_at_s=now_s, last_write_at_s=now_s, is_continued=is_continued)
        self._live[stream.request_id] = routing
        if stream.request.client_request_id:
            self._client_request_ids[stream.request.caller, stream.request.client_request_id] = stream.request_id
        return routing

    # Next action.

    def next_action(self, routing: StreamRoutingState, now_s: float) -> StreamAction:
        self._now_s = now_s
        stream = routing.stream
        assert self._live.get(stream.request_id) is routing, "a stream acts while it is open"
        assert not stream.is_attempt_running, "the next action follows the end of an attempt"
        if stream.is_complete and stream.is_out_of_reach_of_aborts:
            return Finish()
        if routing.final_error is not None:
            return GiveUp(routing.final_error, routing.final_error_body)
        if stream.is_complete or stream.lacks_only_end_marker:
            return Finish()
        deadline_at_s = stream.request.deadline_at_s
        if deadline_at_s is not None and now_s >= deadline_at_s:
            return self._give_up(routing, to_error_info(DeadlineExceeded("the request's deadline has passed")))
        if routing.overloaded_since_s is not None and now_s >= routing.overloaded_since_s + MAX_INSTANCE_WAIT_S:
            assert stream.failure is not None, "an overloaded stream has the failure that said so"
            return self._give_up(routing, stream.failure.error)
        try:
            model = self.models.for_stream(stream, now_s)
            if model is None:
                return self._wait_for_instance(routing, now_s)
            self._set_model(stream, model, now_s)
        except OnwardError as fault:
            return self._give_up(routing, to_error_info(fault))
        pause_s = self._retry_policy.pause_s(routing, now_s)
        if pause_s > 0:
            return Wait(pause_s)
        if routing.budget_refused_error is not None and not self._retry_policy.try_spend_budget(routing, now_s):
            return self._wait_for_budget(routing, routing.budget_refused_error, now_s)
        decision = self._selector.select(
            self._routing_criteria(routing, now_s), self.instances.list_instances(now_s), now_s
        )
        return self._wait_for_instance(routing, now_s) if decision is None else self._dispatch(routing, decision, now_s)

    def _set_model(self, stream: ClientStream, model: str, now_s: float) -> None:
        if stream.model == model:
            return
        assert not (stream.is_model_fixed and stream.model), "a stream whose client has tokens stays with its model"
        is_new = not stream.model and not stream.is_model_fixed
        stream.set_model(model)
        if is_new:
            self._budget.record_request(stream.budget_key, now_s)

    def _routing_criteria(self, routing: StreamRoutingState, now_s: float) -> RoutingCriteria:
        stream, client_request = routing.stream, routing.stream.request
        num_prompt = stream.num_prompt_tokens
        if num_prompt is None and client_request.routing_token_ids is not None:
            num_prompt = self._prompt_length_if_servable(stream, client_request.routing_token_ids, now_s)
        return RoutingCriteria(
            num_prompt_tokens=num_prompt,
            max_output=client_request.max_output,
            session=client_request.session_key,
            prompt_hashes=self._prompt_block_hashes(stream),
            avoided_instances=frozenset(routing.avoided_instances),
            excluded_instances=routing.excluded_instances(now_s),
            fingerprint=stream.fingerprint,
            preferred_url=routing.successor_url,
            model=stream.model or None,
        )

    def _prompt_length_if_servable(self, stream: ClientStream, prompt: list[int], now_s: float) -> int | None:
        """Returns the prompt's length, or None if no serving instance can hold the request. Without a length, any
        instance can be selected, and it refuses the request; with one, the request would wait for a larger instance."""
        criteria = RoutingCriteria(num_prompt_tokens=len(prompt), max_output=stream.request.max_output)
        instances = self.serving_instances(now_s, stream.model or None)
        return len(prompt) if any(fits_context(instance, criteria) for instance in instances) else None

    def _prompt_block_hashes(self, stream: ClientStream) -> list[BlockHash]:
        """Returns the hashes of the prompt's full blocks, if the prefix index or an instance needs them."""
        client_request = stream.request
        if self.instances.index is None or not client_request.routing_token_ids:
            return []
        block_size = next(
            (
                registration.block_size
                for registration in self._registrations.values()
                if registration.block_size and registration.model == stream.model
            ),
            0,
        )
        return (
            block_hashes(client_request.routing_token_ids, block_size, client_request.cache_salt) if block_size else []
        )

    def _wait_for_instance(self, routing: StreamRoutingState, now_s: float) -> StreamAction:
        stream, failure = routing.stream, routing.stream.failure
        if failure is not None and failure.cause is FailureCause.REJECTED:
            return self._give_up(routing, failure.error)
        if failure is not None and failure.cause is FailureCause.OVERLOADED and not stream.was_accepted:
            earliest = routing.earliest_overload or failure
            return self._give_up(routing, earliest.error, earliest.body)
        if routing.waiting_since_s is None:
            if not stream.was_accepted and self._num_waiting >= self.config.max_queue:
                self.metrics.overloads.inc()
                message = f"{self.config.max_queue} requests wait for an instance already; try again later"
                return self._give_up(routing, to_error_info(Overloaded(message, retry_after_s=RETRY_SOON_S)))
            self._start_waiting(routing, now_s)
        assert routing.waiting_since_s is not None, "a waiting stream has the time when its wait began"
        left_s = routing.waiting_since_s + MAX_INSTANCE_WAIT_S - now_s
        if left_s <= 0:
            name = stream.model or stream.request.model
            of_model = f" of {short_repr(name)}" if name else ""
            message = f"no instance{of_model} could take the request for {MAX_INSTANCE_WAIT_S:g} s"
            return self._give_up(routing, to_error_info(Unavailable(message, retry_after_s=5.0)))
        soonest_s = min((until_s - now_s for until_s in routing.resting_until_s.values()), default=WAIT_STEP_S)
        deadline_at_s = stream.request.deadline_at_s
        until_deadline_s = WAIT_STEP_S if deadline_at_s is None else deadline_at_s - now_s
        return Wait(max(0.001, min(left_s, soonest_s, until_deadline_s, WAIT_STEP_S)))

    def _wait_for_budget(self, routing: StreamRoutingState, info: ErrorInfo, now_s: float) -> StreamAction:
        if now_s >= routing.budget_deadline_at_s:
            return self._give_up(routing, info)
        return Wait(min(BUDGET_STEP_S, routing.budget_deadline_at_s - now_s))

    def _give_up(self, routing: StreamRoutingState, info: ErrorInfo, body: bytes | None = None) -> GiveUp:
        routing.set_final_error(info, body)
        assert routing.final_error is not None, "a stream that is given up has a final error"
        return GiveUp(routing.final_error, routing.final_error_body)

    def _dispatch(self, routing: StreamRoutingState, decision: RoutingDecision, now_s: float) -> Dispatch:
        instance, stream = decision.instance, routing.stream
        assert self.instances.get(instance.instance_id) is not None, "an attempt goes to a registered instance"
        assert instance.instance_id not in routing.refused_by, "an instance that refused a stream is not chosen again"
        assert routing.reservation is None, "the reservation of the last attempt is released"
        assert not routing.prefill_reservations, "the prefill reservations of the last attempt are released"
        has_ids = stream.request.prompt_token_ids is not None
        if has_ids and not stream.has_progress and instance.tokenizer_hash != stream.request.tokenizer_hash:
            # It has come since the ids were made, with another tokenizer. What has begun with them goes on with them.
            stream.request = replace(stream.request, prompt_token_ids=None)
        routing.reservation = self.instances.reserve(instance.instance_id)
        routing.prefill_reservations = [self.instances.reserve(peer.instance_id) for peer in decision.prefill_peers[:1]]
        routing.stream.begin_attempt(instance.instance_id, now_s)
        peers = [peer.handoff_address for peer in decision.prefill_peers]
        return Dispatch(instance.instance_id, instance.url, routing.stream.build_attempt(now_s, peers))

    # An attempt's life.

    def on_accepted(self, routing: StreamRoutingState, now_s: float) -> None:
        if not routing.stream.was_accepted:
            self.metrics.queue_wait.observe(now_s - routing.opened_at_s)
        self._stop_waiting(routing)
        routing.stream.on_accepted(now_s)

    def on_first_tokens(self, routing: StreamRoutingState, now_s: float) -> None:
        """Handles the first event of an attempt: the instance works, and a resume has succeeded."""
        stream = routing.stream
        assert stream.instance_id is not None, "tokens come from an instance"
        self.instances.record_success(stream.instance_id, now_s)
        if routing.first_token_at_s is None:
            routing.first_token_at_s = now_s
            if not routing.is_continued:
                self.metrics.time_to_first_token.observe(now_s - stream.request.arrived_at_s)
                self.metrics.model_requests.inc(stream.model, stream.request.model or stream.model)
        routing.overloaded_since_s = None
        for reservation in routing.prefill_reservations:
            reservation.release()
        instance = self.instances.get(stream.instance_id)
        fingerprint = instance.fingerprint if instance is not None else stream.fingerprint
        if routing.pending_resume is not None:
            is_exact = stream.fingerprint in (None, fingerprint)
            self._resumes.end(routing, "exact" if is_exact else "inexact", now_s)
        stream.fingerprint = fingerprint

    def on_attempt_ended(self, routing: StreamRoutingState, now_s: float) -> None:
        """Handles the end of an attempt whose connection is closed or released. Releases its reservations, counts its
        outcome, and applies a failure to the instance and to the stream's next attempt."""
        stream = routing.stream
        assert stream.instance_id is not None, "an attempt runs at an instance"
        routing.release_reservations()
        if stream.failure is not None:
            stream.failure = self._as_drain_if_draining(stream.failure, stream.instance_id)
        failure = stream.end_attempt()
        outcome = "done" if stream.is_complete else "cancelled"
        self.metrics.attempts.inc(outcome if failure is None else failure.cause.value)
        if failure is not None and routing.final_error is None:
            self._retry_policy.on_attempt_failed(routing, failure, stream.instance_id, now_s)

    def _as_drain_if_draining(self, failure: AttemptFailure, instance_id: str) -> AttemptFailure:
        """Treats a failure at a draining instance as part of the drain."""
        instance = self.instances.get(instance_id)
        is_draining = instance is not None and instance.state is InstanceState.DRAINING
        if not (
            is_draining
            and failure.error.retryable
            and failure.cause in (FailureCause.LOST, FailureCause.STALL, FailureCause.ERROR)
        ):
            return failure
        return replace(failure, cause=FailureCause.DRAIN)

    def _start_waiting(self, routing: StreamRoutingState, now_s: float) -> None:
        routing.waiting_since_s = now_s
        self._num_waiting += not routing.stream.was_accepted

    def _stop_waiting(self, routing: StreamRoutingState) -> None:
        if routing.waiting_since_s is not None:
            routing.waiting_since_s = None
            self._num_waiting -= not routing.stream.was_accepted
            assert self._num_waiting >= 0, "the number of waiting requests is never negative"

    # Streams end.

    def close_stream(self, routing: StreamRoutingState, now_s: float, *, keep: bool) -> None:
        """Removes a stream from the live streams, after its client has received the end or has left. With `keep`, a
        resumable stream is kept for a client that may come back."""
        stream = routing.stream
        assert self._live.get(stream.request_id) is routing, "a stream is closed once"
        del self._live[stream.request_id]
        label = stream.request.caller, stream.request.client_request_id
        if self._client_request_ids.get(label) == stream.request_id:
            del self._client_request_ids[label]
        self._stop_waiting(routing)
        routing.release_reservations()
        if stream.is_attempt_running:
            stream.end_attempt()
        if routing.pending_resume is not None:
            ok = stream.is_complete or stream.lacks_only_end_marker
            self._resumes.end(routing, "exact" if ok else "failed", now_s)
        self.metrics.stale_events.inc(by=stream.num_stale_events)
        if keep and _is_resumable(routing):
            self.resumable_streams.keep(stream, now_s)

    def abort(self, names: Iterable[str] | None, now_s: float, caller: str | None = None) -> AbortResult:
        """Ends streams with one of these ids or labels (None: all streams), attached or detached. With `caller`, only that
        caller's streams match. An attempt that only has the whole answer left to send is not ended, and is not retried."""
        wanted = None if names is None else frozenset(names)
        routings = [routing for routing in self._live.values() if matches(routing.stream, wanted, caller)]
        for routing in routings:
            routing.set_final_error(ABORTED)
        resumable = self.resumable_streams.drop_matching(wanted, caller)
        client_requests = [stream.request for stream in (*(routing.stream for routing in routings), *resumable)]
        for client_request in client_requests:
            self._tombstones.add(client_request.request_id, now_s)
        ids = [client_request.request_id for client_request in client_requests]
        labels = [client_request.client_request_id for client_request in client_requests]
        affected = [routing for routing in routings if not routing.stream.is_out_of_reach_of_aborts]
        return AbortResult(affected, resumable, ids, {*ids} if wanted is None else wanted.intersection((*ids, *labels)))

    # Instances.

    def register(self, registration: Registration, now_s: float) -> RegistrationReply:
        reply = self.instances.register(registration, now_s)
        self._store_registration(registration)
        return reply

    def on_probe_result(self, url: str, registration: Registration | None, now_s: float) -> str | None:
        error = self.instances.on_probe_result(url, registration, now_s)
        if registration is not None:
            self._store_registration(registration)
        return error

    def _store_registration(self, registration: Registration) -> None:
        if self.instances.get(registration.instance) is not None:
            self._registrations[registration.instance] = registration

    def tick(self, now_s: float) -> list[StreamRoutingState]:
        """Returns the streams whose attempt must end now; each has its reason."""
        self._now_s = now_s
        for instance_id in self.instances.tick(now_s):
            self._registrations.pop(instance_id, None)
        self.resumable_streams.expire(now_s)
        instances = {instance.instance_id: instance for instance in self.instances.list_instances(now_s)}
        affected: list[StreamRoutingState] = []
        for routing in self._live.values():
            stream = routing.stream
            if (
                stream.is_attempt_running
                and not stream.is_sending
                and not stream.is_complete
                and stream.failure is None
            ):
                self._check_attempt(routing, instances, now_s)
                if stream.failure is not None or stream.is_complete:
                    affected.append(routing)
        return affected

    def streams_with_stalled_client(self, now_s: float) -> list[StreamRoutingState]:
        """Returns the streams whose client has stopped reading. Their clients may resume them later."""
        streams = [routing for routing in self._live.values() if routing.stream.is_sending]
        return [routing for routing in streams if now_s - routing.stream.last_progress_at_s >= CLIENT_STALL_TIMEOUT_S]

    def _check_attempt(self, routing: StreamRoutingState, instances: dict[str, InstanceInfo], now_s: float) -> None:
        stream = routing.stream
        deadline_at_s, stalled_s = stream.request.deadline_at_s, now_s - stream.last_progress_at_s
        instance = instances.get(stream.instance_id or "")
        if deadline_at_s is not None and now_s > deadline_at_s + DEADLINE_MARGIN_S:
            stream.fail(FailureCause.DEADLINE, to_error_info(DeadlineExceeded("the request's deadline has passed")))
        elif stalled_s >= self.config.stall_timeout_s and not stream.reports_restart:
            stream.fail_lost(FailureCause.STALL, f"nothing moved for {stalled_s:.1f} s")
        elif instance is None and stalled_s >= GONE_INSTANCE_GRACE_S:
            stream.fail_lost(FailureCause.GONE, "the instance is gone")
        elif instance is not None and instance.state is InstanceState.DRAINING:
            self._migrate_from_draining(routing, instances, now_s)
        elif stream.reports_restart and self._restarts_too_long(routing, instances, stalled_s, now_s):
            stream.fail_lost(FailureCause.RESTART, f"the instance restarts a process for {stalled_s:.1f} s now")

    def _migrate_from_draining(
        self, routing: StreamRoutingState, instances: dict[str, InstanceInfo], now_s: float
    ) -> None:
        """Ends an attempt at a draining instance if another ready instance can take the stream. If there is none, the
        draining instance finishes its streams in place."""
        if self._has_alternative(routing, instances, now_s):
            routing.stream.fail_lost(FailureCause.DRAIN, "the instance is being drained")

    def _restarts_too_long(
        self, routing: StreamRoutingState, instances: dict[str, InstanceInfo], stalled_s: float, now_s: float
    ) -> bool:
        if stalled_s < self.config.restart_grace_s:
            return False
        return stalled_s >= MAX_INSTANCE_WAIT_S or self._has_alternative(routing, instances, now_s)

    def _has_alternative(self, routing: StreamRoutingState, instances: dict[str, InstanceInfo], now_s: float) -> bool:
        criteria = self._routing_criteria(routing, now_s)
        others = [instance for name, instance in instances.items() if name != routing.stream.instance_id]
        return any(
            instance.state is InstanceState.READY and can_take_request(instance, criteria) for instance in others
        )

    # Status for other components.

    def status(self, now_s: float) -> dict[str, Any]:
        instances = describe_instances(self.instances.list_instances(now_s), self._registrations, self._live.values())
        waiting = [routing.stream for routing in self._live.values() if routing.waiting_since_s is not None]
        return {
            "instances": instances,
            "resumes": self._resumes.recent(now_s),
            "waiting": Counter(stream.model or stream.request.model for stream in waiting),
        }

    def can_serve(self, now_s: float) -> bool:
        return any(can_take_request(instance, RoutingCriteria()) for instance in self.instances.list_instances(now_s))

    def serving_instances(self, now_s: float, model: str | None = None) -> list[InstanceInfo]:
        """Returns the instances that may know of a stream; with `model`, only those of this model. An alias is no model:
        `ModelSelector` chooses the model that it stands for."""
        return [
            instance
            for instance in self.instances.list_instances(now_s)
            if instance.role != "prefill"
            and instance.state is not InstanceState.STARTING
            and model in (None, instance.model)
        ]

    def _count_streams(self) -> dict[LabelValues, float]:
        running = sum(routing.stream.is_attempt_running for routing in self._live.values())
        return {("running",): running, ("waiting",): len(self._live) - running}

    def _count_instances(self) -> dict[LabelValues, float]:
        counts: dict[LabelValues, float] = {}
        for instance in self.instances.list_instances(self._now_s):
            key = (instance.role, instance.state.value, instance.model)
            counts[key] = counts.get(key, 0.0) + 1
        return counts

    def _count_records(self) -> dict[LabelValues, float]:
        return {(): float(len(self.resumable_streams))}


def _is_resumable(routing: StreamRoutingState) -> bool:
    """Returns whether a client may resume the stream once no attempt runs."""
    stream = routing.stream
    if routing.is_deleted:
        return False
    if routing.final_error is not None and routing.final_error.code == ABORTED.code:
        return False  # here, or at another router
    if stream.was_aborted:
        return False  # at an instance
    return stream.was_accepted if routing.is_background else stream.request.is_streaming and stream.has_progress


def unknown_stream(request_id: str) -> NotFound:
    return NotFound(
        f"Last-Event-ID: no instance has the stream {request_id} any more; send the request again", code=STREAM_UNKNOWN
    )


def instance_unreachable(param: str) -> Unavailable:
    """Clients believe a 404, and do not ask again."""
    return Unavailable(f"{param}: an instance that may have it does not answer; ask again", retry_after_s=RETRY_SOON_S)
