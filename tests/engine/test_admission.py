"""Admission: the queue's bounds, the error of a refused request, and each caller's own limits."""

from onward.engine.request import RequestStatus
from onward.obs.prometheus_text import render
from onward.proto.engine import CallerLimits, Submit
from onward.proto.sampling_params import SamplingParams
from tests.engine.harness import Client, Harness
from tests.engine.pd_cluster import Cluster


def retry_after_s(client: Client) -> float:
    assert client.error is not None and client.error.retry_after_s is not None
    return client.error.retry_after_s


def message(client: Client) -> str:
    assert client.error is not None
    return client.error.message


def limits(max_in_flight: int | None = None, tokens_per_minute: int | None = None) -> dict:
    return {"caller": "ann", "caller_limits": CallerLimits(max_in_flight, tokens_per_minute)}


def crowded(**config: object) -> Harness:
    """One runs, in the only slot."""
    harness = Harness(max_num_seqs=1, num_blocks=200, **config)
    harness.submit("runs", [1, 2], max_tokens=400)
    harness.plan()
    return harness


def test_the_queue_is_bounded_by_the_tokens_of_the_prompts_that_wait_in_it() -> None:
    harness = crowded(max_queue_tokens=50)
    assert harness.submit("a", [1] * 30).accepted
    refused = harness.submit("b", [2] * 21)
    assert (refused.error_code, refused.error and refused.error.status) == ("overloaded", 429)
    assert "30 tokens" in message(refused) and "50" in message(refused) and "max_queue_tokens" in message(refused)
    assert harness.submit("c", [3] * 20).accepted, "as many as may"
    assert harness.submit("d", [4], epoch=2).accepted, "one that has begun is let in"
    assert harness.metric("refusals", "queue_tokens") == 1
    harness.abort("a")
    assert harness.submit("e", [5] * 29).accepted, "who leaves makes room"


def test_a_prompt_longer_than_the_queue_s_bound_is_served_when_nobody_waits() -> None:
    harness = Harness(max_num_seqs=1, num_blocks=200, max_queue_tokens=10)
    assert harness.submit("a", [1] * 100).accepted
    harness.plan()
    assert harness.submit("b", [2] * 100).accepted, "the first to wait"
    assert harness.submit("c", [3]).error_code == "overloaded"


def test_prompts_that_get_a_free_slot_in_the_next_plan_do_not_count_as_waiting() -> None:
    harness = Harness(max_num_seqs=3, num_blocks=400, max_queue_tokens=100)
    for index, length in enumerate([100, 100, 100, 50, 50]):
        assert harness.submit(f"r{index}", [index] * length).accepted, "three for the slots, two for the queue"
    assert harness.submit("late", [9]).error_code == "overloaded"


def test_a_queue_full_of_requests_says_so_and_counts_it() -> None:
    harness = crowded(max_queue=1)
    assert harness.submit("a", [1]).accepted
    refused = harness.submit("b", [1])
    assert refused.error_code == "overloaded"
    assert "max_queue)" in message(refused)
    assert (harness.metric("refusals", "queue_requests"), harness.metric("refusals", "queue_tokens")) == (1, 0)


def test_tokens_that_a_client_has_brought_along_do_not_pass_admission() -> None:
    harness = crowded(max_queue=1)
    harness.submit("a", [1])
    assert harness.submit("b", [1], generated=[5, 6]).error_code == "overloaded"
    assert harness.submit("c", [1], epoch=1 << 20, admit_as_new=True).error_code == "overloaded"


def test_before_anything_was_measured_clients_are_told_to_come_back_soon() -> None:
    harness = crowded(max_queue=1)
    harness.submit("a", [1])
    assert retry_after_s(harness.submit("b", [1])) == 1.0


def test_the_time_to_come_back_is_how_long_the_prompts_in_front_take_at_the_rate_of_late() -> None:
    harness = Harness(max_num_seqs=1, max_num_batched_tokens=10, num_blocks=4000, max_queue_tokens=1000)
    harness.submit("long", [1] * 5000, max_tokens=1)
    for _ in range(20):  # ten tokens in half a second
        harness.plan()
        harness.now_s += 0.49
        harness.answer()
    assert harness.submit("first", [2] * 1000).accepted
    retry_s = retry_after_s(harness.submit("second", [3] * 400))
    assert 18 < retry_s < 23, "400 tokens too many, at 20 in a second"
    assert retry_after_s(harness.submit("third", [3] * 4000)) == 60.0, "and never longer than this"


def test_the_time_to_come_back_is_how_long_it_takes_until_slots_are_freed() -> None:
    harness = Harness(max_num_seqs=1, max_queue=2)
    for index in range(4):
        harness.submit(f"r{index}", [index], max_tokens=1)
        harness.run_until_idle()
        harness.now_s += 2.5
    for name in ("runs", "a", "b"):
        assert harness.submit(name, [1, 2, 3], max_tokens=30).accepted
    assert harness.submit("resumed", [1], epoch=2).accepted
    assert harness.submit("resumed-too", [1], epoch=2).accepted
    retry_s = retry_after_s(harness.submit("c", [1]))
    assert 6 < retry_s < 9, "three too many, at four in ten seconds"


def test_prompts_that_a_peer_is_to_compute_wait_too() -> None:
    cluster = Cluster(max_num_seqs=1, max_queue_tokens=50, num_blocks=200)
    cluster.holds = lambda message: True
    for name in ("a", "b"):
        assert cluster.submit(name, [1] * 40).accepted
        cluster.turn()
    assert cluster.decode.core._live["a"].status is RequestStatus.ASKED
    assert cluster.submit("c", [2] * 20).error_code == "overloaded"
    assert cluster.decode.core._waiting_tokens == 80


def test_a_prefill_instance_bounds_the_tokens_that_peers_ask_of_it() -> None:
    cluster = Cluster(prefill={"max_queue_tokens": 30, "max_num_seqs": 1}, max_num_seqs=8, num_blocks=200)
    clients = [cluster.submit(f"r{i}", [i + 1] * 25, max_tokens=3) for i in range(6)]
    cluster.settle(seconds=2.0)
    service = cluster.prefill.core._handoffs._service
    assert service is not None and service._metrics.refusals.value("prefill", "overloaded") > 0
    assert all(client.tokens == cluster.decode.expected(client) for client in clients), "they are computed elsewhere"
    cluster.check_idle()


def test_waiting_tokens_and_refusals_are_metrics() -> None:
    harness = crowded(max_queue=1)
    harness.submit("a", [1] * 17)
    harness.submit("b", [1])
    text = render(harness.core.registry.snapshot()).decode()
    assert "onward_waiting_tokens 17.0" in text
    assert 'onward_refusals_total{reason="queue_requests"} 1.0' in text


def test_a_caller_has_no_more_in_flight_than_its_limit() -> None:
    harness = Harness(max_num_seqs=1)
    ann = limits(max_in_flight=2)
    assert harness.submit("a-0", [1, 2], **ann).accepted
    assert harness.submit("b-0", [1, 2], **ann).accepted, "waiting ones count"
    refused = harness.submit("c-0", [1, 2], **ann)
    assert (refused.error_code, refused.error and refused.error.status) == ("rate_limited", 429)
    assert "2 (max_in_flight" in message(refused)
    assert retry_after_s(refused) == 1.0
    assert harness.submit("d-0", [1, 2], caller="bob", caller_limits=CallerLimits(1)).accepted, "others are not held up"
    assert harness.submit("e-0", [1, 2]).accepted
    harness.abort("a-0")
    assert harness.submit("f-0", [1, 2], **ann).accepted
    harness.run_until_idle()
    assert harness.submit("g-0", [1, 2], **ann).accepted
    assert harness.metric("refusals", "in_flight") == 1


def test_each_choice_of_a_request_counts() -> None:
    harness = Harness()
    accepted = [harness.submit(f"a-{choice}", [1, 2], **limits(max_in_flight=3)).accepted for choice in range(4)]
    assert accepted == [True, True, True, False]


def test_a_caller_s_limit_holds_over_all_api_processes() -> None:
    harness = Harness()
    submit = Submit(1, "a-0", 1, [1, 2], SamplingParams(seed=0), **limits(max_in_flight=1))
    harness.core.receive_from_api("api-2", submit, harness.now_s)
    harness.core.take_api_messages()
    assert harness.submit("b-0", [1, 2], **limits(max_in_flight=1)).error_code == "rate_limited"
    harness.core.on_api_lost("api-2", harness.now_s)
    assert harness.submit("c-0", [1, 2], **limits(max_in_flight=1)).accepted


def test_what_is_resumed_is_let_in_over_the_limit_and_counts() -> None:
    harness = Harness()
    harness.submit("a-0", [1, 2], **limits(max_in_flight=1))
    assert harness.submit("b-0", [1, 2], epoch=2, **limits(max_in_flight=1)).accepted
    harness.abort("a-0")
    assert harness.submit("c-0", [1, 2], **limits(max_in_flight=1)).error_code == "rate_limited"


def test_a_newer_epoch_of_a_request_takes_its_place_and_is_not_one_more() -> None:
    harness = Harness()
    client = harness.submit("a-0", [1, 2], **limits(1, 1000))
    harness.resubmit(client)
    assert harness.submit("a-0", [1, 2], epoch=5, admit_as_new=True, **limits(1, 1000)).accepted
    harness.run_until_idle()
    assert harness.submit("b-0", [1, 2], **limits(1, 1000)).accepted


def test_a_newer_epoch_that_is_turned_away_leaves_the_older_one_running() -> None:
    harness = Harness()
    client = harness.submit("a-0", [1] * 50, max_tokens=5, **limits(tokens_per_minute=20))
    refused = harness.submit("a-0", [1] * 50, epoch=5, admit_as_new=True, **limits(tokens_per_minute=20))
    assert refused.error_code == "rate_limited"
    harness.clients["a-0"] = client
    harness.run_until_idle()
    assert client.tokens == harness.expected(client)


def test_nobody_takes_over_the_stream_of_another_caller() -> None:
    harness = Harness()
    client = harness.submit("a-0", [1, 2, 3], max_tokens=5, caller="ann")
    thief = harness.submit("a-0", [1, 2, 3], max_tokens=5, epoch=9, admit_as_new=True, caller="bob")
    assert (thief.error_code, thief.error and thief.error.status) == ("stream_unknown", 404)
    harness.clients["a-0"] = client
    harness.run_until_idle()
    assert client.tokens == harness.expected(client)


def test_prompts_and_outputs_are_charged_and_an_empty_bucket_refuses_the_next_one() -> None:
    harness = Harness()
    ann = limits(tokens_per_minute=60)
    harness.submit("a-0", [1] * 20, max_tokens=30, **ann)
    harness.run_until_idle()
    assert harness.submit("b-0", [1] * 12, max_tokens=30, **ann).accepted, "some ten are left"
    refused = harness.submit("c-0", [1], **ann)
    assert (refused.error_code, refused.error and refused.error.status) == ("rate_limited", 429)
    assert "60 tokens per minute" in message(refused)
    assert harness.submit("d-0", [1], caller="bob", caller_limits=CallerLimits(None, 60)).accepted
    harness.run_until_idle()
    assert len(harness.clients["b-0"].tokens) == 30, "a running stream is never cut"
    refused = harness.submit("e-0", [1], **ann)
    assert 30 < retry_after_s(refused) < 34, "as many as are owed, at one in a second"
    harness.now_s += retry_after_s(refused)
    assert harness.submit("f-0", [1], **ann).accepted
    assert harness.metric("refusals", "tokens_per_minute") == 2


def test_a_resubmission_is_neither_refused_nor_charged_twice() -> None:
    harness = Harness()
    ann = limits(tokens_per_minute=100)
    client = harness.submit("a-0", [1] * 60, max_tokens=20, **ann)
    for _ in range(10):
        harness.plan()
        harness.answer()
        harness.resubmit(client)
    harness.run_until_idle()
    assert client.tokens == harness.expected(client)
    assert harness.submit("b-0", [2] * 15, max_tokens=10, **ann).accepted, "60 and 20 were used, and no more"
    assert harness.submit("c-0", [1], epoch=2, generated=[3], **ann).accepted
    assert harness.submit("d-0", [2] * 10, **ann).accepted
    assert harness.submit("e-0", [2], **ann).error_code == "rate_limited"


def test_a_request_that_is_turned_away_is_not_charged() -> None:
    harness = crowded(max_queue=1)
    harness.submit("waits", [1])
    for index in range(5):
        assert harness.submit(f"r{index}-0", [1] * 90, **limits(tokens_per_minute=100)).error_code == "overloaded"
    harness.abort("waits")
    assert harness.submit("late-0", [1] * 90, **limits(tokens_per_minute=100)).accepted


def test_idle_callers_are_forgotten() -> None:
    harness = Harness()
    for index in range(20):
        ann = {"caller": f"caller-{index}", "caller_limits": CallerLimits(None, 100)}
        harness.submit(f"r{index}-0", [1] * 9, max_tokens=3, **ann)
    harness.run_until_idle()
    assert len(harness.core._callers) == 20
    harness.tick(61.0)
    assert len(harness.core._callers) == 0


def test_a_caller_aborts_its_own_requests_and_nobody_else_s() -> None:
    harness = Harness()
    mine = harness.submit("a-0", [1, 2], caller="ann", client_request_id="red")
    yours = harness.submit("b-0", [1, 2], caller="bob", client_request_id="red")
    nobodys = harness.submit("c-0", [1, 2])
    answer = harness.abort_by_name("a", "b", "c", "red", caller="ann")
    assert (answer.aborted, answer.unknown) == (["a", "red"], ["b", "c"])
    assert (mine.finish_reason, yours.finish_reason) == ("abort", None)
    assert harness.abort_by_name(everything=True, caller="bob").aborted == ["b"]
    assert nobodys.finish_reason is None
    assert harness.abort_by_name("c").aborted == ["c"], "whoever may act for everybody"


def test_a_caller_without_a_name_does_not_abort_what_peers_ask_of_us() -> None:
    cluster = Cluster()
    client = cluster.submit("a", [1] * 30, max_tokens=3)
    cluster.turn()
    cluster.deliver()
    assert cluster.prefill.core._live
    assert cluster.prefill.abort_by_name(everything=True, caller="").aborted == []
    cluster.settle()
    assert client.tokens == cluster.decode.expected(client)
