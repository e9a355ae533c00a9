"""Spans on their way to a collector: what it receives, what is lost, and that nothing waits for it."""

import logging
import socket
import subprocess
import sys
import threading

import pytest

from onward.obs import span_exporter
from onward.obs.metrics import Registry
from onward.obs.request_trace import FinishedSpan, SpanEvent, SpanLink
from onward.obs.span_exporter import MAX_QUEUED_SPANS, SpanExportThread
from tests.obs.otlp_receiver import OtlpReceiver

TRACE, OTHER_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736", "11111111111111111111111111111111"
OUTCOMES = ("exported", "failed", "dropped")


def span(number: int = 1, parent: int = 0) -> FinishedSpan:
    return FinishedSpan(
        "chat model",
        "server",
        TRACE,
        f"{number:016x}",
        f"{parent:016x}" if parent else "",
        start_ns=1_000,
        end_ns=2_000,
        attributes={"gen_ai.usage.input_tokens": 7, "reasons": ("stop",), "ratio": 0.5, "flag": True, "name": "x"},
        events=[SpanEvent("onward.preemption", 1_500, {"onward.choice": 0})],
        links=[SpanLink(OTHER_TRACE, f"{9:016x}", {"onward.link": "previous attempt"})],
        error="engine_crash",
        trace_state="vendor=a",
    )


def counted(registry: Registry) -> list[float]:
    [family] = registry.snapshot()
    by_outcome = {series.labels["outcome"]: series.value for series in family.series}
    return [by_outcome[outcome] for outcome in OUTCOMES]


def test_a_collector_receives_every_part_of_a_span() -> None:
    registry = Registry()
    with OtlpReceiver() as receiver:
        exporter = SpanExportThread(receiver.url + "/v1/traces", {"service.instance.id": "api-1"}, registry)
        exporter.put(span(2, parent=1))
        exporter.close()
        [received] = receiver.spans
    assert (receiver.paths, receiver.headers[0]["content-type"]) == (["/v1/traces"], "application/x-protobuf")
    assert (received.trace_id, received.span_id, received.parent_span_id) == (TRACE, f"{2:016x}", f"{1:016x}")
    assert (received.name, received.kind, received.is_error) == ("chat model", "server", True)
    assert (received.start_ns, received.end_ns, received.trace_state) == (1_000, 2_000, "vendor=a")
    assert received.attributes == {
        "gen_ai.usage.input_tokens": 7,
        "reasons": ["stop"],
        "ratio": 0.5,
        "flag": True,
        "name": "x",
    }
    assert received.events == [("onward.preemption", {"onward.choice": 0})]
    assert received.links == [(OTHER_TRACE, f"{9:016x}")]
    assert received.resource["service.name"] == "onward"
    assert received.resource["service.instance.id"] == "api-1"
    assert counted(registry) == [1, 0, 0]


def test_the_resource_of_the_environment_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm-gateway")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=secret")
    with OtlpReceiver() as receiver:
        exporter = SpanExportThread(receiver.url + "/v1/traces", {}, Registry())
        exporter.put(span())
        exporter.close()
        [received] = receiver.spans
    assert received.resource["service.name"] == "llm-gateway"
    assert received.resource["deployment.environment"] == "test"
    assert receiver.headers[0]["x-token"] == "secret"


def test_what_is_not_taken_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    with OtlpReceiver() as receiver, caplog.at_level(logging.INFO):
        receiver.status = 400
        exporter = SpanExportThread(receiver.url + "/v1/traces", {}, registry)
        for batch in range(3):
            exporter.put(span(batch + 1))
            exporter._wake.set()
            receiver.wait_until(lambda spans, batch=batch: len(spans) > batch)
        exporter.close()
    assert counted(registry) == [0, 3, 0]
    # pytest also reads loggers that do not propagate, such as the library's; a server's log has only what the root gets.
    [record] = [record for record in caplog.records if not record.name.startswith("opentelemetry")]
    assert not logging.getLogger("opentelemetry").propagate
    assert record.levelname == "WARNING" and "traces could not be exported" in record.getMessage()
    assert "400" in record.getMessage()


def test_a_collector_that_hangs_holds_up_neither_requests_nor_the_way_out() -> None:
    """It accepts connections and never answers: the queue fills to its bound, and the process can leave."""
    registry = Registry()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        exporter = SpanExportThread(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces", {}, registry)
        exporter.put(span())
        exporter._wake.set()
        connection, _ = silent.accept()
        with connection:
            connection.recv(1)  # the first batch is under way, and stays so
            for number in range(MAX_QUEUED_SPANS + 100):
                exporter.put(span(number + 2))
            assert counted(registry) == [0, 0, 100]
            closing = threading.Thread(target=exporter.close, args=(0.1,))
            closing.start()
            closing.join(10)
            assert not closing.is_alive()


def test_an_exporter_that_cannot_start_loses_spans_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ImportError("a package is broken")

    monkeypatch.setattr(span_exporter, "OtlpBatchExporter", broken)
    registry = Registry()
    exporter = SpanExportThread("http://127.0.0.1:1/v1/traces", {}, registry)
    exporter.put(span())
    exporter.close()
    assert counted(registry) == [0, 1, 0]
    assert "traces cannot be exported" in caplog.text


def test_a_server_that_does_not_trace_loads_nothing_of_opentelemetry() -> None:
    code = (
        "import sys, onward.api.main, onward.router.main, onward.engine.main\n"
        "sys.exit(any(name.split('.')[0] in ('opentelemetry', 'google') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
