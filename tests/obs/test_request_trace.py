"""The spans of one request, from what the engine reports and what a process sees."""

from itertools import count

from onward.obs.request_trace import MAX_EVENTS, MAX_SPANS, EnginePhaseSpans, FinishedSpan, RequestTrace
from onward.proto.trace import PhaseChange, RequestPhases, TraceContext

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
ONE_SECOND_NS = 1_000_000_000


class Recorded:
    def __init__(self, client_span_id: str = "") -> None:
        self.spans: list[FinishedSpan] = []
        numbers = count(1)
        context = TraceContext(TRACE, True, "", client_span_id)
        self.trace = RequestTrace(
            context,
            self.spans.append,
            lambda: f"{next(numbers):016x}",
            started_at_s=10.0,
            wall_offset_s=1000.0,
            parent_span_id=client_span_id,
        )
        self.phases = EnginePhaseSpans(self.trace, ["r-0", "r-1"])

    def receive(self, now_s: float, *changes: PhaseChange, request_id: str = "r-0") -> None:
        self.phases.receive(RequestPhases(request_id, 1, list(changes)), now_s)

    def named(self, name: str) -> list[FinishedSpan]:
        return [span for span in self.spans if span.name == name]


def test_each_phase_is_a_span_below_the_server_span() -> None:
    recorded = Recorded()
    recorded.receive(11.0, PhaseChange("queue", 0.5))
    recorded.receive(12.0, PhaseChange("prefill", 0.0, num_cached_tokens=16))
    recorded.receive(13.0, PhaseChange("decode", 0.0, num_tokens=1))
    recorded.receive(15.0, PhaseChange("ended", 0.0, num_tokens=9))
    assert [span.name for span in recorded.spans] == ["onward.queue", "onward.prefill", "onward.decode"]
    queue, prefill, decode = recorded.spans
    assert (queue.start_ns, queue.end_ns) == (round(1010.5 * ONE_SECOND_NS), 1012 * ONE_SECOND_NS)
    assert prefill.attributes["gen_ai.usage.cache_read.input_tokens"] == 16
    assert (prefill.attributes["onward.tokens"], decode.attributes["onward.tokens"]) == (1, 8)
    server = recorded.trace.server_span
    assert {span.parent_span_id for span in recorded.spans} == {server.span_id}
    assert all(span.error is None for span in recorded.spans)


def test_a_preemption_is_an_event_and_no_failure() -> None:
    recorded = Recorded()
    recorded.receive(11.0, PhaseChange("decode", 0.0, num_tokens=1))
    recorded.receive(12.0, PhaseChange("queue", 0.0, "preemption", num_tokens=5))
    [decode] = recorded.spans
    assert decode.error is None and decode.attributes["onward.tokens"] == 4
    recorded.trace.end_span(recorded.trace.server_span, 13.0)
    [event] = recorded.named("request")[0].events
    assert (event.name, event.at_ns) == ("onward.preemption", 1012 * ONE_SECOND_NS)


def test_a_dead_worker_and_a_dead_engine_end_phases_with_an_error() -> None:
    recorded = Recorded()
    recorded.receive(11.0, PhaseChange("decode", 0.0))
    recorded.receive(12.0, PhaseChange("queue", 0.0, "worker_crash"))
    assert [span.error for span in recorded.named("onward.decode")] == ["worker_crash"]
    recorded.phases.engine_lost(13.0, "signal 9 (SIGKILL)")
    assert [span.error for span in recorded.named("onward.queue")] == ["engine_crash"]
    recorded.receive(14.0, PhaseChange("queue", 0.0))
    recorded.phases.close(15.0)
    assert [span.error for span in recorded.named("onward.queue")] == ["engine_crash", None]
    recorded.trace.end_span(recorded.trace.server_span, 15.0)
    assert [event.name for event in recorded.named("request")[0].events] == [
        "onward.worker_crash",
        "onward.engine_crash",
    ]


def test_the_phases_of_a_prefill_instance_are_spans_below_the_handoff() -> None:
    recorded = Recorded()
    recorded.receive(11.0, PhaseChange("handoff", 0.0))
    changes = [
        PhaseChange("queue", 60.0),  # further in the past than the handoff
        PhaseChange("prefill", 0.5, num_cached_tokens=16),
        PhaseChange("queue", 0.4, "preemption"),
        PhaseChange("queue", 0.3, "worker_crash"),
        PhaseChange("ended", 0.0),
    ]
    recorded.phases.receive(RequestPhases("r-0", 1, changes, prefill_peer="tcp://p:1"), 12.0)
    recorded.receive(13.0, PhaseChange("decode", 0.0, num_tokens=1))
    [handoff] = recorded.named("onward.handoff")
    peers = [span for span in recorded.spans if span.name.startswith("onward.peer.")]
    assert [span.name.removeprefix("onward.peer.") for span in peers] == ["queue", "prefill", "queue", "queue"]
    assert {span.parent_span_id for span in peers} == {handoff.span_id}
    assert {span.attributes["onward.prefill_instance"] for span in peers} == {"tcp://p:1"}
    assert peers[0].start_ns == handoff.start_ns and peers[1].attributes["gen_ai.usage.cache_read.input_tokens"] == 16
    assert [span.error for span in peers] == [None, None, "worker_crash", None], "a preemption is no failure"
    assert handoff.end_ns == 1013 * ONE_SECOND_NS, "the handoff itself goes on"


def test_choices_have_phases_of_their_own() -> None:
    recorded = Recorded()
    recorded.receive(11.0, PhaseChange("queue", 0.0))
    recorded.receive(11.0, PhaseChange("queue", 0.0), request_id="r-1")
    recorded.phases.close(12.0)
    assert sorted(span.attributes["onward.choice"] for span in recorded.spans) == [0, 1]


def test_no_phase_begins_before_its_request_or_ends_before_it_begins() -> None:
    """The engine's reports are timed by the engine's clock, less the time that they are under way."""
    recorded = Recorded()
    recorded.receive(10.001, PhaseChange("queue", 5.0), PhaseChange("ended", 5.0))
    [queue] = recorded.spans
    assert queue.start_ns == queue.end_ns == 1010 * ONE_SECOND_NS


def test_spans_and_events_of_one_request_are_bounded() -> None:
    recorded = Recorded()
    for number in range(MAX_SPANS):
        recorded.receive(11.0 + number, PhaseChange("prefill", 0.0), PhaseChange("queue", 0.0, "preemption"))
    recorded.phases.close(5000.0)
    assert len(recorded.spans) == MAX_SPANS
    recorded.trace.end_span(recorded.trace.server_span, 5000.0)
    [server] = recorded.named("request")
    assert (len(server.events), server.num_dropped_events) == (MAX_EVENTS, MAX_SPANS - MAX_EVENTS)


def test_what_travels_names_the_latest_attempt_and_the_client() -> None:
    recorded = Recorded(client_span_id="00f067aa0ba902b7")
    attempt = recorded.trace.open_span("onward.attempt", 11.0, "client")
    assert attempt is not None
    assert recorded.trace.attempt_context(attempt) == TraceContext(TRACE, True, attempt.span_id, "00f067aa0ba902b7")
    server = recorded.trace.server_span
    assert server.parent_span_id == "00f067aa0ba902b7"
    assert recorded.trace.server_context.span_id == server.span_id
