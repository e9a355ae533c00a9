"""W3C Trace Context: headers of clients, the ids of traces, and which requests are sampled."""

import pytest

from onward.config import otel_settings
from onward.errors import StartupError
from onward.obs.trace_context import (
    TraceSampler,
    parse_traceparent,
    trace_headers,
    trace_id_in_cursor,
    trace_id_of_request,
)
from onward.proto.trace import TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OTHER_TRACE = "11111111111111111111111111111111"


def test_a_client_s_traceparent_is_read() -> None:
    context = parse_traceparent(f"00-{TRACE}-{SPAN}-01", "vendor=a,other=b")
    assert context == TraceContext(TRACE, True, SPAN, SPAN, "vendor=a,other=b")
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-00") == TraceContext(TRACE, False, SPAN, SPAN)


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-the-future-brings") == TraceContext(TRACE, True, SPAN, SPAN)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "nonsense",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE[:-1]}-{SPAN}-01",
    ],
)
def test_a_header_that_is_not_as_the_standard_says_is_none(header: str | None) -> None:
    assert parse_traceparent(header) is None


@pytest.mark.parametrize("state", ["x" * 513, "a=\x1b[2J", "a=é"])
def test_a_tracestate_that_cannot_be_passed_on_is_left_out(state: str) -> None:
    context = parse_traceparent(f"00-{TRACE}-{SPAN}-01", state)
    assert context is not None and context.trace_state == ""


def test_what_goes_out_is_what_came_in() -> None:
    for flags in ("00", "01"):
        header = f"00-{TRACE}-{SPAN}-{flags}"
        context = parse_traceparent(header, "a=b")
        assert context is not None
        assert trace_headers(context) == {"traceparent": header, "tracestate": "a=b"}
    assert trace_headers(TraceContext(TRACE, True)) == {}, "no attempt has begun, so there is no span to name"


def test_a_request_s_own_trace_has_its_id() -> None:
    assert trace_id_of_request(TRACE) == TRACE
    strange = trace_id_of_request("an-id-of-another-shape")
    assert len(strange) == 32 and int(strange, 16) and strange == trace_id_of_request("an-id-of-another-shape")
    assert trace_id_of_request("0" * 32) != "0" * 32


def test_a_cursor_names_the_trace_only_where_the_request_s_id_does_not() -> None:
    assert trace_id_in_cursor(TRACE, None) == ""
    assert trace_id_in_cursor(TRACE, TraceContext(TRACE, True)) == ""
    assert trace_id_in_cursor(TRACE, TraceContext(OTHER_TRACE, False)) == ""
    assert trace_id_in_cursor(TRACE, TraceContext(OTHER_TRACE, True)) == OTHER_TRACE


def test_a_ratio_samples_its_share_of_the_traces_and_every_process_decides_alike() -> None:
    ids = [trace_id_of_request(f"request {number}") for number in range(20_000)]
    sampled = {trace_id for trace_id in ids if TraceSampler(0.01).is_sampled(trace_id, None)}
    assert 130 <= len(sampled) <= 270
    assert sampled == {trace_id for trace_id in ids if TraceSampler(0.01).is_sampled(trace_id, None)}
    assert sampled < {trace_id for trace_id in ids if TraceSampler(0.1).is_sampled(trace_id, None)}
    assert all(TraceSampler(1.0).is_sampled(trace_id, None) for trace_id in ids)
    assert not any(TraceSampler(0.0).is_sampled(trace_id, None) for trace_id in ids)


def test_a_client_s_own_decision_holds_unless_the_sampler_ignores_it() -> None:
    for is_sampled in (True, False):
        client = TraceContext(TRACE, is_sampled, SPAN, SPAN)
        assert TraceSampler(0.0 if is_sampled else 1.0).is_sampled(TRACE, client) is is_sampled
        assert TraceSampler(1.0, is_parent_based=False).is_sampled(TRACE, client)


def settings(monkeypatch: pytest.MonkeyPatch, endpoint: str | None = None, ratio: float | None = None, **given: str):
    for name in ("EXPORTER_OTLP_ENDPOINT", "EXPORTER_OTLP_TRACES_ENDPOINT", "TRACES_SAMPLER", "TRACES_SAMPLER_ARG"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    return otel_settings(endpoint, ratio)


def test_nothing_is_traced_unless_a_collector_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(monkeypatch) is None
    assert settings(monkeypatch, ratio=1.0) is None


def test_the_standard_variables_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings(monkeypatch, EXPORTER_OTLP_ENDPOINT="http://collector:4318/")
    assert found is not None and found.endpoint == "http://collector:4318/v1/traces"
    found = settings(monkeypatch, EXPORTER_OTLP_TRACES_ENDPOINT="http://collector/mine")
    assert found is not None and found.endpoint == "http://collector/mine"
    found = settings(monkeypatch, "http://flag:1", TRACES_SAMPLER="traceidratio", TRACES_SAMPLER_ARG="0.25")
    assert found is not None
    assert (found.endpoint, found.sample_ratio, found.is_parent_based) == ("http://flag:1/v1/traces", 0.25, False)
    found = settings(monkeypatch, "http://flag:1", 0.5, TRACES_SAMPLER="parentbased_always_off")
    assert found is not None and (found.sample_ratio, found.is_parent_based) == (0.5, True), "a flag says more"
    assert settings(monkeypatch, "http://flag:1", SDK_DISABLED="true") is None


def test_a_sampler_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="OTEL_TRACES_SAMPLER is 'sometimes'"):
        settings(monkeypatch, "http://flag:1", TRACES_SAMPLER="sometimes")
    with pytest.raises(StartupError, match="OTEL_TRACES_SAMPLER_ARG is 'much'"):
        settings(monkeypatch, "http://flag:1", TRACES_SAMPLER="traceidratio", TRACES_SAMPLER_ARG="much")
