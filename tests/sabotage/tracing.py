"""Deliberate bugs in traces: what joins a trace, what is lost, and what it costs."""

from collections.abc import Callable
from typing import Any

import msgspec

from onward.api.lifecycle import stream_formatters
from onward.engine.core import EngineCore
from onward.engine.handoff.prefill_service import PrefillService
from onward.engine.request_phases import PhaseLog
from onward.obs.request_trace import EnginePhaseSpans, RequestTrace
from onward.obs.span_exporter import SpanExportThread
from onward.obs.trace_context import TraceSampler
from onward.obs.tracer import Tracer
from onward.pd.decode_handoff_protocol import DecodeHandoffProtocol
from onward.proto.handoff import PrefillRequest
from onward.proto.router import Attempt
from onward.proto.trace import RequestPhases
from onward.router.client_stream import ClientStream
from onward.router.endpoints import generation
from onward.router.upstream_client import UpstreamClient
from onward.web import access_log
from tests.sabotage.patches import Patches, Sabotage

ROUTER = "tests/router/test_tracing.py::"
CONTEXT = "tests/obs/test_trace_context.py::"
EXPORTER = "tests/obs/test_span_exporter.py::"
PHASES = "tests/engine/test_request_phases.py::"
SPANS = "tests/obs/test_request_trace.py::"
API = "tests/api/test_tracing.py::"
THREE_ATTEMPTS = "test_a_stream_that_is_cut_twice_is_one_trace_with_three_linked_attempts"
JOINED = "test_a_client_s_trace_is_joined_and_passed_on"


def _attempts_are_not_linked(patch: Patches) -> None:
    patch.put(RequestTrace, "link_to", lambda self, span, trace_id, span_id, relation: None)


def _records_have_no_trace(patch: Patches) -> None:
    def stream_from_record(original: Callable, attempt: Attempt, now_s: float) -> ClientStream:
        return original(msgspec.structs.replace(attempt, trace=None), now_s)

    patch.around(generation, "stream_from_record", stream_from_record)


def _cursors_have_no_trace(patch: Patches) -> None:
    patch.put(stream_formatters, "trace_id_in_cursor", lambda request_id, context: "")


def _cursors_are_not_asked_for_their_trace(patch: Patches) -> None:
    def context_of_cursor(original: Callable, self: Tracer, cursor: Any) -> Any:
        return original(self, msgspec.structs.replace(cursor, trace_id=""))

    patch.around(Tracer, "context_of_cursor", context_of_cursor)


def _clients_traces_are_not_read(patch: Patches) -> None:
    patch.put(access_log, "parse_traceparent", lambda traceparent, tracestate=None: None)


def _instances_are_not_told_the_trace(patch: Patches) -> None:
    def send_attempt(original: Callable, self: UpstreamClient, url: str, attempt: Attempt) -> Any:
        return original(self, url, msgspec.structs.replace(attempt, trace=None))

    patch.around(UpstreamClient, "send_attempt", send_attempt)


def _everything_is_sampled(patch: Patches) -> None:
    patch.put(TraceSampler, "is_sampled", lambda self, trace_id, parent: True)


def _queue_has_no_bound(patch: Patches) -> None:
    patch.put(SpanExportThread, "put", lambda self, span: self._queue.append(span))


def _every_failure_is_logged(patch: Patches) -> None:
    def take_batch(original: Callable, self: SpanExportThread) -> list:
        self._has_failed = False
        return original(self)

    patch.around(SpanExportThread, "_take_batch", take_batch)


def _phases_follow_their_tokens(patch: Patches) -> None:
    def take(original: Callable, self: EngineCore) -> list:
        messages = original(self)
        return sorted(messages, key=lambda pair: isinstance(pair[1], RequestPhases))

    patch.around(EngineCore, "take_api_messages", take)


def _no_phase_has_a_cause(patch: Patches) -> None:
    def enter(original: Callable, self: PhaseLog, phase: str, num_tokens: int, **fields: Any) -> None:
        original(self, phase, num_tokens, **fields | {"cause": ""})

    patch.around(PhaseLog, "enter", enter)


def _dead_engines_leave_phases_open(patch: Patches) -> None:
    patch.put(EnginePhaseSpans, "engine_lost", lambda self, now_s, cause: None)


def _prefill_instances_report_no_phases(patch: Patches) -> None:
    patch.put(PrefillService, "_report_phases", lambda self, task, now_s, cause="": None)


def _prefill_instances_are_not_sent_the_label(patch: Patches) -> None:
    def request_prefill(original: Callable, self: Any, peer: str, prefill: PrefillRequest, now_s: float) -> None:
        original(self, peer, msgspec.structs.replace(prefill, client_request_id=""), now_s)

    patch.around(DecodeHandoffProtocol, "request_prefill", request_prefill)


TABLE = [
    Sabotage(
        "attempts-not-linked",
        "attempts at one stream are not linked to each other",
        _attempts_are_not_linked,
        [ROUTER + THREE_ATTEMPTS],
    ),
    Sabotage(
        "records-without-trace",
        "a router that continues another's stream begins a trace of its own",
        _records_have_no_trace,
        [ROUTER + "test_a_stream_that_another_router_continues_stays_in_its_trace"],
    ),
    Sabotage(
        "cursors-without-trace",
        "the cursors of a stream do not name the trace that its client began",
        _cursors_have_no_trace,
        [API + "test_a_stream_that_is_made_again_stays_in_the_trace_that_its_client_began"],
    ),
    Sabotage(
        "cursors-not-asked-for-their-trace",
        "a stream that no process remembers leaves the trace that its client began",
        _cursors_are_not_asked_for_their_trace,
        [ROUTER + "test_a_stream_that_no_process_remembers_stays_in_its_trace[headers1]"],
    ),
    Sabotage(
        "client-traces-ignored",
        "a client's traceparent is not honoured",
        _clients_traces_are_not_read,
        [ROUTER + JOINED],
    ),
    Sabotage(
        "instances-not-told-the-trace",
        "instances behind a router begin traces of their own",
        _instances_are_not_told_the_trace,
        [ROUTER + JOINED, ROUTER + THREE_ATTEMPTS],
    ),
    Sabotage(
        "all-requests-sampled",
        "neither the ratio nor a client's own decision keeps a request from being traced",
        _everything_is_sampled,
        [
            CONTEXT + "test_a_ratio_samples_its_share_of_the_traces_and_every_process_decides_alike",
            CONTEXT + "test_a_client_s_own_decision_holds_unless_the_sampler_ignores_it",
            ROUTER + "test_a_request_that_is_not_sampled_has_no_spans_and_no_instance_makes_any",
        ],
    ),
    Sabotage(
        "span-queue-unbounded",
        "a collector that hangs fills the server's memory with spans",
        _queue_has_no_bound,
        [EXPORTER + "test_a_collector_that_hangs_holds_up_neither_requests_nor_the_way_out"],
    ),
    Sabotage(
        "every-failed-export-logged",
        "a collector that is away fills the log",
        _every_failure_is_logged,
        [EXPORTER + "test_what_is_not_taken_is_counted_and_said_once"],
    ),
    Sabotage(
        "phases-after-their-tokens",
        "the end of a request is told before its last phases, which nothing reads then",
        _phases_follow_their_tokens,
        [PHASES + "test_a_phase_is_told_with_its_age_and_before_the_tokens_that_end_it"],
    ),
    Sabotage(
        "phases-without-causes",
        "preemptions and dead workers do not appear in traces",
        _no_phase_has_a_cause,
        [
            PHASES + "test_a_preempted_request_waits_again_and_says_why",
            PHASES + "test_a_dead_worker_is_a_cause_of_its_own",
        ],
    ),
    Sabotage(
        "dead-engines-not-in-traces",
        "a dead engine does not appear in the traces of its requests",
        _dead_engines_leave_phases_open,
        [SPANS + "test_a_dead_worker_and_a_dead_engine_end_phases_with_an_error"],
    ),
    Sabotage(
        "prefill-instances-not-in-traces",
        "what a prefill instance does for a request is not in the request's trace",
        _prefill_instances_report_no_phases,
        [
            PHASES + "test_a_prefill_instance_reports_its_share_of_a_traced_request_to_the_decode_instance",
            PHASES + "test_a_prefill_instance_whose_worker_dies_reports_the_phases_so_far",
        ],
    ),
    Sabotage(
        "labels-not-sent-to-prefill-instances",
        "a prefill instance's log does not have the client's label",
        _prefill_instances_are_not_sent_the_label,
        [PHASES + "test_both_instances_log_the_client_s_label_when_a_handoff_fails"],
    ),
]
