"""What a failed attempt means: for the instance, and for whether, when and where the stream is tried again.

One owner of retries, with four bounds: the stream's own count since its last token, the cluster's budget for attempts
that are not owed (see `budget`), the client's deadline, and the time that a stream waits for anything at all.
"""

import math

from onward.config import RouterConfig
from onward.proto.engine import ErrorInfo
from onward.router.client_stream import AttemptFailure, FailureCause
from onward.router.instance_registry import InstanceRegistry, InstanceState
from onward.router.resume_log import ResumeLog
from onward.router.retry_budget import RetryBudget
from onward.router.routed_stream import RoutedStream
from onward.router.router_metrics import RouterMetrics

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
"""New requests let resumes go first, for so long."""
LOSS_CAUSES = frozenset({FailureCause.LOST, FailureCause.STALL, FailureCause.RESTART, FailureCause.GONE})
"""The instance has not answered with an error: it is dead, or as good as that."""


class RetryPolicy:
    def __init__(
        self,
        config: RouterConfig,
        replicas: InstanceRegistry,
        budget: RetryBudget,
        metrics: RouterMetrics,
        resumes: ResumeLog,
    ) -> None:
        self._config = config
        self._replicas = replicas
        self._budget = budget
        self._metrics = metrics
        self._resumes = resumes
        self._paced_until_s = 0.0

    def on_attempt_failed(self, route: RoutedStream, failed: AttemptFailure, instance: str, now_s: float) -> None:
        """What a failure means for the instance, and for the stream's next attempt."""
        stream, info = route.stream, failed.error
        self._penalize_instance(route, failed, instance, now_s)
        match failed.cause:
            case FailureCause.REFUSED | FailureCause.UNREACHABLE:
                return  # no work was done
            case FailureCause.OVERLOADED:
                route.overloaded_since_s = route.overloaded_since_s if route.overloaded_since_s is not None else now_s
                route.earliest_overload = with_earlier_retry_after(route.earliest_overload, failed)
                return  # nor here
            case FailureCause.REJECTED:
                if not stream.was_accepted:
                    route.set_final_error(info, failed.body)
                return
            case FailureCause.DEADLINE:
                route.set_final_error(info, failed.body)
                return
            case FailureCause.DRAIN:
                self._resumes.begin(route, failed.cause, instance, now_s)
                self._pace(route, now_s)
                return
        if not info.retryable:
            route.set_final_error(info, failed.body)
            return
        self._resumes.begin(route, failed.cause, instance, now_s)
        self._schedule_retry(route, failed, now_s)

    def pause_s(self, route: RoutedStream, now_s: float) -> float:
        """How long the next attempt has to wait yet."""
        if now_s < route.next_attempt_at_s:
            return route.next_attempt_at_s - now_s
        if route.grace_instance_id is not None:
            replica = self._replicas.get(route.grace_instance_id)
            if replica is not None and replica.state is InstanceState.RESTARTING and now_s < route.grace_until_s:
                return min(MAX_WAIT_STEP_S, route.grace_until_s - now_s)
            route.grace_instance_id = None
        is_new = not route.stream.was_accepted and not route.stream.has_progress
        if is_new and now_s < min(self._paced_until_s, route.opened_at_s + MAX_HOLD_BACK_S):
            return min(MAX_WAIT_STEP_S, self._paced_until_s - now_s)
        return 0.0

    def _penalize_instance(self, route: RoutedStream, failed: AttemptFailure, instance: str, now_s: float) -> None:
        rest_s = min(MAX_INSTANCE_REST_S, failed.error.retry_after_s or 0.0)
        match failed.cause:
            case FailureCause.REFUSED:
                self._replicas.record_failure(instance, now_s)
                route.resting_until_s[instance] = now_s + max(rest_s, REFUSED_PAUSE_S)
            case FailureCause.UNREACHABLE:
                self._replicas.record_unreachable(instance, now_s)
                route.resting_until_s[instance] = now_s + REFUSED_PAUSE_S
            case FailureCause.DRAIN:
                # Its state keeps it out from now on; it may be taken back into service.
                route.resting_until_s[instance] = now_s + max(rest_s, MAX_WAIT_STEP_S)
            case FailureCause.OVERLOADED if route.stream.was_accepted:
                route.resting_until_s[instance] = now_s + (rest_s or MAX_WAIT_STEP_S)
            case FailureCause.OVERLOADED | FailureCause.REJECTED:
                route.refused_by.add(instance)
            case FailureCause.LOST | FailureCause.STALL | FailureCause.PROTOCOL | FailureCause.GONE:
                self._replicas.record_failure(instance, now_s)
                self._grant_grace(route, instance, now_s)
            case FailureCause.ERROR:
                if not failed.error.code.startswith("pd_"):
                    self._replicas.record_failure(instance, now_s)
                if rest_s:
                    route.resting_until_s[instance] = now_s + rest_s
        if self._config.preempt_retry_exclude_decode:
            route.avoided_instances = {instance}

    def _grant_grace(self, route: RoutedStream, instance: str, now_s: float) -> None:
        replica = self._replicas.get(instance)
        if replica is not None and replica.state is InstanceState.RESTARTING:
            route.grace_instance_id, route.grace_until_s = instance, now_s + self._config.restart_grace_s

    def _schedule_retry(self, route: RoutedStream, failed: AttemptFailure, now_s: float) -> None:
        """One attempt more, if the stream's own count and the cluster's budget have one left."""
        stream, info = route.stream, failed.error
        if stream.is_last_attempt or stream.num_failures > self._config.preempt_retry_count:
            route.set_final_error(info, failed.body)
        elif stream.attempt_advanced or (stream.num_failures == 1 and failed.cause in LOSS_CAUSES):
            self._pace(route, now_s)
        elif self._budget.try_spend(now_s):
            route.next_attempt_at_s = now_s + retry_pause_s(stream.num_failures)
        else:
            self._metrics.budget_refusals.inc()
            self._on_budget_refused(route, info, now_s)

    def _pace(self, route: RoutedStream, now_s: float) -> None:
        """Many at once are spread out; new requests wait until they are through."""
        route.next_attempt_at_s = now_s + self._budget.pacing_delay_s(now_s)
        if route.next_attempt_at_s > now_s:
            self._paced_until_s = max(self._paced_until_s, route.next_attempt_at_s)

    def _on_budget_refused(self, route: RoutedStream, info: ErrorInfo, now_s: float) -> None:
        """A request that was given up for want of blocks has something to show: one last attempt brings it in the
        client's own form. Others wait a while: when an instance dies, many streams need one attempt each at once."""
        if info.code.startswith("pd_") and route.stream.has_progress:
            route.stream.is_last_attempt = True
        else:
            route.budget_refused_error, route.budget_deadline_at_s = info, now_s + MAX_BUDGET_WAIT_S

    def try_spend_budget(self, route: RoutedStream, now_s: float) -> bool:
        """Asks the budget again."""
        if not self._budget.try_spend(now_s):
            return False
        route.budget_refused_error = None
        return True


def with_earlier_retry_after(one: AttemptFailure | None, other: AttemptFailure) -> AttemptFailure:
    """Of two instances that are full, the one that says to come back earlier; one that says nothing counts as last."""
    if one is None:
        return other
    return min(one, other, key=lambda full: math.inf if full.error.retry_after_s is None else full.error.retry_after_s)


def retry_pause_s(failures: int) -> float:
    return min(MAX_RETRY_PAUSE_S, RETRY_PAUSE_S * 2 ** (failures - 2)) if failures > 1 else 0.0
