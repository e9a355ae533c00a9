"""Requests are served in the order of their arrival at the engine. No other machine's clock has a say in it."""

from onward.api.engine_link.request_tracker import RequestTracker
from onward.engine.scheduling import scheduling_policy
from onward.obs.metrics import Registry
from onward.proto.engine import Submit
from onward.proto.handoff import PrefillRequest
from onward.proto.sampling_params import SamplingParams
from onward.router.client_request import RequestMetadata, build_client_request, stream_from_record
from onward.router.client_stream import ClientStream
from tests.engine.harness import Harness
from tests.engine.pd_cluster import Cluster


def order_of_service(harness: Harness) -> list[str]:
    """The requests in the order in which they get a slot, one at a time."""
    served: list[str] = []
    while harness.clients.keys() - set(served):
        while harness.plan() is not None:
            pass
        harness.answer()
        served += [name for name, client in harness.clients.items() if client.tokens and name not in served]
    return served


def one_slot() -> Harness:
    return Harness(max_num_seqs=1, max_steps_in_flight=1)


def test_requests_of_one_turn_are_served_in_the_order_in_which_they_came() -> None:
    harness = one_slot()
    for name in ("z", "y", "a", "m"):
        harness.submit(name, [1, 2], max_tokens=1)
    assert order_of_service(harness) == ["z", "y", "a", "m"]


def test_time_that_was_waited_elsewhere_counts() -> None:
    harness = one_slot()
    harness.now_s = 1000.0
    harness.submit("new", [1, 2], max_tokens=1)
    harness.submit("resumed", [1, 2], max_tokens=1, waited_s=2.0)
    assert order_of_service(harness) == ["resumed", "new"]


def test_credit_for_waiting_is_bounded() -> None:
    harness = one_slot()
    harness.submit("here", [1, 2], max_tokens=1)
    harness.now_s = scheduling_policy.MAX_WAIT_CREDIT_S + 1.0
    harness.submit("claims-years", [1, 2], max_tokens=1, waited_s=1e8)
    assert order_of_service(harness) == ["here", "claims-years"]


def test_a_resubmission_to_the_same_engine_keeps_its_place() -> None:
    harness = one_slot()
    first = harness.submit("first", [1, 2], max_tokens=1)
    harness.now_s = 5.0
    harness.submit("second", [1, 2], max_tokens=1)
    harness.now_s = 900.0
    harness.resubmit(first)
    assert order_of_service(harness) == ["first", "second"]


def test_a_prompt_at_a_prefill_instance_brings_its_waiting_time_and_no_clock() -> None:
    cluster = Cluster()
    cluster.decode.now_s = 50.0
    cluster.submit("a", list(range(1, 30)), waited_s=7.0)
    cluster.prefill.now_s = 9000.0
    cluster.decode.core.plan(50.0)
    [prefill] = [m for _, m in cluster.decode.core.take_handoff_messages().to_prefill if isinstance(m, PrefillRequest)]
    assert prefill.waited_s == 7.0
    cluster.prefill.core.receive_from_decode("d", prefill, 9000.0)
    [request] = cluster.prefill.core._live.values()
    assert request.arrival_s == 8993.0


def test_an_api_process_tells_how_long_a_request_has_waited_in_all() -> None:
    tracker = RequestTracker(Registry())
    tracker.engine_up("engine-1", 100.0)
    [first] = tracker.submit(Submit(0, "a-0", 0, [1], SamplingParams(1), waited_s=3.0), 100.0).send
    tracker.engine_gone("engine-1", 101.0)
    [again] = tracker.engine_up("engine-2", 140.0).send
    assert isinstance(first, Submit) and isinstance(again, Submit)
    assert (first.waited_s, again.waited_s) == (3.0, 43.0)


def test_a_router_tells_how_long_a_request_has_waited_whatever_its_wall_clock_says() -> None:
    for wall_s in (0.0, 1e9, 4e9):
        origin = build_client_request("/v1/completions", b"{}", RequestMetadata("r", 1, wall_s, arrived_at_s=50.0))
        stream = ClientStream(origin, 0)
        stream.begin_attempt("i1", 51.0)
        assert stream.build_attempt(58.0, []).waited_s == 8.0


def test_a_stream_that_another_router_takes_up_keeps_its_waiting_time() -> None:
    origin = build_client_request("/v1/completions", b"{}", RequestMetadata("r", 1, 1e9, arrived_at_s=50.0))
    stream = ClientStream(origin, 0)
    stream.begin_attempt("i1", 51.0)
    taken_up = stream_from_record(stream.build_attempt(58.0, []), 7000.0)
    taken_up.begin_attempt("i2", 7001.0)
    assert taken_up.build_attempt(7002.0, []).waited_s == 10.0
