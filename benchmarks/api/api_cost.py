"""What an api process costs: processor time per streamed token and per request. Pure arithmetic.

Tokens and requests are told apart by two loads that differ in the length of their streams only:

    cpu per request = request cost + tokens * token cost
"""

from collections.abc import Sequence
from statistics import median

import msgspec

MAX_US_PER_TOKEN, MAX_MS_PER_REQUEST = 25.0, 5.0


class ThreadTimes(msgspec.Struct, frozen=True):
    """Seconds of processor time, by what a thread is for."""

    loop_s: float
    text_s: float
    """Threads for reading bodies, templates and tokenizing."""
    zmq_s: float
    """The wire's own thread: encryption, and the socket to the engine."""

    @classmethod
    def of_tasks(cls, pid: int, tasks: Sequence[str], ticks_per_s: int) -> "ThreadTimes":
        """From the `stat` lines of a process's threads."""
        loop_ticks = text_ticks = zmq_ticks = 0
        for line in tasks:
            name, _, rest = line.partition("(")[2].rpartition(")")
            fields = rest.split()
            ticks = int(fields[11]) + int(fields[12])
            if int(line.partition(" ")[0]) == pid:
                loop_ticks += ticks
            elif name.startswith("ZMQ"):
                zmq_ticks += ticks
            else:
                text_ticks += ticks
        return cls(loop_ticks / ticks_per_s, text_ticks / ticks_per_s, zmq_ticks / ticks_per_s)

    @property
    def all_s(self) -> float:
        return self.loop_s + self.text_s + self.zmq_s

    def since(self, earlier: "ThreadTimes") -> "ThreadTimes":
        return ThreadTimes(self.loop_s - earlier.loop_s, self.text_s - earlier.text_s, self.zmq_s - earlier.zmq_s)


class ApiCostSample(msgspec.Struct, frozen=True):
    """One load."""

    num_requests: int
    num_tokens: int
    num_events: int
    used: ThreadTimes

    @property
    def tokens_each(self) -> float:
        return self.num_tokens / self.num_requests

    @property
    def tokens_per_event(self) -> float:
        """1 where each token travelled alone."""
        return self.num_tokens / self.num_events if self.num_events else 0.0

    @property
    def s_per_request(self) -> float:
        return self.used.all_s / self.num_requests


class StreamCost(msgspec.Struct, frozen=True):
    """The same load with short and with long streams."""

    interval_ms: float
    short: ApiCostSample
    long: ApiCostSample

    @property
    def us_per_token(self) -> float:
        added = self.long.s_per_request - self.short.s_per_request
        return 1e6 * added / (self.long.tokens_each - self.short.tokens_each)

    @property
    def ms_per_request(self) -> float:
        """All but its tokens."""
        return 1e3 * self.short.s_per_request - self.short.tokens_each * self.us_per_token / 1e3

    @property
    def zmq_us_per_token(self) -> float:
        """The part of the above that is spent in the wire's own thread."""
        long, short = self.long, self.short
        added = long.used.zmq_s / long.num_requests - short.used.zmq_s / short.num_requests
        return 1e6 * added / (long.tokens_each - short.tokens_each)


class ApiCostRow(msgspec.Struct, frozen=True):
    figure: str
    load: str
    value: float
    lowest: float
    highest: float
    bar: float | None = None

    @property
    def is_over(self) -> bool:
        return self.bar is not None and self.value > self.bar


def _row(figure: str, load: str, values: Sequence[float], bar: float | None = None) -> ApiCostRow:
    return ApiCostRow(figure, load, median(values), min(values), max(values), bar)


def streamed_rows(load: str, rounds: Sequence[StreamCost]) -> list[ApiCostRow]:
    return [
        _row("µs per streamed token", load, [one.us_per_token for one in rounds], MAX_US_PER_TOKEN),
        _row("  of them, the wire's own thread", load, [one.zmq_us_per_token for one in rounds]),
        _row("  tokens per event", load, [one.long.tokens_per_event for one in rounds]),
        _row("ms per stream beside its tokens", load, [one.ms_per_request for one in rounds], MAX_MS_PER_REQUEST),
    ]


def whole_rows(load: str, rounds: Sequence[ApiCostSample]) -> list[ApiCostRow]:
    return [
        _row("ms per short request", load, [1e3 * one.s_per_request for one in rounds], MAX_MS_PER_REQUEST),
        _row("  of them, the threads for text", load, [1e3 * one.used.text_s / one.num_requests for one in rounds]),
        _row("  of them, the wire's own thread", load, [1e3 * one.used.zmq_s / one.num_requests for one in rounds]),
    ]
