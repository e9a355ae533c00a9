"""Limits per caller: requests in flight, and tokens per minute. The engine enforces them for all api processes.

Only new requests, and streams that their clients resume, are refused (`admission.counts_as_new`). An admitted request
runs to its end, however many tokens it uses; the debt delays the caller's next request. The limits come with each
request, so a changed limit applies from the next request on. A new engine begins with full buckets, and does not charge
resubmitted requests again.

A caller is only a name here; this module knows nothing of API keys.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from onward.engine.live_requests import CallerInFlight
from onward.engine.request import Request
from onward.errors import OnwardError, RateLimited
from onward.proto.engine import CallerLimits


class AdmissionLimit(Enum):
    QUEUE_REQUESTS = "queue_requests"
    QUEUE_TOKENS = "queue_tokens"
    IN_FLIGHT = "in_flight"
    TOKENS_PER_MINUTE = "tokens_per_minute"


@dataclass(slots=True, frozen=True)
class AdmissionRefusal:
    limit: AdmissionLimit
    error: OnwardError


MAX_TRACKED_CALLERS = 10_000
"""Callers whose use is remembered. Beyond this number, the caller that was idle longest starts with full buckets
again."""
IN_FLIGHT_RETRY_S = 1.0
"""Fixed, because it is unknown when one of the caller's own requests will end."""
MAX_RETRY_S = 3600.0


@dataclass(slots=True)
class TokenBucket:
    """Holds a minute's tokens at most, and is refilled all the time. Below zero: a debt, paid back by the refill."""

    capacity: float
    level: float
    at_s: float
    """When `level` was true."""

    def refill(self, capacity: float, now_s: float) -> None:
        earned = max(0.0, now_s - self.at_s) * self.per_s
        self.capacity = capacity
        self.level = min(capacity, self.level + earned)
        self.at_s = max(self.at_s, now_s)

    @property
    def per_s(self) -> float:
        return self.capacity / 60

    @property
    def is_full(self) -> bool:
        return self.level >= self.capacity

    @property
    def is_empty(self) -> bool:
        return self.level < 1

    @property
    def seconds_until_token(self) -> float:
        missing = max(0.0, 1 - self.level)
        return missing / self.per_s if self.per_s else MAX_RETRY_S


class CallerLimiter:
    def __init__(self, max_callers: int = MAX_TRACKED_CALLERS) -> None:
        self._max_callers = max_callers
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        """The one used last is last. A full one need not be kept: it is as a new one would be."""

    def __len__(self) -> int:
        return len(self._buckets)

    def check(self, request: Request, in_flight: CallerInFlight, now_s: float) -> AdmissionRefusal | None:
        """Returns a refusal if one more choice would exceed a limit of its caller, else None. The token rate is not
        checked for a choice whose sibling is in flight, so that this limit admits or refuses all choices of a request
        together."""
        limits = request.spec.caller_limits
        if limits is None:
            return None
        if limits.max_in_flight is not None and in_flight.num_requests >= limits.max_in_flight:
            return _too_many_in_flight(in_flight.num_requests, limits.max_in_flight)
        if limits.tokens_per_minute is None or in_flight.has_sibling_choice:
            return None
        bucket = self._bucket(request.caller, limits.tokens_per_minute, now_s)
        return _over_token_rate(limits.tokens_per_minute, bucket) if bucket.is_empty else None

    def charge_prompt(self, request: Request, in_flight: CallerInFlight, now_s: float) -> None:
        """Charges the prompt of an admitted request to its caller. The choices of a prompt are charged for it once; a
        request that lists several prompts is charged for each of them."""
        if not in_flight.has_same_prompt:
            self.charge(request.caller, request.spec.caller_limits, len(request.token_ids), now_s)

    def charge(self, caller: str, limits: CallerLimits | None, num_tokens: int, now_s: float) -> None:
        if limits is not None and limits.tokens_per_minute is not None:
            self._bucket(caller, limits.tokens_per_minute, now_s).level -= num_tokens

    def drop_full_buckets(self, now_s: float) -> None:
        for caller, bucket in list(self._buckets.items()):
            bucket.refill(bucket.capacity, now_s)
            if bucket.is_full:
                del self._buckets[caller]

    def _bucket(self, caller: str, tokens_per_minute: int, now_s: float) -> TokenBucket:
        bucket = self._buckets.get(caller)
        if bucket is None:
            bucket = self._buckets[caller] = TokenBucket(tokens_per_minute, tokens_per_minute, now_s)
            if len(self._buckets) > self._max_callers:
                self._buckets.popitem(last=False)
        bucket.refill(tokens_per_minute, now_s)
        self._buckets.move_to_end(caller)
        return bucket


def _too_many_in_flight(num_in_flight: int, limit: int) -> AdmissionRefusal:
    message = (
        f"{num_in_flight} requests of this caller are in flight already, and its limit is {limit} "
        "(max_in_flight; each choice counts)"
    )
    return AdmissionRefusal(AdmissionLimit.IN_FLIGHT, RateLimited(message, retry_after_s=IN_FLIGHT_RETRY_S))


def _over_token_rate(limit: int, bucket: TokenBucket) -> AdmissionRefusal:
    message = f"this caller has used up its limit of {limit} tokens per minute (tokens_per_minute)"
    retry_after_s = min(MAX_RETRY_S, max(1.0, bucket.seconds_until_token))
    return AdmissionRefusal(AdmissionLimit.TOKENS_PER_MINUTE, RateLimited(message, retry_after_s=retry_after_s))
