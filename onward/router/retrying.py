"""What a failed attempt means: for the instance, and for whether, when and where the stream is tried again.

One owner of retries, with four bounds: the stream's own count since its last token, the cluster's budget for attempts
that are not owed (see `budget`), the client's deadline, and the time that a stream waits for anything at all.
"""

import math

from onward.config import RouterConfig
from onward.proto.request import ErrorInfo
from onward.router.budget import RetryBudget
from onward.router.replicas import Replicas, State
from onward.router.resumes import Resumes
from onward.router.route import Route
from onward.router.router_metrics import RouterMetrics
from onward.router.stream import Cause, Failed

STEP_S = 1.0
REFUSED_PAUSE_S = 0.5
RETRY_PAUSE_S = 0.1
"""After the second attempt that brought nothing; doubled with each."""
MAX_RETRY_PAUSE_S = 2.0
MAX_REST_S = 10.0
BUDGET_STEP_S = 0.5
MAX_BUDGET_WAIT_S = 10.0
"""For the retry budget to have something left, before a stream is given up."""
MAX_HOLD_BACK_S = 2.0
"""New requests let resumes go first, for so long."""
LOSSES = frozenset({Cause.LOST, Cause.STALL, Cause.RESTART, Cause.GONE})
"""The instance has not answered with an error: it is dead, or as good as that."""


class Retrying:
    def __init__(
        self, config: RouterConfig, replicas: Replicas, budget: RetryBudget, metrics: RouterMetrics, resumes: Resumes
    ) -> None:
        self._config = config
        self._replicas = replicas
        self._budget = budget
        self._metrics = metrics
        self._resumes = resumes
        self._paced_until_s = 0.0

    def judge(self, route: Route, failed: Failed, instance: str, now_s: float) -> None:
        """What a failure means for the instance, and for the stream's next attempt."""
        stream, info = route.stream, failed.info
        self._note_instance(route, failed, instance, now_s)
        match failed.cause:
            case Cause.REFUSED | Cause.UNREACHABLE:
                return  # no work was done
            case Cause.OVERLOADED:
                route.crowded_since_s = route.crowded_since_s if route.crowded_since_s is not None else now_s
                route.soonest_room = sooner(route.soonest_room, failed)
                return  # nor here
            case Cause.REJECTED:
                if not stream.accepted_once:
                    route.settle(info, failed.body)
                return
            case Cause.DEADLINE:
                route.settle(info, failed.body)
                return
            case Cause.DRAIN:
                self._resumes.begin(route, failed.cause, instance, now_s)
                self._pace(route, now_s)
                return
        if not info.retryable:
            route.settle(info, failed.body)
            return
        self._resumes.begin(route, failed.cause, instance, now_s)
        self._spend(route, failed, now_s)

    def pause_s(self, route: Route, now_s: float) -> float:
        """How long the next attempt has to wait yet."""
        if now_s < route.not_before_s:
            return route.not_before_s - now_s
        if route.grace_instance is not None:
            replica = self._replicas.get(route.grace_instance)
            if replica is not None and replica.state is State.RESTARTING and now_s < route.grace_until_s:
                return min(STEP_S, route.grace_until_s - now_s)
            route.grace_instance = None
        is_new = not route.stream.accepted_once and not route.stream.has_progress
        if is_new and now_s < min(self._paced_until_s, route.opened_s + MAX_HOLD_BACK_S):
            return min(STEP_S, self._paced_until_s - now_s)
        return 0.0

    def _note_instance(self, route: Route, failed: Failed, instance: str, now_s: float) -> None:
        rest_s = min(MAX_REST_S, failed.info.retry_after_s or 0.0)
        match failed.cause:
            case Cause.REFUSED:
                self._replicas.failed(instance, now_s)
                route.resting[instance] = now_s + max(rest_s, REFUSED_PAUSE_S)
            case Cause.UNREACHABLE:
                self._replicas.not_reached(instance, now_s)
                route.resting[instance] = now_s + REFUSED_PAUSE_S
            case Cause.DRAIN:
                # Its state keeps it out from now on; it may be taken back into service.
                route.resting[instance] = now_s + max(rest_s, STEP_S)
            case Cause.OVERLOADED if route.stream.accepted_once:
                route.resting[instance] = now_s + (rest_s or STEP_S)
            case Cause.OVERLOADED | Cause.REJECTED:
                route.exclude.add(instance)
            case Cause.LOST | Cause.STALL | Cause.PROTOCOL | Cause.GONE:
                self._replicas.failed(instance, now_s)
                self._grant_grace(route, instance, now_s)
            case Cause.ERROR:
                if not failed.info.code.startswith("pd_"):
                    self._replicas.failed(instance, now_s)
                if rest_s:
                    route.resting[instance] = now_s + rest_s
        if self._config.preempt_retry_exclude_decode:
            route.avoid = {instance}

    def _grant_grace(self, route: Route, instance: str, now_s: float) -> None:
        replica = self._replicas.get(instance)
        if replica is not None and replica.state is State.RESTARTING:
            route.grace_instance, route.grace_until_s = instance, now_s + self._config.restart_grace_s

    def _spend(self, route: Route, failed: Failed, now_s: float) -> None:
        """One attempt more, if the stream's own count and the cluster's budget have one left."""
        stream, info = route.stream, failed.info
        if stream.last_attempt_is_due or stream.failures > self._config.preempt_retry_count:
            route.settle(info, failed.body)
        elif stream.advanced or (stream.failures == 1 and failed.cause in LOSSES):
            self._pace(route, now_s)
        elif self._budget.may_retry(now_s):
            route.not_before_s = now_s + retry_pause_s(stream.failures)
        else:
            self._metrics.budget_refusals.inc()
            self._refuse(route, info, now_s)

    def _pace(self, route: Route, now_s: float) -> None:
        """Many at once are spread out; new requests wait until they are through."""
        route.not_before_s = now_s + self._budget.pace(now_s)
        if route.not_before_s > now_s:
            self._paced_until_s = max(self._paced_until_s, route.not_before_s)

    def _refuse(self, route: Route, info: ErrorInfo, now_s: float) -> None:
        """A request that was given up for want of blocks has something to show: one last attempt brings it in the
        client's own form. Others wait a while: when an instance dies, many streams need one attempt each at once."""
        if info.code.startswith("pd_") and route.stream.has_progress:
            route.stream.last_attempt_is_due = True
        else:
            route.owes_budget, route.budget_until_s = info, now_s + MAX_BUDGET_WAIT_S

    def has_paid(self, route: Route, now_s: float) -> bool:
        """Asks the budget again."""
        if not self._budget.may_retry(now_s):
            return False
        route.owes_budget = None
        return True


def sooner(one: Failed | None, other: Failed) -> Failed:
    """Of two instances that are full, the one that says to come back earlier; one that says nothing counts as last."""
    if one is None:
        return other
    return min(one, other, key=lambda full: math.inf if full.info.retry_after_s is None else full.info.retry_after_s)


def retry_pause_s(failures: int) -> float:
    return min(MAX_RETRY_PAUSE_S, RETRY_PAUSE_S * 2 ** (failures - 2)) if failures > 1 else 0.0
