"""What a failed attempt means: for the instance, and for whether, when and where the stream is tried again.

One owner of retries, with four bounds: the stream's own count since its last token, the caller's budget for attempts
that are not owed (see `retry_budget`), the client's deadline, and the time that a stream waits for anything at all.
"""

import math

from onward.config import RouterConfig
from onward.proto.engine import ErrorInfo
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
"""New requests let resumes go first, for so long."""
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
        self._paced_until_s = 0.0

    def on_attempt_failed(
        self, routed: StreamRoutingState, failure: AttemptFailure, instance: str, now_s: float
    ) -> None:
        """What a failure means for the instance, and for the stream's next attempt."""
        stream, info = routed.stream, failure.error
        assert not stream.is_attempt_running, "a failure is judged after its attempt has ended"
        assert routed.final_error is None, "a stream with a final error is not tried again"
        self._penalize_instance(routed, failure, instance, now_s)
        match failure.cause:
            case FailureCause.REFUSED | FailureCause.UNREACHABLE:
                return  # no work was done
            case FailureCause.OVERLOADED:
                routed.overloaded_since_s = (
                    routed.overloaded_since_s if routed.overloaded_since_s is not None else now_s
                )
                routed.earliest_overload = with_earlier_retry_after(routed.earliest_overload, failure)
                return  # nor here
            case FailureCause.REJECTED:
                if not stream.was_accepted:
                    routed.set_final_error(info, failure.body)
                return
            case FailureCause.DEADLINE:
                routed.set_final_error(info, failure.body)
                return
            case FailureCause.DRAIN:
                self._resumes.begin(routed, failure.cause, instance, now_s)
                self._pace(routed, now_s)
                return
        if not info.retryable:
            routed.set_final_error(info, failure.body)
            return
        self._resumes.begin(routed, failure.cause, instance, now_s)
        self._schedule_retry(routed, failure, now_s)

    def pause_s(self, routed: StreamRoutingState, now_s: float) -> float:
        """How long the next attempt has to wait yet."""
        if now_s < routed.next_attempt_at_s:
            return routed.next_attempt_at_s - now_s
        if routed.grace_instance_id is not None:
            current = self._instances.get(routed.grace_instance_id)
            if current is not None and current.state is InstanceState.RESTARTING and now_s < routed.grace_until_s:
                return min(MAX_WAIT_STEP_S, routed.grace_until_s - now_s)
            routed.grace_instance_id = None
        is_new = not routed.stream.was_accepted and not routed.stream.has_progress
        if is_new and now_s < min(self._paced_until_s, routed.opened_at_s + MAX_HOLD_BACK_S):
            return min(MAX_WAIT_STEP_S, self._paced_until_s - now_s)
        return 0.0

    def _penalize_instance(
        self, routed: StreamRoutingState, failure: AttemptFailure, instance: str, now_s: float
    ) -> None:
        rest_s = min(MAX_INSTANCE_REST_S, failure.error.retry_after_s or 0.0)
        match failure.cause:
            case FailureCause.REFUSED:
                self._instances.record_failure(instance, now_s)
                routed.resting_until_s[instance] = now_s + max(rest_s, REFUSED_PAUSE_S)
            case FailureCause.UNREACHABLE:
                self._instances.record_unreachable(instance, now_s)
                routed.resting_until_s[instance] = now_s + REFUSED_PAUSE_S
            case FailureCause.DRAIN:
                # Its state keeps it out from now on; it may be taken back into service.
                routed.resting_until_s[instance] = now_s + max(rest_s, MAX_WAIT_STEP_S)
            case FailureCause.OVERLOADED if routed.stream.was_accepted:
                routed.resting_until_s[instance] = now_s + (rest_s or MAX_WAIT_STEP_S)
            case FailureCause.OVERLOADED | FailureCause.REJECTED:
                routed.refused_by.add(instance)
            case FailureCause.LOST | FailureCause.STALL | FailureCause.PROTOCOL | FailureCause.GONE:
                self._instances.record_failure(instance, now_s)
                self._grant_grace(routed, instance, now_s)
            case FailureCause.ERROR:
                if not failure.error.code.startswith("pd_"):
                    self._instances.record_failure(instance, now_s)
                if rest_s:
                    routed.resting_until_s[instance] = now_s + rest_s
        if self._config.preempt_retry_exclude_decode:
            routed.avoided_instances = {instance}

    def _grant_grace(self, routed: StreamRoutingState, instance: str, now_s: float) -> None:
        current = self._instances.get(instance)
        if current is not None and current.state is InstanceState.RESTARTING:
            routed.grace_instance_id, routed.grace_until_s = instance, now_s + self._config.restart_grace_s

    def _schedule_retry(self, routed: StreamRoutingState, failure: AttemptFailure, now_s: float) -> None:
        """One attempt more, if the stream's own count and its caller's budget have one left."""
        stream, info = routed.stream, failure.error
        assert stream.num_failures > 0, "a failure that leads to a retry is counted"
        if stream.is_last_attempt or stream.num_failures > self._config.preempt_retry_count:
            routed.set_final_error(info, failure.body)
        elif stream.attempt_advanced or (stream.num_failures == 1 and failure.cause in LOSS_CAUSES):
            self._pace(routed, now_s)
        elif self._budget.try_spend(stream.request.caller, now_s):
            routed.next_attempt_at_s = now_s + retry_pause_s(stream.num_failures)
        else:
            self._metrics.budget_refusals.inc()
            self._on_budget_refused(routed, info, now_s)

    def _pace(self, routed: StreamRoutingState, now_s: float) -> None:
        """Many at once are spread out; new requests wait until they are through."""
        routed.next_attempt_at_s = now_s + self._budget.pacing_delay_s(now_s)
        if routed.next_attempt_at_s > now_s:
            self._paced_until_s = max(self._paced_until_s, routed.next_attempt_at_s)

    def _on_budget_refused(self, routed: StreamRoutingState, info: ErrorInfo, now_s: float) -> None:
        """A request that was given up for want of blocks has something to show: one last attempt brings it in the
        client's own form. Others wait a while: when an instance dies, many streams need one attempt each at once."""
        if info.code.startswith("pd_") and routed.stream.has_progress:
            routed.stream.is_last_attempt = True
        else:
            routed.budget_refused_error, routed.budget_deadline_at_s = info, now_s + MAX_BUDGET_WAIT_S

    def try_spend_budget(self, routed: StreamRoutingState, now_s: float) -> bool:
        """Asks the budget again."""
        assert routed.budget_refused_error is not None, "the budget has refused the stream before"
        if not self._budget.try_spend(routed.stream.request.caller, now_s):
            return False
        routed.budget_refused_error = None
        return True


def with_earlier_retry_after(first: AttemptFailure | None, second: AttemptFailure) -> AttemptFailure:
    """Of two instances that are full, the one that says to come back earlier; one that says nothing counts as last."""
    if first is None:
        return second
    return min(
        first,
        second,
        key=lambda candidate: math.inf if candidate.error.retry_after_s is None else candidate.error.retry_after_s,
    )


def retry_pause_s(failures: int) -> float:
    return min(MAX_RETRY_PAUSE_S, RETRY_PAUSE_S * 2 ** (failures - 2)) if failures > 1 else 0.0
