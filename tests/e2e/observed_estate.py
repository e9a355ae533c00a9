"""A router with keys in front of one instance, after a run that leaves something in every metric: load, preemptions, a dead
worker, a dead api process whose streams the router carries on, and a client that continues from its own tokens.

Also what dashboard, alert rules and vLLM's public dashboard ask for, and a check of their names against a scrape.
"""

import json
import os
import re
import signal
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from onward.web.auth.api_key_table import hash_key
from tests.e2e.cluster import RouterServer
from tests.e2e.server import Server
from tests.e2e.streams import Stream, chat_body, run_streams

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "onward.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
SCRAPE_CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"
MODEL = "smollm2-135m-instruct"
CHAT = "/v1/chat/completions"
USER_KEY = "ow-of-team-a"
KEY_HEADER = {"Authorization": f"Bearer {USER_KEY}"}
PATIENCE_S = 60.0

_QUANTILES = ("0.99", "0.95", "0.9", "0.5")
_LATENCIES = (
    "vllm:e2e_request_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_to_first_token_seconds",
)
_OF_MODEL = '{model_name="$model_name"}'
_OF_DEPLOYMENT = '{model_name=~"$Deployment_id"}'
_RANGE_LATENCIES = (_LATENCIES[0], *_LATENCIES[2:])
_MAIN_QUERIES = [
    *(
        f"histogram_quantile({quantile}, sum by(le) (rate({name}_bucket{_OF_MODEL}[$__rate_interval])))"
        for name in _LATENCIES
        for quantile in _QUANTILES
    ),
    *(
        f"rate({name}_sum{_OF_MODEL}[$__rate_interval]) / rate({name}_count{_OF_MODEL}[$__rate_interval])"
        for name in _LATENCIES
    ),
    *(
        f"rate({name}{_OF_MODEL}[$__rate_interval])"
        for name in (
            "vllm:prompt_tokens_total",
            "vllm:generation_tokens_total",
            "vllm:request_queue_time_seconds_sum",
            "vllm:request_prefill_time_seconds_sum",
            "vllm:request_decode_time_seconds_sum",
            "vllm:request_max_num_generation_tokens_sum",
        )
    ),
    *(
        f"{name}{_OF_MODEL}"
        for name in (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:gpu_cache_usage_perc",
            "vllm:kv_cache_usage_perc",
        )
    ),
    *(
        f"sum by(le) (increase({name}_bucket{_OF_MODEL}[$__rate_interval]))"
        for name in ("vllm:request_prompt_tokens", "vllm:request_generation_tokens")
    ),
    f"sum by(finished_reason) (increase(vllm:request_success_total{_OF_MODEL}[$__rate_interval]))",
]
"""All queries of vLLM's main Grafana dashboard (`grafana.json`, as of August 2026), and those of the two names that its
earlier versions had instead."""
_PERFORMANCE_QUERIES = [
    *(f"rate({name}_sum[$__interval]) / rate({name}_count[$__interval])" for name in _RANGE_LATENCIES),
    *(
        f"histogram_quantile({quantile}, sum by(le) (rate({name}_bucket[$__range])))"
        for name in _RANGE_LATENCIES
        for quantile in ("0.99", "0.90", "0.50")
    ),
    *(f"(sum(increase({name}_sum[$__range])) / sum(increase({name}_count[$__range])))" for name in _RANGE_LATENCIES),
    *(
        f"histogram_quantile({quantile}, sum by(le) (rate(vllm:inter_token_latency_seconds_bucket[$__interval])))"
        for quantile in ("0.50", "0.90", "0.99")
    ),
    *(
        f"rate(vllm:{name}[$__interval])"
        for name in ("generation_tokens_total", "prompt_tokens_total", "iteration_tokens_total_count")
    ),
]
"""All queries of its dashboard of performance (`performance_statistics.json`)."""
_REQUESTS, _PROMPT_TOKENS, _OUTPUT_TOKENS = (
    f"rate(vllm:{name}{_OF_DEPLOYMENT}[$__rate_interval])"
    for name in ("request_success_total", "prompt_tokens_total", "generation_tokens_total")
)
_REQUEST_QUERIES = [
    *(f"sum by (model_name) ({rate})" for rate in (_REQUESTS, _PROMPT_TOKENS, _OUTPUT_TOKENS)),
    *(f"sum({rate})" for rate in (_REQUESTS, _PROMPT_TOKENS, _OUTPUT_TOKENS)),
    f"sum({_PROMPT_TOKENS}) / sum({_REQUESTS})",
    *(
        f"histogram_quantile({quantile}, sum by(le, model_name) (rate({name}_bucket{_OF_DEPLOYMENT}[$__rate_interval])))"
        for name in ("vllm:e2e_request_latency_seconds", "vllm:request_prompt_tokens")
        for quantile in ("0.50", "0.90", "0.99")
    ),
    f"sum by (le, model_name) (rate(vllm:request_prompt_tokens_bucket{_OF_DEPLOYMENT}[$__rate_interval]))",
]
"""All queries of its dashboard of requests (`query_statistics.json`)."""
VLLM_QUERIES = [*_MAIN_QUERIES, *_PERFORMANCE_QUERIES, *_REQUEST_QUERIES]


def dashboard_queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def alert_queries() -> list[str]:
    """With `bool`: 0 or 1 where the alert could be judged, nothing where it has no data."""
    queries = [re.sub(r" (==|>|<) ([\d.]+)$", r" \1 bool \2", rule["expr"]) for rule in alert_rules()]
    assert all(" bool " in query for query in queries), "each alert compares with a number, at its end"
    return queries


def filled_in(query: str, *, rate_interval: str) -> str:
    """As Grafana fills in the variables of a dashboard with everything selected."""
    query = re.sub(r"\$__(rate_interval|interval|range)\b", rate_interval, query)
    query = re.sub(r'=~"\$(role|model_name|Deployment_id)"', '=~".*"', query)
    return query.replace('"$model_name"', f'"{MODEL}"')


class ObservedEstate:
    """`instance_flags` in addition to those that make preemptions certain."""

    def __init__(self, *instance_flags: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="onward-test-")
        keys = Path(self._folder.name) / "keys.toml"
        keys.write_text(f'[[key]]\nname = "team-a"\nhash = "{hash_key(USER_KEY)}"\n')
        keys.chmod(0o600)
        small = ("--num-kv-blocks", "24", "--max-num-seqs", "16", "--log-format", "json", "--metrics-names", "vllm")
        self.instance = Server(*small, *instance_flags)
        try:
            flags = ("--instances", self.instance.url, "--api-keys", str(keys), "--open-metrics")
            self.router = RouterServer(*flags, "--log-format", "json")
        except BaseException:
            self.instance.__exit__(None, None, None)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.router.__exit__(kind, fault, trace)
        self.instance.__exit__(kind, fault, trace)
        self._folder.cleanup()

    def leave_traces(self) -> None:
        """The run that the module's docstring describes."""
        self._kill_during_streams("worker", lambda on_tokens: run_streams(self.instance.url, bodies(8), on_tokens))
        self._kill_during_streams("api", self._run_routed)
        [begun] = run_streams(self.instance.url, [chat_body(1, 8)])
        run_streams(self.instance.url, [chat_body(1, 16, generated_token_ids=begun.token_ids)])
        self.scrapes_after_run = self.scrapes()

    def _run_routed(self, on_tokens: Callable[[list[Stream]], None]) -> list[Stream]:
        return run_streams(self.router.url, bodies(2), on_tokens, headers=KEY_HEADER)

    def _kill_during_streams(self, role: str, run: Callable[[Callable[[list[Stream]], None]], list[Stream]]) -> None:
        pid, has_killed = self.instance.pid(role), False

        def kill(streams: list[Stream]) -> None:
            nonlocal has_killed
            if not has_killed and any(len(stream.token_ids) >= 5 for stream in streams):
                has_killed = True
                os.kill(pid, signal.SIGKILL)

        run(kill)
        assert has_killed, "the streams ended before the kill"
        wait_until(lambda: self._has_new_process(role, pid))

    def _has_new_process(self, role: str, old_pid: int) -> bool:
        try:
            return self.instance.pid(role) != old_pid and self.instance.get("/health")["status"] == "ok"
        except (urllib.error.URLError, ValueError, OSError):
            return False

    def scrapes(self) -> dict[str, str]:
        """`/metrics` of both, by job."""
        jobs = {"onward": self.instance.url, "onward-router": self.router.url}
        return {job: httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text for job, url in jobs.items()}


def bodies(count: int) -> list[dict[str, Any]]:
    return [chat_body(index, 40) for index in range(count)]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.05)


Series = dict[str, list[dict[str, str]]]


def series_of(scrapes: dict[str, str]) -> Series:
    """The labels of each series, by the name of its samples; with those that Prometheus adds."""
    found: Series = {"up": [{"job": job, "instance": job} for job in scrapes]}
    for job, text in scrapes.items():
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append({**sample.labels, "job": job, "instance": job})
    return found


_SELECTOR = re.compile(r"\b((?:onward_|vllm:)\w+|up)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')
_GROUPING = re.compile(r"\bby ?\(([^)]*)\)")


def problems_of(query: str, series: Series) -> Iterator[str]:
    """Names and labels of the query that no series has. Where it has an alternative (`or`), values may be missing."""
    selectors = _SELECTOR.findall(query)
    if not selectors:
        yield "no metric is asked for"
    known_labels: set[str] = set()
    for name, matchers in selectors:
        found = series.get(name, [])
        known_labels.update(label for labels in found for label in labels)
        wanted = {
            label: re.compile(value if kind == "=~" else re.escape(value)) if " or " not in query else re.compile(".*")
            for label, kind, value in _MATCHER.findall(matchers)
        }
        if not any(_matches(labels, wanted) for labels in found):
            yield f"nothing has {name}{{{matchers}}}"
    for grouping in _GROUPING.findall(query):
        for label in grouping.replace(" ", "").split(","):
            if label not in known_labels:
                yield f"no series has the label {label}"


def _matches(labels: dict[str, str], wanted: dict[str, re.Pattern[str]]) -> bool:
    return all(label in labels and pattern.fullmatch(labels[label]) for label, pattern in wanted.items())
