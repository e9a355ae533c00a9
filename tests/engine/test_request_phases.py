"""What the engine tells of a traced request: its phases in order, each told before what follows from it."""

import itertools

import pytest

from onward.engine.request_phases import MAX_CHANGES
from onward.proto.engine import RequestAccepted, TokenDeltas
from onward.proto.trace import PhaseChange, RequestPhases
from tests.engine.harness import API, Harness
from tests.engine.pd_cluster import Cluster

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def told(harness: Harness, request_id: str = "r-0") -> list[tuple[str, str]]:
    return [(change.phase, change.cause) for name, change in harness.phases if name == request_id]


def test_an_undisturbed_request_waits_is_prefilled_and_decodes() -> None:
    harness = Harness()
    client = harness.submit("r-0", [1] * 9, max_tokens=5, trace_id=TRACE)
    harness.run_until_idle()
    assert told(harness) == [("queue", ""), ("prefill", ""), ("decode", ""), ("ended", "")]
    assert [change.num_tokens for _, change in harness.phases] == [0, 0, 1, 5]
    assert client.finish_reason == "length"


def test_a_request_that_is_not_traced_is_not_told_of() -> None:
    harness = Harness()
    harness.submit("r-0", [1] * 9)
    harness.submit("r-1", [2] * 9, trace_id=TRACE)
    harness.run_until_idle()
    assert {name for name, _ in harness.phases} == {"r-1"}


def test_a_prefill_says_how_much_of_the_prompt_was_cached() -> None:
    harness = Harness()
    for _ in range(2):
        harness.submit("r-0", list(range(1, 10)), max_tokens=2, trace_id=TRACE)
        harness.run_until_idle()
    prefills = [change for _, change in harness.phases if change.phase == "prefill"]
    assert [change.num_cached_tokens for change in prefills] == [0, 8]


def test_a_phase_is_told_with_its_age_and_before_the_tokens_that_end_it() -> None:
    harness = Harness()
    harness.submit("r-0", [1] * 9, max_tokens=1, trace_id=TRACE)
    harness.plan()
    result = harness._result()
    harness.core.commit(result, 2.0)
    harness.core.tick(3.5)
    kinds = [type(message) for _, message in harness.core.take_api_messages()]
    assert kinds.index(RequestPhases) < kinds.index(TokenDeltas)
    assert RequestAccepted not in kinds


def test_ages_are_those_of_the_moment_when_the_message_is_sent() -> None:
    harness = Harness()
    harness.submit("r-0", [1] * 9, max_tokens=1, trace_id=TRACE)
    harness.plan()
    harness.core.commit(harness._result(), 2.0)
    harness.core.tick(3.5)
    [phases] = [one for _, one in harness.core.take_api_messages() if isinstance(one, RequestPhases)]
    assert phases.changes == [
        PhaseChange("prefill", 3.5),
        PhaseChange("decode", 1.5, num_tokens=1),
        PhaseChange("ended", 1.5, num_tokens=1),
    ]


def test_a_preempted_request_waits_again_and_says_why() -> None:
    harness = Harness(num_blocks=12)
    for index in range(6):
        harness.submit(f"r-{index}", [index + 1] * 9, max_tokens=24, trace_id=TRACE)
    harness.run_until_idle()
    num_preemptions = harness.metric("preemptions")
    assert num_preemptions > 3
    assert sum(change.cause == "preemption" for _, change in harness.phases) == num_preemptions
    for index in range(6):
        phases = told(harness, f"r-{index}")
        assert phases[0] == ("queue", "") and phases[-1] == ("ended", "")
        for (before, _), (after, cause) in itertools.pairwise(phases):
            assert (after == "queue") == (cause == "preemption")
            assert after != "prefill" or before == "queue"


def test_a_dead_worker_is_a_cause_of_its_own() -> None:
    harness = Harness()
    harness.submit("r-0", [1] * 9, max_tokens=8, trace_id=TRACE)
    for _ in range(3):
        harness.plan()
        harness.answer()
    harness.crash_worker()
    harness.run_until_idle()
    assert told(harness) == [
        ("queue", ""),
        ("prefill", ""),
        ("decode", ""),
        ("queue", "worker_crash"),
        ("prefill", ""),
        ("decode", ""),
        ("ended", ""),
    ]


def test_a_new_engine_tells_of_the_request_from_its_queue_on() -> None:
    harness = Harness()
    client = harness.submit("r-0", [1] * 9, max_tokens=8, trace_id=TRACE)
    for _ in range(3):
        harness.plan()
        harness.answer()
    num_before = len(harness.phases)
    harness.crash_engine()
    harness.run_until_idle()
    assert told(harness)[num_before:] == [("queue", ""), ("prefill", ""), ("decode", ""), ("ended", "")]
    assert harness.phases[num_before][1].num_tokens > 0
    assert client.tokens == harness.expected(client)


def test_a_later_submission_ends_the_phases_of_the_one_before() -> None:
    harness = Harness()
    client = harness.submit("r-0", [1] * 9, trace_id=TRACE)
    harness.resubmit(client)
    assert told(harness) == [("queue", ""), ("ended", ""), ("queue", "")]


def test_a_prompt_that_a_peer_computes_is_a_handoff() -> None:
    cluster = Cluster()
    client = cluster.submit("r-0", list(range(1, 30)), max_tokens=4, trace_id=TRACE)
    cluster.settle()
    assert client.finish_reason == "length"
    assert told(cluster.decode) == [("queue", ""), ("handoff", ""), ("decode", ""), ("ended", "")]
    assert cluster.prefill.phases == [], "a prefill instance has no api process that knows the request"


def test_a_prefill_instance_reports_its_share_of_a_traced_request_to_the_decode_instance() -> None:
    cluster = Cluster()
    for index in range(2):
        cluster.submit(f"r-{index}", list(range(1, 30)), max_tokens=4, trace_id=TRACE if index else "")
        cluster.settle()
    phases = [(peer, change.phase) for peer, change in cluster.decode.peer_phases]
    assert phases == [("p0", "queue"), ("p0", "prefill"), ("p0", "transfer"), ("p0", "ended")], "only of r-1"
    ages = [change.ago_s for _, change in cluster.decode.peer_phases]
    assert ages == sorted(ages, reverse=True)
    assert cluster.decode.peer_phases[1][1].num_cached_tokens == 28, "the prefill instance had the prompt of r-0"


def test_a_prefill_instance_whose_worker_dies_reports_the_phases_so_far() -> None:
    cluster = Cluster(num_prefill=2, local_prefill_tokens=4)
    cluster.submit("r-0", list(range(1, 23)), max_tokens=4, trace_id=TRACE)
    assert cluster.decode.plan() is None, "a peer is asked"
    while not any(peer.plan() for peer in cluster.peers.values()):
        cluster.turn(steps=False)
    for peer in cluster.peers.values():
        peer.crash_worker()
    cluster.settle()
    phases = [(peer, change.phase, change.cause) for peer, change in cluster.decode.peer_phases]
    assert phases[:3] == [("p0", "queue", ""), ("p0", "prefill", ""), ("p0", "ended", "handoff_failed")]
    assert ("p1", "prefill", "") in phases and phases[-1] == ("p1", "ended", "")


def test_both_instances_log_the_client_s_label_when_a_handoff_fails(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    cluster = Cluster(num_prefill=2, local_prefill_tokens=4)
    cluster.submit("r-0", list(range(1, 23)), max_tokens=4, client_request_id="order-17")
    assert cluster.decode.plan() is None, "a peer is asked"
    while not any(peer.plan() for peer in cluster.peers.values()):
        cluster.turn(steps=False)
    cluster.prefill.crash_worker()
    cluster.settle()
    failures = [record.message for record in caplog.records if record.message.startswith("handoff failed")]
    assert {"side=prefill" in line for line in failures} == {True, False}
    assert all("label=order-17" in line for line in failures)
    finished = [record.message for record in caplog.records if record.message.startswith("request finished")]
    assert finished and all("label=order-17" in line for line in finished), "also the lines of the prefill instance"


def test_a_handoff_that_fails_is_told_of() -> None:
    cluster = Cluster()
    cluster.prefill.kill()
    client = cluster.submit("r-0", list(range(1, 30)), max_tokens=4, trace_id=TRACE)
    cluster.settle(60.0)
    assert client.finish_reason == "length"
    phases = told(cluster.decode)
    assert phases[:2] == [("queue", ""), ("handoff", "")]
    assert ("queue", "handoff_failed") in phases
    assert phases[-3:] == [("prefill", ""), ("decode", ""), ("ended", "")]


def test_nothing_is_sent_to_an_api_process_that_is_gone() -> None:
    harness = Harness()
    harness.submit("r-0", [1] * 9, trace_id=TRACE)
    harness.plan()
    harness.core.on_api_lost(API, 1.0)
    assert harness.core.take_api_messages() == []


def test_what_is_told_of_one_request_is_bounded() -> None:
    harness = Harness()
    harness.submit("r-0", [1] * 9, max_tokens=4, trace_id=TRACE)
    request = harness.core._live["r-0"]
    assert request.phases is not None
    for _ in range(2 * MAX_CHANGES):
        request.phases.enter("queue", 0, cause="preemption")
    harness.deliver()
    assert len(harness.phases) == MAX_CHANGES
