"""A new request that is turned away: by which bound, and what its client is told."""

from dataclasses import dataclass
from enum import Enum

from onward.errors import OnwardError


class AdmissionLimit(Enum):
    QUEUE_REQUESTS = "queue_requests"
    QUEUE_TOKENS = "queue_tokens"
    IN_FLIGHT = "in_flight"
    TOKENS_PER_MINUTE = "tokens_per_minute"


@dataclass(slots=True, frozen=True)
class AdmissionRefusal:
    limit: AdmissionLimit
    error: OnwardError
