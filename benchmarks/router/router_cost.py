"""What a process between client and instance costs: processor time per request and per event, told apart. Pure arithmetic.

The same load twice, with short and with long streams: what differs is the events, what is left is the request.

    cpu per request = request cost + events * event cost
"""

import statistics
from collections.abc import Sequence

import msgspec

from benchmarks.harness.stream_load import StreamLoad

SHORT_EVENTS, LONG_EVENTS = 8, 512
MAX_US_PER_EVENT, MAX_MS_PER_REQUEST = 50.0, 1.5
_ALONE_MS, _TOGETHER_MS = 2.0, 20.0
"""Between a stream's events: so far apart that each is read, followed and written alone."""


class RouterCostSample(msgspec.Struct, frozen=True):
    events_each: int
    num_requests: int
    num_reads: int
    """By the client. Near the number of events where each of them travelled alone."""
    cpu_s: float
    """Without `tokenizing_s`."""
    tokenizing_s: float = 0.0
    """What a router itself says it has spent on making token ids: told apart, since only `prefix` does it."""

    @property
    def cpu_per_request_s(self) -> float:
        return self.cpu_s / self.num_requests


class RouterCost(msgspec.Struct, frozen=True):
    us_per_event: float
    ms_per_request: float
    """All but its events with tokens."""

    @property
    def is_within_bars(self) -> bool:
        return self.us_per_event <= MAX_US_PER_EVENT and self.ms_per_request <= MAX_MS_PER_REQUEST


class RouterMeasurement(msgspec.Struct, frozen=True):
    """One side under one setting, in one round."""

    side: str
    setting: str
    round: int
    short: RouterCostSample
    long: RouterCostSample
    cost: RouterCost
    other_programs_cores: float

    @property
    def tokenizing_ms(self) -> float:
        """Per request."""
        tokenizing_s = self.short.tokenizing_s + self.long.tokenizing_s
        return tokenizing_s / (self.short.num_requests + self.long.num_requests) * 1e3


class RouterLoadSetting(msgspec.Struct, frozen=True):
    """One way to load the process, by short streams and by long ones."""

    name: str
    short: StreamLoad
    long: StreamLoad


def settings(scale: int) -> list[RouterLoadSetting]:
    """`scale`: how many times longer than the shortest that says anything."""

    def setting(name: str, num_streams: int, num_short: int, num_long: int, interval_ms: float) -> RouterLoadSetting:
        return RouterLoadSetting(
            name,
            StreamLoad(num_streams, num_short * scale, SHORT_EVENTS, interval_ms),
            StreamLoad(num_streams, num_long * scale, LONG_EVENTS, interval_ms),
        )

    return [
        setting("1 stream, apart", 1, 100, 3, _ALONE_MS),
        setting("32 streams, apart", 32, 10, 1, _TOGETHER_MS),
        setting("32 streams, at once", 32, 20, 4, 0.0),
    ]


def separate(short: RouterCostSample, long: RouterCostSample) -> RouterCost:
    assert short.events_each < long.events_each, "two lengths are needed"
    per_event_s = (long.cpu_per_request_s - short.cpu_per_request_s) / (long.events_each - short.events_each)
    return RouterCost(per_event_s * 1e6, (short.cpu_per_request_s - short.events_each * per_event_s) * 1e3)


def median_cost(costs: Sequence[RouterCost]) -> RouterCost:
    return RouterCost(
        statistics.median(cost.us_per_event for cost in costs), statistics.median(cost.ms_per_request for cost in costs)
    )
