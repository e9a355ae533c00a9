"""Dashboard, alerts and metric names before a real Prometheus, which has scraped a router and an instance through load,
preemptions, a kill and a resume. Needs Prometheus: on PATH, or from Debian's package (`apt-get download`, without root)."""

import math
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.observed_estate import (
    ALERTS,
    SCRAPE_CONFIG,
    VLLM_QUERIES,
    ObservedEstate,
    alert_queries,
    alert_rules,
    dashboard_queries,
    filled_in,
)
from tests.e2e.prometheus_server import PrometheusServer, find_binary

pytestmark = pytest.mark.full

KNOWN_COMPLAINTS = {
    # vLLM's own name of a histogram.
    'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix',
}
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def prometheus() -> Iterator[PrometheusServer]:
    with ObservedEstate() as estate:
        targets = {"onward": estate.instance.url, "onward-router": estate.router.url}
        targets = {job: url.removeprefix("http://") for job, url in targets.items()}
        with PrometheusServer(SCRAPE_CONFIG, targets) as prometheus:
            prometheus.wait_scraping()
            estate.leave_traces()
            yield prometheus


@pytest.fixture(scope="module")
def complaints(prometheus: PrometheusServer) -> list[str]:
    """The complaints of `promtool check metrics` about what the targets show."""
    jobs = [target["scrapeUrl"] for target in prometheus.api("targets")["activeTargets"]]
    assert len(jobs) == 2
    lines: list[str] = []
    for url in jobs:
        checked = subprocess.run(
            [find_binary("promtool"), "check", "metrics"], input=httpx.get(url).content, capture_output=True, timeout=60
        )
        assert checked.returncode in (0, 3), checked
        lines += (checked.stdout + checked.stderr).decode().splitlines()
    return lines


def test_promtool_has_nothing_to_say_about_our_names_and_only_the_colon_about_vllm_s(complaints: list[str]) -> None:
    colons = {line for line in complaints if line.startswith("vllm:") and line.endswith("names should not contain ':'")}
    assert len(colons) > 20
    assert {*complaints} - colons - KNOWN_COMPLAINTS == set()


@pytest.mark.parametrize("query", [*dashboard_queries(), *alert_queries(), *VLLM_QUERIES])
def test_every_query_of_dashboards_and_alerts_returns_numbers(query: str, prometheus: PrometheusServer) -> None:
    expression = filled_in(query, rate_interval="5m")
    deadline_s = time.monotonic() + PATIENCE_S
    while not any(math.isfinite(value) for _, value in prometheus.query(expression)):
        assert time.monotonic() < deadline_s, f"{expression} returns {prometheus.query(expression)}"
        time.sleep(0.2)


def test_prometheus_evaluates_every_alert_without_an_error(prometheus: PrometheusServer) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        rules = [rule for group in prometheus.api("rules")["groups"] for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == {rule["alert"] for rule in alert_rules()}
        if all(rule["health"] == "ok" for rule in rules):
            return
        assert time.monotonic() < deadline_s, rules
        time.sleep(0.2)


def test_what_the_run_did_can_be_read_from_the_dashboard_s_metrics(prometheus: PrometheusServer) -> None:
    for expression, at_least in (
        ('sum(onward_process_restarts_total{process="worker"})', 1),
        ('sum(onward_recomputed_tokens_total{cause="worker"})', 1),
        ('sum(onward_recomputed_tokens_total{cause="preemption"})', 1),
        ("sum(onward_router_resumes_total)", 2),
        ("sum(vllm:generation_tokens_total)", 300),
    ):
        [(_, value)] = prometheus.query(expression)
        assert value >= at_least, expression


def test_promtool_takes_the_files_as_they_are() -> None:
    promtool = find_binary("promtool")
    subprocess.run([promtool, "check", "config", SCRAPE_CONFIG], check=True, timeout=60, capture_output=True)
    subprocess.run([promtool, "check", "rules", ALERTS], check=True, timeout=60, capture_output=True)
