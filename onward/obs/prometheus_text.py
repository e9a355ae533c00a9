"""Metrics in Prometheus' text form, for processes that serve HTTP. It is separate from `obs.metrics`, which every
process imports, because an engine starts faster without these imports.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from onward.proto.stats import MetricFamily, MetricSeries


def render(families: Iterable[MetricFamily]) -> bytes:
    """Returns the metrics in Prometheus' text form."""
    registry = CollectorRegistry()
    registry.register(_FamilyCollector([_to_prometheus(family) for family in families]))
    return generate_latest(registry)


class _FamilyCollector(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _to_prometheus(family: MetricFamily) -> Metric:
    labels = sorted(family.series[0].labels) if family.series else []
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.help, labels=labels)
        for entry in family.series:
            histogram.add_metric([entry.labels[k] for k in labels], _cumulative(family, entry), entry.sum)
        return histogram
    metric_type = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = metric_type(family.name, family.help, labels=labels)
    for entry in family.series:
        metric.add_metric([entry.labels[k] for k in labels], entry.value)
    return metric


def _cumulative(family: MetricFamily, series: MetricSeries) -> list[tuple[str, float]]:
    total, pairs = 0, []
    for bound, count in zip([*map(str, family.bounds), "+Inf"], series.buckets, strict=True):
        total += count
        pairs.append((bound, total))
    return pairs
