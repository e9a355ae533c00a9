"""Numbers on their way to `/metrics`: one process's share, before the supervisor adds the shares up."""

import msgspec

from onward.proto.field_types import Count, Duration, Serial


class MetricSeries(msgspec.Struct, frozen=True, array_like=True):
    """Numbers here have no ranges: msgspec would refuse all that the process reports for one of them. `obs.metrics.usable`
    checks each series."""

    labels: dict[str, str]
    value: float = 0.0
    """Counters and gauges."""
    buckets: list[int] = []
    """Histograms: observations per bucket (not cumulative), the last one unbounded."""
    sum: float = 0.0


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    name: str
    kind: str
    """`counter`, `gauge` or `histogram`. Shares of any kind are added; a dead process leaves its counters behind."""
    help: str
    series: list[MetricSeries]
    bounds: list[float] = []
    """Histograms: upper bounds of all buckets but the last."""


class EngineStats(msgspec.Struct, frozen=True):
    """The engine's view of itself, for `/info` and `/health`."""

    step: Serial
    worker_ready: bool
    stalled_s: Duration
    """How long there has been work without a step being completed. 0 when idle."""
    requests: dict[str, Count]
    kv_blocks: dict[str, Count]
    free_slots: Count
