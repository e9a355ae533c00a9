"""The flags for traces, checked before anything is opened."""

import pytest

from onward import optional_packages
from onward.cli.flag_checks import check_tracing
from onward.config import RouterConfig, ServeConfig
from onward.errors import StartupError
from onward.obs import tracer


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("config", [ServeConfig, RouterConfig])
@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"otlp_endpoint": "collector:4318"}, "--otlp-endpoint 'collector:4318' is not a URL"),
        ({"otlp_endpoint": "http://[::1"}, "--otlp-endpoint 'http://\\[::1' is not a URL"),
        ({"trace_sample_ratio": 1.5}, "--trace-sample-ratio 1.5 is not within 0 to 1"),
        ({"trace_sample_ratio": float("nan")}, "--trace-sample-ratio nan is not within 0 to 1"),
        ({"trace_url": "http://traces/x"}, "has no {trace_id} in it"),
        ({"trace_url": "javascript:{trace_id}"}, "--trace-url 'javascript:{trace_id}' is not a URL"),
    ],
)
def test_a_wrong_flag_is_named(config: type, flags: dict[str, object], problem: str) -> None:
    with pytest.raises(StartupError, match=problem):
        check_tracing(config(**flags))


def test_a_server_without_the_packages_says_which_extra_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_packages, "_is_installed", lambda package: False)
    with pytest.raises(StartupError, match=r"--otlp-endpoint needs .*onward\[otel\]"):
        check_tracing(ServeConfig(otlp_endpoint="http://127.0.0.1:4318"))


def test_a_variable_that_is_set_for_all_servers_of_a_cluster_stops_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setattr(optional_packages, "_is_installed", lambda package: False)
    check_tracing(ServeConfig())
    assert tracer.resolve_settings(None, None) is None
    assert "the extra onward[otel] is missing" in caplog.text
