"""Deliberate bugs in what operators see: logs and metrics."""

from collections.abc import Callable
from statistics import median
from typing import Any

from starlette.types import Receive, Scope, Send

from onward import log
from onward.bench import compare, load
from onward.cli import bench
from onward.engine.request import RecomputeCause, Request
from onward.obs import metric_names, process_usage
from onward.router.core import RouterCore
from onward.web import request_id_middleware
from onward.web.access_log import AccessLog, AccessRecord
from onward.web.server import http_protocol
from tests.sabotage.patches import Patches, Sabotage

ACCESS = "tests/web/test_access_log.py::"
RECOMPUTED = "tests/engine/test_recomputed_tokens.py::"
NAMES = "tests/obs/test_metric_names.py::"
USAGE = "tests/obs/test_process_usage.py::"
LOG = "tests/test_log.py::"


def _refused_requests_are_not_logged(patch: Patches) -> None:
    def write(original: Callable, self: AccessLog, record: AccessRecord) -> None:
        if record.status is not None and record.status < 400:
            original(self, record)

    patch.around(AccessLog, "write", write)


def _log_streams_when_they_begin(patch: Patches) -> None:
    original = AccessLog.begin

    def begin(self: AccessLog, scope: Scope, label: str) -> AccessRecord:
        record = original(self, scope, label)
        self.write(record)
        return record

    patch.put(AccessLog, "begin", begin)


def _faults_have_no_line(patch: Patches) -> None:
    async def call(
        original: Callable,
        self: request_id_middleware.RequestIdMiddleware,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        access_log = self._access_log
        app = self.app

        async def inner(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, send)
            except ZeroDivisionError:
                self._access_log = None
                raise

        self.app = inner
        try:
            await original(self, scope, receive, send)
        finally:
            self.app, self._access_log = app, access_log

    patch.around(request_id_middleware.RequestIdMiddleware, "__call__", call)


def _refusals_of_bodies_are_not_noted(patch: Patches) -> None:
    patch.put(http_protocol, "note_connection_refusal", lambda scope, status, error_code: None)


def _continued_streams_have_a_first_token_again(patch: Patches) -> None:
    def add(original: Callable, self: RouterCore, stream: Any, now_s: float) -> Any:
        routing = original(self, stream, now_s)
        routing.is_continued = False
        return routing

    patch.around(RouterCore, "_add", add)


def _no_kv_is_ever_lost(patch: Patches) -> None:
    patch.put(Request, "lose_kv", lambda self, cause: None)


def _every_loss_is_a_preemption(patch: Patches) -> None:
    def lose(original: Callable, self: Request, cause: RecomputeCause) -> None:
        original(self, RecomputeCause.PREEMPTION)

    patch.around(Request, "lose_kv", lose)


def _earlier_names_are_gone(patch: Patches) -> None:
    patch.put(metric_names, "deprecated_names", lambda families: [])


def _waiting_requests_are_those_of_one_state(patch: Patches) -> None:
    rows = [row for row in metric_names.VLLM_NAMES if row[0] != "vllm:num_requests_waiting"]
    waiting = metric_names._selected("onward_requests", "state", ("waiting",))
    patch.put(metric_names, "VLLM_NAMES", (*rows, ("vllm:num_requests_waiting", waiting)))


def _dead_processes_take_their_time_along(patch: Patches) -> None:
    def sample(original: Callable, self: process_usage.ProcessUsage, processes: dict) -> None:
        original(self, processes)
        self._dead_cpu_s.clear()

    patch.around(process_usage.ProcessUsage, "sample", sample)


def _ratio_of_medians(patch: Patches) -> None:
    patch.put(compare, "median_ratio", lambda pairs: median(a for a, _ in pairs) / median(b for _, b in pairs))


def _the_second_server_gets_the_first_one_s_key(patch: Patches) -> None:
    def run(original: Callable, first: load.BenchTarget, args: Any) -> int:
        args.compare_api_key = args.compare_api_key or first.api_key
        return original(first, args)

    patch.around(bench, "_run_comparison", run)


def _fields_replace_what_every_line_has(patch: Patches) -> None:
    patch.put(log, "RESERVED_FIELDS", frozenset())


TABLE = [
    Sabotage(
        "comparison-by-medians",
        "two servers are compared by medians over all runs, which a busy machine moves, instead of pair by pair",
        _ratio_of_medians,
        ["tests/bench/test_compare.py::test_the_median_of_the_ratios_is_not_the_ratio_of_the_medians"],
    ),
    Sabotage(
        "key-sent-to-the-second-server",
        "onward bench --compare shows the key of the first server to the second",
        _the_second_server_gets_the_first_one_s_key,
        ["tests/cli/test_bench.py::test_without_a_key_of_its_own_the_second_server_gets_none"],
    ),
    Sabotage(
        "access-log-without-refusals",
        "a request that was refused has no line in the access log",
        _refused_requests_are_not_logged,
        [ACCESS + "test_a_refused_request_has_one_too"],
    ),
    Sabotage(
        "access-line-at-the-beginning",
        "a stream has its line in the access log before it has ended",
        _log_streams_when_they_begin,
        [ACCESS + "test_a_stream_s_line_comes_after_its_last_event"],
    ),
    Sabotage(
        "access-log-without-faults",
        "a request that fails by a fault of ours has no line in the access log",
        _faults_have_no_line,
        [ACCESS + "test_a_request_that_was_not_answered_has_a_line"],
    ),
    Sabotage(
        "access-log-without-refusals-of-bodies",
        "a request that is refused while its body arrives is logged as one whose client has gone",
        _refusals_of_bodies_are_not_noted,
        [
            "tests/web/test_connections.py::"
            "test_a_request_that_is_refused_while_its_body_arrives_is_logged_with_the_status_that_was_sent"
        ],
    ),
    Sabotage(
        "first-tokens-of-continued-streams",
        "a client that continues its stream has the time of its reconnection counted as a time to the first token",
        _continued_streams_have_a_first_token_again,
        ["tests/router/test_app.py::test_the_time_to_the_first_token_is_observed_once_for_a_request_over_all_attempts"],
    ),
    Sabotage(
        "recomputed-tokens-uncounted",
        "tokens that are computed again are not counted",
        _no_kv_is_ever_lost,
        [
            RECOMPUTED + "test_preempted_requests_compute_again_what_they_had",
            RECOMPUTED + "test_a_dead_worker_takes_the_kv_of_all_running_requests_along",
        ],
    ),
    Sabotage(
        "recomputed-tokens-by-a-wrong-cause",
        "tokens that a dead worker has cost count as preempted",
        _every_loss_is_a_preemption,
        [RECOMPUTED + "test_a_dead_worker_takes_the_kv_of_all_running_requests_along"],
    ),
    Sabotage(
        "earlier-metric-names-gone",
        "dashboards made for the last release are empty",
        _earlier_names_are_gone,
        [NAMES + "test_earlier_names_are_shown_beside_today_s"],
    ),
    Sabotage(
        "vllm-waiting-requests-left-out",
        "an autoscaler that reads vLLM's names does not see requests that wait at a peer",
        _waiting_requests_are_those_of_one_state,
        [NAMES + "test_vllm_s_names_are_shown_only_where_they_are_asked_for"],
    ),
    Sabotage(
        "cpu-time-goes-back",
        "a restart makes the CPU time of a process go back",
        _dead_processes_take_their_time_along,
        [USAGE + "test_the_time_of_a_dead_process_stays_in_the_sum_and_its_memory_goes"],
    ),
    Sabotage(
        "json-fields-overwritten",
        "a field of an event replaces the level or the process of a JSON line",
        _fields_replace_what_every_line_has,
        [LOG + "test_a_field_replaces_nothing_that_every_line_has"],
    ),
]
