"""Metrics, dashboard, alerts and logs of a real router and a real instance that have had a hard time."""

import json
import re
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.harness.metrics_text import parse_metrics
from onward.obs.metric_names import DEPRECATED_NAMES, VLLM_NAMES
from onward.version import __version__
from tests.e2e.observed_estate import (
    CHAT,
    KEY_HEADER,
    MODEL,
    USER_KEY,
    VLLM_QUERIES,
    ObservedEstate,
    Series,
    alert_queries,
    alert_rules,
    dashboard_queries,
    filled_in,
    problems_of,
    series_of,
    wait_until,
)
from tests.e2e.server import Server
from tests.e2e.streams import chat_body

SECRET = "a-sentence-that-no-log-may-have"


@pytest.fixture(scope="module")
def estate() -> Iterator[ObservedEstate]:
    with ObservedEstate() as estate:
        estate.leave_traces()
        yield estate


@pytest.fixture(scope="module")
def scrapes(estate: ObservedEstate) -> dict[str, str]:
    return estate.scrapes_after_run


@pytest.fixture(scope="module")
def series(scrapes: dict[str, str]) -> Series:
    return series_of(scrapes)


def log_lines(server: Server) -> list[dict]:
    """The JSON lines. The progress of a start, which is for people, is the only other thing on standard error."""
    return [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]


def access_line(server: Server, **fields: object) -> dict:
    """The one access line that has these values. A response may arrive before its line is written."""

    def found() -> list[dict]:
        lines = [line for line in log_lines(server) if line["event"] == "request"]
        return [line for line in lines if fields.items() <= line.items()]

    wait_until(lambda: bool(found()))
    [line] = found()
    return line


# Metrics.


@pytest.mark.parametrize(
    "query", [*dashboard_queries(), *alert_queries(), *VLLM_QUERIES], ids=lambda query: re.sub(r"\W+", "_", query)[:60]
)
def test_every_name_and_label_of_dashboards_and_alerts_exists(query: str, series: Series) -> None:
    assert [*problems_of(filled_in(query, rate_interval="1m"), series)] == []


def test_a_wrong_name_or_label_of_a_query_would_be_found(series: Series) -> None:
    for query in ("onward_nothing", 'onward_requests{state="sleeping"}', "sum by (colour) (onward_requests)", "1 + 1"):
        assert [*problems_of(query, series)], query


def test_every_name_of_vllm_but_those_of_drafts_is_shown(series: Series) -> None:
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in series}
    names = {name for name, _ in VLLM_NAMES if "spec_decode" not in name}
    assert names <= shown


def test_earlier_names_show_what_today_s_names_show(scrapes: dict[str, str]) -> None:
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(scrapes["onward"])
        for sample in family.samples
    }
    for earlier, name in DEPRECATED_NAMES.items():
        samples = {
            key: value for key, value in values.items() if re.fullmatch(rf"{name}(_bucket|_sum|_count)?", key[0])
        }
        for key, value in samples.items():
            assert values[(key[0].replace(name, earlier), *key[1:])] == value


def test_each_kill_and_resume_is_seen_by_its_cause(scrapes: dict[str, str]) -> None:
    metrics = parse_metrics(scrapes["onward"])
    restarts = {
        process: metrics[f'onward_process_restarts_total{{process="{process}"}}']
        for process in ("worker", "api", "engine", "stream_store")
    }
    assert restarts == {"worker": 1, "api": 1, "engine": 0, "stream_store": 0}
    for cause in ("preemption", "worker", "resume"):
        assert metrics[f'onward_recomputed_tokens_total{{cause="{cause}"}}'] > 0, cause
    router = parse_metrics(scrapes["onward-router"])
    assert router['onward_router_resumes_total{cause="lost",outcome="exact"}'] == 2


def test_a_request_is_observed_once_whatever_happened_to_it(scrapes: dict[str, str]) -> None:
    """Eight streams through a worker's death, and two short ones, of which one had its first token before."""
    metrics = parse_metrics(scrapes["onward"])
    # What a killed api process had counted in its last second is lost, so the two streams it had may be missing.
    assert 9 <= metrics["onward_time_to_first_token_seconds_count"] <= 11
    assert metrics['onward_e2e_request_latency_seconds_count{finish_reason="length"}'] >= 10
    assert metrics["onward_request_prompt_tokens_count"] >= 12


def test_build_processes_and_kv_usage_are_shown(estate: ObservedEstate) -> None:
    metrics = estate.instance.metrics()
    [build] = [name for name in metrics if name.startswith("onward_build_info")]
    assert f'version="{__version__}"' in build
    for process in ("supervisor", "stream_store", "api", "engine", "worker"):
        assert metrics[f'onward_process_cpu_seconds_total{{process="{process}"}}'] > 0
        assert metrics[f'onward_process_resident_memory_bytes{{process="{process}"}}'] > 1 << 20
    assert metrics["onward_kv_cache_usage_ratio"] == 0, "nothing runs"
    assert estate.router.metrics()['onward_process_cpu_seconds_total{process="router"}'] > 0


def test_alerts_have_names_of_their_own_and_say_what_is_wrong() -> None:
    rules = alert_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 10
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules)


# Logs.


def test_every_line_of_the_log_is_json_with_time_level_process_and_event(estate: ObservedEstate) -> None:
    for server, processes in ((estate.instance, {"supervisor", "engine", "api-0"}), (estate.router, {"router"})):
        lines = log_lines(server)
        assert processes <= {line["process"] for line in lines}
        assert all({"time", "level", "process", "event"} <= line.keys() for line in lines)
        others = [line for line in server.log().splitlines() if not line.startswith("{")]
        assert not [line for line in others if re.match(r"\d{4}-\d\d-\d\d ", line)], "no line in the other format"


def test_a_stream_has_one_line_when_it_has_ended_with_tokens_times_and_label(estate: ObservedEstate) -> None:
    with httpx.stream(
        "POST", estate.instance.url + CHAT, json=chat_body(3, 6, stream=True), headers={"X-Request-Id": "stream 1"}
    ) as response:
        events = response.iter_lines()
        next(events)
        assert not [line for line in log_lines(estate.instance) if line.get("label") == "stream 1"]
        for _ in events:
            pass
    line = access_line(estate.instance, label="stream 1")
    assert (line["method"], line["path"], line["status"], line["level"]) == ("POST", CHAT, 200, "info")
    assert (line["output"], line["reason"]) == (6, "length") and line["prompt"] > 10
    assert 0 < line["ttft"] <= line["seconds"]
    assert "key" not in line, "the instance has no keys"
    [finished] = [one for one in log_lines(estate.instance) if one.get("label") == "stream 1" and one != line]
    assert finished["event"] == "request finished" and finished["id"].startswith(line["id"])


def test_through_a_router_both_have_a_line_with_the_key_s_name_and_the_client_s_label(estate: ObservedEstate) -> None:
    body = chat_body(1, 5)
    answer = httpx.post(
        estate.router.url + CHAT, json=body, headers=KEY_HEADER | {"X-Request-Id": "routed"}, timeout=60
    )
    usage = answer.json()["usage"]
    ours, theirs = (access_line(server, label="routed") for server in (estate.router, estate.instance))
    assert (ours["path"], theirs["path"]) == (CHAT, "/internal/attempt")
    assert ours["id"] == theirs["id"]
    for line in (ours, theirs):
        assert (line["key"], line["status"], line["output"]) == ("team-a", 200, usage["completion_tokens"])
        assert line["prompt"] == usage["prompt_tokens"]


def test_a_resumed_stream_says_so_in_the_router_s_lines(estate: ObservedEstate) -> None:
    resumed = [line for line in log_lines(estate.router) if line["event"] == "stream resumed"]
    assert [line["cause"] for line in resumed] == ["lost", "lost"]
    for line in resumed:
        assert access_line(estate.router, id=line["id"])["resumes"] == 1


@pytest.mark.parametrize(
    ("path", "headers", "body", "status", "error"),
    [
        (CHAT, {}, b"{}", 401, "invalid_api_key"),
        (CHAT, {"Authorization": "Bearer ow-wrong"}, b"{}", 401, "invalid_api_key"),
        ("/info", KEY_HEADER, None, 403, "forbidden"),
        ("/nothing", KEY_HEADER, None, 404, None),
        (CHAT, KEY_HEADER, b"{", 400, "invalid_json"),
        (CHAT, KEY_HEADER | {"Content-Type": "text/plain"}, b"{}", 415, None),
        (CHAT, KEY_HEADER, b'{"messages": []}', 400, None),
    ],
)
def test_a_rejected_request_has_a_line_too(
    estate: ObservedEstate, path: str, headers: dict[str, str], body: bytes | None, status: int, error: str | None
) -> None:
    label = f"rejected {status} {path} {body!r} {len(str(headers))}"
    headers = {"Content-Type": "application/json"} | headers | {"X-Request-Id": label}
    method = "GET" if body is None else "POST"
    answer = httpx.request(method, estate.router.url + path, content=body, headers=headers, timeout=60)
    line = access_line(estate.router, label=label)
    assert (line["status"], line["method"], line["path"]) == (answer.status_code, method, path)
    assert answer.status_code == status
    assert line.get("key") == (None if status == 401 else "team-a")
    if error is not None:
        assert line["error"] == error
    assert line["id"] and line["seconds"] >= 0


def test_a_client_that_leaves_in_mid_stream_has_a_line(estate: ObservedEstate) -> None:
    headers = {"X-Request-Id": "gone"}
    with httpx.stream("POST", estate.instance.url + CHAT, json=chat_body(2, 250, stream=True), headers=headers) as one:
        assert next(one.iter_lines())
    line = access_line(estate.instance, label="gone")
    assert (line["status"], line["reason"]) == (200, "abort")


def send_raw(server: Server, head: bytes) -> None:
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(head)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_a_client_forges_no_line_and_commands_no_terminal(estate: ObservedEstate) -> None:
    before = len(estate.instance.log().splitlines())
    path = b'/x%0A%1b[2J"%20key="ops'
    send_raw(
        estate.instance,
        b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: a\x9b2J\r\nConnection: close\r\n\r\n" % path,
    )
    line = access_line(estate.instance, label="a\x9b2J")
    assert (line["path"], line["status"]) == ('/x\n\x1b[2J" key="ops', 400)
    assert all(line.isprintable() and line.isascii() for line in estate.instance.log().splitlines()[before:])


def test_what_is_no_http_has_a_line_too(estate: ObservedEstate) -> None:
    send_raw(estate.instance, b"GET /no-http HTTP/1.1\r\nHost: x\r\nX-Request-Id: \x1b[2J\r\n\r\n")
    line = access_line(estate.instance, path="/no-http")
    assert (line["method"], line["status"], line["error"]) == ("GET", 400, "invalid_http")
    send_raw(estate.instance, b"\x16\x03\x01\x02\x00")
    line = access_line(estate.instance, path="-")
    assert (line["status"], line["error"]) == (400, "invalid_http")


def test_probes_and_messages_between_processes_are_not_logged_each_second(estate: ObservedEstate) -> None:
    for server in (estate.instance, estate.router):
        assert httpx.get(server.url + "/health").status_code == 200
        paths = {line["path"] for line in log_lines(server) if line["event"] == "request"}
        assert not paths & {"/health", "/live", "/metrics", "/internal/probe", "/internal/register"}


def test_no_log_has_a_prompt_an_output_or_a_key(estate: ObservedEstate) -> None:
    body = chat_body(0, 4) | {"messages": [{"role": "user", "content": SECRET}], "made_up_field": SECRET}
    headers = KEY_HEADER | {"X-Request-Id": "secret"}
    answer = httpx.post(estate.router.url + CHAT, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200
    access_line(estate.router, label="secret")
    access_line(estate.instance, label="secret")
    for server in (estate.instance, estate.router):
        assert SECRET not in server.log() and USER_KEY not in server.log()
    [unknown] = [line for line in log_lines(estate.instance) if line["event"] == "request has unknown fields"]
    assert (unknown["fields"], unknown["label"]) == ("made_up_field", "secret")
    httpx.post(estate.router.url + CHAT, json=body, headers=headers | {"X-Request-Id": "again"}, timeout=60)
    access_line(estate.instance, label="again")
    named = [line for line in log_lines(estate.instance) if line["event"] == "request has unknown fields"]
    assert named == [unknown], "each name is logged once"


def test_the_model_s_name_and_role_are_on_every_series_of_an_instance(scrapes: dict[str, str]) -> None:
    samples = [line for line in scrapes["onward"].splitlines() if not line.startswith("#")]
    assert len(samples) > 300
    assert all(f'model_name="{MODEL}"' in line and 'role="mixed"' in line for line in samples)
