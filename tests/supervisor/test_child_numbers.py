"""One number of a child that cannot be added up costs neither its process nor its other numbers."""

import math
from contextlib import closing
from typing import Any

import pytest

from onward.config import ServeConfig
from onward.obs.prometheus_text import render
from onward.proto.control import MetricsSnapshot, QueryInstance, StartupProgress
from onward.proto.stats import EngineStats, MetricFamily, MetricSeries
from onward.supervisor.children import Child, ProcessRole
from onward.supervisor.supervisor import Supervisor
from onward.transport.control_channel import ControlChannel
from tests.supervisor.stand_ins import child_of, kill_and_reap, supervisor_of

GOOD = MetricFamily("good_total", "counter", "h", [MetricSeries({}, 5.0)])
BOUNDS = [0.5, 1.0]
UNUSABLE = [
    MetricFamily("bad", "gauge", "h", [MetricSeries({}, math.nan)]),
    MetricFamily("bad_total", "counter", "h", [MetricSeries({}, math.inf)]),
    MetricFamily("bad_total", "counter", "h", [MetricSeries({}, 1e300)]),
    MetricFamily("bad", "histogram", "h", [MetricSeries({}, buckets=[1, 0, 0], sum=math.nan)], BOUNDS),
    MetricFamily("bad", "histogram", "h", [MetricSeries({}, buckets=[-1, 0, 0], sum=1.0)], BOUNDS),
    MetricFamily("bad", "histogram", "h", [MetricSeries({}, buckets=[(1 << 64) - 1, 0, 0], sum=1.0)], BOUNDS),
    MetricFamily("bad", "histogram", "h", [MetricSeries({}, buckets=[1, 0, 0], sum=1.0)], [0.5, math.nan]),
    MetricFamily("bad", "histogram", "h", [MetricSeries({}, buckets=[1, 0], sum=1.0)], BOUNDS),
]


def received(supervisor: Supervisor, child: Child, childs_end: ControlChannel, message: Any) -> None:
    """By the way that it comes from another process."""
    assert childs_end.send(message)
    supervisor._read_messages(child)


def value_of(supervisor: Supervisor, name: str) -> dict[str, float]:
    """By the first label."""
    families = supervisor._instance_view(1).families
    found = [one for family in families if family.name == name for one in family.series]
    return {next(iter(one.labels.values()), ""): one.value for one in found}


@pytest.mark.parametrize("unusable", UNUSABLE, ids=lambda family: f"{family.kind}-{family.series[0].value}")
def test_a_metric_that_is_no_number_is_left_out_and_counted(unusable: MetricFamily) -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        engine, engines_end = child_of(supervisor, ProcessRole.ENGINE, "engine-1")
        with closing(engines_end):
            stats = EngineStats(7, True, 0.0, {}, {}, 1)
            received(supervisor, engine, engines_end, MetricsSnapshot(1, [unusable, GOOD], stats))
            assert value_of(supervisor, "good_total") == {"": 5.0}
            assert value_of(supervisor, unusable.name) == {}
            assert supervisor._instance_view(1).engine == stats, "the rest of what it said counts"
            assert value_of(supervisor, "onward_metrics_unusable_total") == {"engine": 1.0}
            assert b"nan" not in render(supervisor._instance_view(1).families).lower()
            assert engines_end.send(supervisor._instance_view(1))


def test_only_the_series_that_is_no_number_is_left_out() -> None:
    family = MetricFamily("some", "gauge", "h", [MetricSeries({"k": "a"}, 1.0), MetricSeries({"k": "b"}, math.nan)])
    with supervisor_of(ServeConfig()) as supervisor:
        api, apis_end = child_of(supervisor, ProcessRole.API, "api-1")
        with closing(apis_end):
            received(supervisor, api, apis_end, MetricsSnapshot(1, [family]))
            assert value_of(supervisor, "some") == {"a": 1.0}


def test_what_a_dead_process_counted_is_a_number() -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        api, apis_end = child_of(supervisor, ProcessRole.API, "api-1")
        other, others_end = child_of(supervisor, ProcessRole.API, "api-2")
        broken = MetricFamily("good_total", "counter", "h", [MetricSeries({}, math.nan)])
        with closing(others_end):
            received(supervisor, api, apis_end, MetricsSnapshot(1, [broken]))
            received(supervisor, other, others_end, MetricsSnapshot(1, [GOOD]))
            apis_end.close()
            supervisor._core.was_ready = True
            kill_and_reap(supervisor, api)
            assert value_of(supervisor, "good_total") == {"": 5.0}


@pytest.mark.parametrize(
    "message",
    [
        MetricsSnapshot(1, [], EngineStats(7, True, math.nan, {}, {}, 1)),
        MetricsSnapshot(1, [], EngineStats(-1, True, 0.0, {}, {}, 1)),
        MetricsSnapshot(1, [], EngineStats(7, True, 0.0, {"running": -1}, {}, 1)),
        MetricsSnapshot(1, [], EngineStats(7, True, 0.0, {}, {"free": 1 << 40}, 1)),
        MetricsSnapshot(-1, []),
        StartupProgress("loading", math.nan),
        StartupProgress("loading", 1.5),
        QueryInstance(-1),
        b"\xc0",
        ["no message"],
    ],
    ids=lambda message: str(message)[-40:],
)
def test_a_message_with_a_number_out_of_range_is_dropped_and_the_supervisor_lives(message: Any) -> None:
    with supervisor_of(ServeConfig(stall_timeout_s=5)) as supervisor:
        engine, engines_end = child_of(supervisor, ProcessRole.ENGINE, "engine-1")
        with closing(engines_end):
            received(supervisor, engine, engines_end, MetricsSnapshot(1, [GOOD]))
            reply_s = engine.last_reply_at_s
            received(supervisor, engine, engines_end, message)
            assert engine.last_reply_at_s == reply_s, "a child that says nothing else is replaced in time"
            assert value_of(supervisor, "onward_control_messages_dropped_total") == {"engine": 1.0}
            received(supervisor, engine, engines_end, MetricsSnapshot(2, [GOOD]))
            assert supervisor._core.snapshots.latest[engine].query_id == 2
            assert supervisor._processes[engine].process.poll() is None
