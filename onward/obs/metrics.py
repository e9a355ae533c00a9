"""Counters, gauges and histograms as plain numbers: cheap enough for every token, and easy to send to another process.

Each process keeps a `Registry` and hands out snapshots. Shares of several processes are added up (`merge`) and written in
Prometheus' text form by its own library (`render`).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from onward.proto.stats import MetricFamily, MetricSeries

LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REQUEST_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
"""For times of whole requests: a long answer takes minutes."""
TOKEN_BOUNDS = tuple(mantissa * 10.0**exponent for exponent in range(6) for mantissa in (1, 2, 5))
"""For lengths of prompts and outputs: 1, 2, 5, 10, ... 500,000."""

MAX_VALUE = 2.0**53
"""Bound for one process, so that the sum over all processes is finite too."""

LabelValues = tuple[str, ...]
MetricT = TypeVar("MetricT", "Counter", "DerivedCounter", "Gauge", "Histogram", "LabelledHistogram")


class Counter:
    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        assert name.endswith("_total"), name
        self.name, self.help, self.labels = name, help, tuple(labels)
        self._values: dict[LabelValues, float] = {} if labels else {(): 0.0}

    def inc(self, *labels: str, by: float = 1) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + by

    def value(self, *labels: str) -> float:
        return self._values.get(labels, 0.0)

    def total(self) -> float:
        """Returns the sum over all labels."""
        return sum(self._values.values())

    def family(self) -> MetricFamily:
        return MetricFamily(self.name, "counter", self.help, _series(self.labels, self._values))


class DerivedCounter:
    """A counter that is read from another object when metrics are read."""

    def __init__(
        self, name: str, help: str, labels: Sequence[str], read: Callable[[], dict[LabelValues, float]]
    ) -> None:
        assert name.endswith("_total"), name
        self.name, self.help, self.labels, self._read = name, help, tuple(labels), read

    def family(self) -> MetricFamily:
        return MetricFamily(self.name, "counter", self.help, _series(self.labels, self._read()))


class Gauge:
    """Derived, never set: `read` returns the values of this moment, so a gauge cannot drift from what it measures."""

    def __init__(
        self, name: str, help: str, labels: Sequence[str], read: Callable[[], dict[LabelValues, float]]
    ) -> None:
        self.name, self.help, self.labels, self._read = name, help, tuple(labels), read

    def family(self) -> MetricFamily:
        return MetricFamily(self.name, "gauge", self.help, _series(self.labels, self._read()))


class Histogram:
    def __init__(self, name: str, help: str, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> None:
        self.name, self.help, self.bounds = name, help, list(bounds)
        self._buckets = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._buckets[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def series(self, labels: dict[str, str]) -> MetricSeries:
        return MetricSeries(labels, buckets=list(self._buckets), sum=self._sum)

    def family(self) -> MetricFamily:
        return MetricFamily(self.name, "histogram", self.help, [self.series({})], self.bounds)


class LabelledHistogram:
    """A histogram for each combination of label values. For observations per request, not per token."""

    def __init__(self, name: str, help: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self.name, self.help, self.labels, self.bounds = name, help, tuple(labels), list(bounds)
        self._by_labels: dict[LabelValues, Histogram] = {}

    def observe(self, value: float, *labels: str) -> None:
        histogram = self._by_labels.get(labels)
        if histogram is None:
            histogram = self._by_labels[labels] = Histogram(self.name, self.help, self.bounds)
        histogram.observe(value)

    def family(self) -> MetricFamily:
        series = [
            histogram.series(dict(zip(self.labels, values, strict=True)))
            for values, histogram in self._by_labels.items()
        ]
        return MetricFamily(self.name, "histogram", self.help, series, self.bounds)


class Registry:
    """All metrics of one process. Names are unique."""

    def __init__(self) -> None:
        self._metrics: dict[str, Counter | DerivedCounter | Gauge | Histogram | LabelledHistogram] = {}

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return self._add(Counter(name, help, labels))

    def derived_counter(
        self, name: str, help: str, labels: Sequence[str], read: Callable[[], dict[LabelValues, float]]
    ) -> DerivedCounter:
        return self._add(DerivedCounter(name, help, labels, read))

    def gauge(self, name: str, help: str, labels: Sequence[str], read: Callable[[], dict[LabelValues, float]]) -> Gauge:
        return self._add(Gauge(name, help, labels, read))

    def histogram(self, name: str, help: str, bounds: Sequence[float] = LATENCY_BOUNDS_S) -> Histogram:
        return self._add(Histogram(name, help, bounds))

    def labelled_histogram(
        self, name: str, help: str, labels: Sequence[str], bounds: Sequence[float] = LATENCY_BOUNDS_S
    ) -> LabelledHistogram:
        return self._add(LabelledHistogram(name, help, labels, bounds))

    def snapshot(self) -> list[MetricFamily]:
        return [metric.family() for metric in self._metrics.values()]

    def _add(self, metric: MetricT) -> MetricT:
        assert metric.name not in self._metrics, metric.name
        self._metrics[metric.name] = metric
        return metric


def _series(labels: LabelValues, values: dict[LabelValues, float]) -> list[MetricSeries]:
    return [MetricSeries(dict(zip(labels, key, strict=True)), value) for key, value in values.items()]


def merge(snapshots: Iterable[Iterable[MetricFamily]]) -> list[MetricFamily]:
    """Adds up the metrics of several processes: series with the same name and labels become one sum."""
    merged: dict[str, tuple[MetricFamily, dict[LabelValues, MetricSeries]]] = {}
    for snapshot in snapshots:
        for family in snapshot:
            _, series = merged.setdefault(family.name, (family, {}))
            for entry in family.series:
                key = tuple(f"{k}={v}" for k, v in sorted(entry.labels.items()))
                series[key] = _sum_series(series[key], entry) if key in series else entry
    return [
        MetricFamily(family.name, family.kind, family.help, list(series.values()), family.bounds)
        for family, series in merged.values()
    ]


def usable(families: Iterable[MetricFamily]) -> tuple[list[MetricFamily], list[str]]:
    """Returns the metrics without series that cannot be added up, and the names of the metrics of such series. A NaN,
    for example, would stay in the sum."""
    usable_families, unusable_names = list[MetricFamily](), list[str]()
    for family in families:
        series = [entry for entry in family.series if _is_usable(entry, family)]
        unusable_names += [family.name] * (len(family.series) - len(series))
        usable_families.append(
            MetricFamily(family.name, family.kind, family.help, series, family.bounds) if unusable_names else family
        )
    return usable_families, unusable_names


def _is_usable(series: MetricSeries, family: MetricFamily) -> bool:
    num_buckets = len(family.bounds) + 1 if family.kind == "histogram" else 0
    values = (series.value, series.sum, *family.bounds)
    return (
        len(series.buckets) == num_buckets
        and all(abs(value) <= MAX_VALUE for value in values)
        and all(0 <= value <= MAX_VALUE for value in series.buckets)
    )


def without_gauges(families: Iterable[MetricFamily]) -> list[MetricFamily]:
    """Returns the metrics of a dead process that remain valid: its counters and histograms, but not its gauges."""
    return [family for family in families if family.kind != "gauge"]


def _sum_series(first: MetricSeries, second: MetricSeries) -> MetricSeries:
    assert len(first.buckets) == len(second.buckets), "shares of one histogram have the same buckets"
    buckets = [x + y for x, y in zip(first.buckets, second.buckets, strict=True)]
    return MetricSeries(first.labels, first.value + second.value, buckets, first.sum + second.sum)
