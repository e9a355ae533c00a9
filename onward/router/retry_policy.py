"""Decides what a failed attempt means for the instance, and whether, when and where the stream is tried again.

This is the only place that decides on retries. They have four bounds: the stream's own count since its last token, the
caller's budget for attempts that are not owed (see `retry_budget`), the client's deadline, and the time that a stream
may wait for an instance.
"""

import math

from onward.config import RouterConfig
from onward.proto.engine import ErrorInfo
from onward.proto.step import REQUEST_FAULTS
from onward.router.client_stream import AttemptFailure, FailureCause
from onward.router.instance_registry import InstanceRegistry, InstanceState
from onward.router.resume_log import ResumeLog
from onward.router.retry_budget import RetryBudget
from onward.router.router_metrics import RouterMetrics
from onward.router.stream_routing_state import StreamRoutingState

MAX_WAIT_STEP_S = 1.0
REFUSED_PAUSE_S = 0.5
RETRY_PAUSE_S = 0.1
"""After the second attempt that brought nothing; doubled with each."""
MAX_RETRY_PAUSE_S = 2.0
MAX_INSTANCE_REST_S = 10.0
BUDGET_STEP_S = 0.5
MAX_BUDGET_WAIT_S = 10.0
"""For the retry budget to have something left, before a stream is given up."""
MAX_HOLD_BACK_S = 2.0
"""How long a new request lets resumes go first."""
LOSS_CAUSES = frozenset({FailureCause.LOST, FailureCause.STALL, FailureCause.RESTART, FailureCause.GONE})
"""The instance has not answered with an error: it is dead, or as good as that."""


class RetryPolicy:
    def __init__(
        self,
        config: RouterConfig,
        instances: InstanceRegistry,
        budget: RetryBudget,
        metrics: RouterMetrics,
        resumes: ResumeLog,
    ) -> None:
        self._config = config
        self._instances = instances
        self._budget = budget
        self._metrics = metrics
        self._resumes = resumes
        self._paced_until_s: dict[str, float] = {}
        """By model: resumes of one hold back no new requests for another."""

    def on_attempt_failed(
        self, routing: StreamRoutingState, failure: AttemptFailure, instance: str, now_s: float
    ) -> None:
        """Applies a failure to the instance's state and to the stream's next attempt."""
        stream, info = routing.stream, failure.error
        assert not stream.is_attempt_running, "a failure is judged after its attempt has ended"
        assert routing.final_error is None, "a stream with a final error is not tried again"
        self._penalize_instance(routing, failure, instance, now_s)
        match failure.cause:
            case FailureCause.REFUSED | FailureCause.UNREACHABLE:
                return  # no work was done
            case FailureCause.OVERLOADED:
                routing.overloaded_since_s = (
                    routing.overloaded_since_s if routing.overloaded_since_s is not None else now_s
                )
                routing.earliest_overload = with_earlier_retry_after(routing.earliest_overload, failure)
                return  # nor here
            case FailureCause.REJECTED:
                if not stream.was_accepted:
                    routing.set_final_error(info, failure.body)
                return
            case FailureCause.DEADLINE:
                routing.set_final_error(info, failure.body)
                return
            case FailureCause.DRAIN | FailureCause.REPLACED:
                self._resumes.begin(routing, failure.cause, instance, now_s)
                self._pace(routing, now_s)
                return
        if not info.retryable:
            routing.set_final_error(info, failure.body)
            return
        self._resumes.begin(routing, failure.cause, instance, now_s)
        self._schedule_retry(routing, failure, now_s)

    def pause_s(self, routing: StreamRoutingState, now_s: float) -> float:
        """Returns how long the stream's next attempt must still wait; 0 if it may begin now. It waits for its retry
        pause, for a restarting instance or a successor, and, if it is new, for the retries of other streams."""
        if now_s < routing.next_attempt_at_s:
            return routing.next_attempt_at_s - now_s
        if routing.successor_url is not None:
            if now_s < routing.grace_until_s and not self._has_successor(routing):
                return min(MAX_WAIT_STEP_S, routing.grace_until_s - now_s)
        elif routing.grace_instance_id is not None:
            current = self._instances.get(routing.grace_instance_id)
            if current is not None and current.state is InstanceState.RESTARTING and now_s < routing.grace_until_s:
                return min(MAX_WAIT_STEP_S, routing.grace_until_s - now_s)
            routing.grace_instance_id = None
        is_new = not routing.stream.was_accepted and not routing.stream.has_progress
        paced_until_s = self._paced_until_s.get(routing.stream.model, 0.0)
        if is_new and now_s < min(paced_until_s, routing.opened_at_s + MAX_HOLD_BACK_S):
            return min(MAX_WAIT_STEP_S, paced_until_s - now_s)
        return 0.0

    def _penalize_instance(
        self, routing: StreamRoutingState, failure: AttemptFailure, instance: str, now_s: float
    ) -> None:
        rest_s = min(MAX_INSTANCE_REST_S, failure.error.retry_after_s or 0.0)
        routing.successor_url = None
        match failure.cause:
            case FailureCause.REFUSED:
                self._instances.record_failure(instance, now_s)
                routing.resting_until_s[instance] = now_s + max(rest_s, REFUSED_PAUSE_S)
            case FailureCause.UNREACHABLE:
                self._instances.record_unreachable(instance, now_s)
                routing.resting_until_s[instance] = now_s + REFUSED_PAUSE_S
            case FailureCause.DRAIN:
                # Its state excludes the instance from now on; it may be undrained later.
                routing.resting_until_s[instance] = now_s + max(rest_s, MAX_WAIT_STEP_S)
            case FailureCause.REPLACED:
                self._await_successor(routing, instance, now_s)
            case FailureCause.OVERLOADED if routing.stream.was_accepted:
                routing.resting_until_s[instance] = now_s + (rest_s or MAX_WAIT_STEP_S)
            case FailureCause.OVERLOADED | FailureCause.REJECTED:
                routing.refused_by.add(instance)
            case FailureCause.LOST | FailureCause.STALL | FailureCause.PROTOCOL | FailureCause.GONE:
                self._instances.record_failure(instance, now_s)
                self._grant_grace(routing, instance, now_s)
            case FailureCause.ERROR:
                if not (failure.error.code.startswith("pd_") or failure.error.code in REQUEST_FAULTS):
                    self._instances.record_failure(instance, now_s)
                if rest_s:
                    routing.resting_until_s[instance] = now_s + rest_s
        if self._config.preempt_retry_exclude_decode:
            routing.avoided_instances = {instance}

    def _await_successor(self, routing: StreamRoutingState, instance: str, now_s: float) -> None:
        """Makes the stream wait for the successor of a replaced instance, even if other instances are ready. The
        successor has adopted the instance's cached blocks."""
        current = self._instances.get(instance)
        if current is not None:
            routing.successor_url, routing.grace_instance_id = current.url, instance
            routing.grace_until_s = now_s + self._config.restart_grace_s

    def _has_successor(self, routing: StreamRoutingState) -> bool:
        found = self._instances.find_by_url(routing.successor_url or "")
        return (
            found is not None and found.instance_id != routing.grace_instance_id and found.state is InstanceState.READY
        )

    def _grant_grace(self, routing: StreamRoutingState, instance: str, now_s: float) -> None:
        current = self._instances.get(instance)
        if current is not None and current.state is InstanceState.RESTARTING:
            routing.grace_instance_id, routing.grace_until_s = instance, now_s + self._config.restart_grace_s

    def _schedule_retry(self, routing: StreamRoutingState, failure: AttemptFailure, now_s: float) -> None:
        """Schedules one more attempt, if the stream's count and its caller's budget allow one."""
        stream, info = routing.stream, failure.error
        assert stream.num_failures > 0, "a failure that leads to a retry is counted"
        if stream.is_last_attempt or stream.num_failures > self._config.preempt_retry_count:
            routing.set_final_error(info, failure.body)
        elif stream.attempt_advanced or (stream.num_failures == 1 and failure.cause in LOSS_CAUSES):
            self._pace(routing, now_s)
        elif self._budget.try_spend(stream.budget_key, now_s):
            routing.next_attempt_at_s = now_s + retry_pause_s(stream.num_failures)
        else:
            self._metrics.budget_refusals.inc()
            self._on_budget_refused(routing, info, now_s)

    def _pace(self, routing: StreamRoutingState, now_s: float) -> None:
        """Schedules the stream's next attempt so that many simultaneous retries are spread out. New requests for the
        model wait until these retries have begun."""
        routing.next_attempt_at_s = now_s + self._budget.pacing_delay_s(now_s)
        if routing.next_attempt_at_s > now_s:
            paced = {model: until_s for model, until_s in self._paced_until_s.items() if until_s > now_s}
            model = routing.stream.model
            self._paced_until_s = paced | {model: max(paced.get(model, 0.0), routing.next_attempt_at_s)}

    def _on_budget_refused(self, routing: StreamRoutingState, info: ErrorInfo, now_s: float) -> None:
        """Handles a retry that the budget refuses. A stream with tokens that was given up for lack of blocks gets one
        last attempt, which returns the tokens in the client's own form. Other streams wait for budget for a while: when
        an instance dies, many streams need one attempt each at once."""
        if info.code.startswith("pd_") and routing.stream.has_progress:
            routing.stream.is_last_attempt = True
        else:
            routing.budget_refused_error, routing.budget_deadline_at_s = info, now_s + MAX_BUDGET_WAIT_S

    def try_spend_budget(self, routing: StreamRoutingState, now_s: float) -> bool:
        """Asks the budget again."""
        assert routing.budget_refused_error is not None, "the budget has refused the stream before"
        if not self._budget.try_spend(routing.stream.budget_key, now_s):
            return False
        routing.budget_refused_error = None
        return True


def with_earlier_retry_after(first: AttemptFailure | None, second: AttemptFailure) -> AttemptFailure:
    """Returns the failure with the earlier Retry-After of two overloaded instances. A failure without one counts as the
    latest."""
    if first is None:
        return second
    return min(
        first,
        second,
        key=lambda candidate: math.inf if candidate.error.retry_after_s is None else candidate.error.retry_after_s,
    )


def retry_pause_s(failures: int) -> float:
    return min(MAX_RETRY_PAUSE_S, RETRY_PAUSE_S * 2 ** (failures - 2)) if failures > 1 else 0.0
