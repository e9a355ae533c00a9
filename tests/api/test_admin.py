"""The routes about the server itself."""

import os
from collections.abc import Iterator

import httpx
import pytest

import onward
from benchmarks.harness.metrics_text import parse_metrics
from onward.api.endpoints.admin import MAX_STALL_S
from tests.api.instance import NUM_BLOCKS, Instance


@pytest.fixture
def http(instance: Instance) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=instance.url, timeout=30) as http:
        yield http


def test_it_is_healthy_with_an_engine_that_makes_progress(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200


def test_without_an_engine_it_is_alive_but_not_healthy(http: httpx.Client, instance: Instance) -> None:
    instance.kill_engine()
    try:
        health, live = http.get("/health"), http.get("/live")
    finally:
        instance.start_engine()
    assert (health.status_code, live.status_code) == (503, 200)
    assert "engine" in health.json()["reason"]


def test_without_a_worker_it_is_not_healthy(http: httpx.Client, instance: Instance) -> None:
    instance.worker_ready = False
    health = http.get("/health")
    assert health.status_code == 503
    assert "worker" in health.json()["reason"]


def test_an_engine_that_makes_no_progress_is_not_healthy(http: httpx.Client, instance: Instance) -> None:
    instance.stalled_s = MAX_STALL_S
    assert http.get("/health").status_code == 200
    instance.stalled_s = MAX_STALL_S + 1
    assert http.get("/health").status_code == 503


def test_the_version_is_told(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": onward.__version__}


def test_the_info_names_model_processes_and_blocks(http: httpx.Client, instance: Instance) -> None:
    info = http.get("/info").json()
    assert info["model"]["id"] == "small-model"
    assert (info["role"], info["incarnation"]) == ("mixed", "instance-1")
    assert info["pids"] == {
        "supervisor": [os.getpid()],
        "stream_store": [instance.shelf.process.pid],
        "api": [instance.children[0].process.pid],
        "engine": [],
        "worker": [],
        "worker_rank": [],
    }
    assert info["kv_blocks"] == {"free": NUM_BLOCKS}
    assert info["configuration"] == {"port": 0}
    assert info["resume"]["is_exact"] is False
    assert "may differ" in info["resume"]["guarantee"]


def test_the_metrics_are_in_prometheus_form(http: httpx.Client) -> None:
    http.get("/version")
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# TYPE onward_http_requests_total counter" in response.text
    assert 'onward_http_requests_total{path="/version",status="200"}' in parse_metrics(response.text)
    labels = 'model_name="small-model",path="/version",role="mixed",status="200"'
    assert f"onward_http_requests_total{{{labels}}}" in response.text


def test_paths_that_strangers_make_up_do_not_become_metrics(http: httpx.Client) -> None:
    http.get("/made-up-by-a-stranger")
    assert "made-up" not in http.get("/metrics").text


def test_a_browser_may_call_from_the_configured_origin_only(http: httpx.Client) -> None:
    def allowed(origin: str) -> str | None:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        return http.options("/v1/chat/completions", headers=asked).headers.get("access-control-allow-origin")

    assert allowed("https://example.org") == "https://example.org"
    assert allowed("https://elsewhere.org") is None
