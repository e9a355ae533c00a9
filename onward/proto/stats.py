"""Numbers on their way to `/metrics`: one process's share, before the supervisor adds the shares up."""

import msgspec


class Series(msgspec.Struct, frozen=True, array_like=True):
    labels: dict[str, str]
    value: float = 0.0
    """Counters and gauges."""
    buckets: list[int] = []
    """Histograms: observations per bucket (not cumulative), the last one unbounded."""
    sum: float = 0.0


class Family(msgspec.Struct, frozen=True, array_like=True):
    name: str
    kind: str
    """`counter`, `gauge` or `histogram`. Shares of any kind are added; a dead process leaves its counters behind."""
    help: str
    series: list[Series]
    bounds: list[float] = []
    """Histograms: upper bounds of all buckets but the last."""


class EngineStats(msgspec.Struct, frozen=True):
    """The engine's view of itself, for `/info` and `/health`."""

    step: int
    worker_ready: bool
    stalled_s: float
    """How long there has been work without a step being completed. 0 when idle."""
    requests: dict[str, int]
    kv_blocks: dict[str, int]
    free_slots: int
