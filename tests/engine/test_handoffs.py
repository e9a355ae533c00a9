"""Prompts that a peer computes: two real engines, and what the client of the decode instance sees."""

from collections.abc import Callable

from onward.engine.request import RequestStatus
from onward.proto.engine import TokenDelta
from onward.proto.handoff import PrefillRequest
from onward.sim.hash_worker import expected_logprobs
from tests.engine.harness import Client
from tests.engine.pd_cluster import Cluster


def test_a_prompt_computed_by_a_peer_gives_the_same_tokens() -> None:
    cluster = Cluster()
    clients = [
        cluster.submit(f"r{i}", list(range(1, 3 + 5 * i)), max_tokens=6, seed=i, temperature=1.0) for i in range(6)
    ]
    cluster.settle()
    cluster.decode.check_all_exact()
    assert all(len(client.tokens) == 6 for client in clients)
    assert cluster.decode.core.metrics.tokens.value("generated") == 36
    cluster.settle(seconds=1.0)
    cluster.check_idle()


def test_a_prompt_that_a_peer_has_in_its_cache_is_not_computed_again_and_one_that_we_have_is_not_sent() -> None:
    cluster = Cluster()
    prompt = list(range(1, 23))
    first = cluster.submit("first", prompt)
    cluster.settle()
    sent_before = cluster.decode.core._handoffs._remote._metrics.bytes.value("hash", "in")
    again = cluster.submit("again", [*prompt, 40, 41, 42])
    cluster.settle()
    assert (first.cached, again.cached) == (0, 20), "as P has found it: five blocks of four"
    moved = cluster.decode.core._handoffs._remote._metrics.bytes.value("hash", "in") - sent_before
    assert moved == 2 * 4 * 8, "only the blocks that D did not have"
    cluster.decode.check_all_exact()


def test_a_short_prompt_is_computed_where_it_is() -> None:
    cluster = Cluster(local_prefill_tokens=4)
    cluster.submit("short", [1, 2, 3])
    cluster.settle()
    assert not [message for message in cluster.seen if isinstance(message, PrefillRequest)]
    cluster.decode.check_all_exact()


def test_the_next_peer_is_asked_when_one_fails() -> None:
    cluster = Cluster(num_prefill=2)
    cluster.peers["p0"].doomed.update({f"r@d.{n}" for n in range(9)})
    client = cluster.submit("r", list(range(1, 23)))
    cluster.settle()
    asked = [message.handoff_id for message in cluster.seen if isinstance(message, PrefillRequest)]
    assert len(set(asked)) == 2
    assert client.tokens == cluster.decode.expected(client)
    assert cluster.decode.core._handoffs._remote._metrics.fallbacks.value("peer") == 1


def test_without_any_peer_that_works_the_prompt_is_computed_here_or_refused_with_an_error() -> None:
    for local_prefill in (True, False):
        cluster = Cluster(local_prefill=local_prefill, handoff_timeout_s=5.0)
        cluster.prefill.kill()
        client = cluster.submit("r", list(range(1, 23)))
        cluster.settle(seconds=8.0)
        if local_prefill:
            assert client.tokens == cluster.decode.expected(client)
        else:
            assert (client.finish_reason, client.error_code) == ("error", "pd_prefill_failed")
        cluster.check_idle()


def test_a_request_may_name_its_own_peers() -> None:
    cluster = Cluster(num_prefill=2, prefill_peers=())
    client = cluster.submit("r", list(range(1, 23)), prefill_peers=["p1"])
    cluster.settle(seconds=1.0)
    assert cluster.peers["p1"].core.metrics.steps.value("false") + cluster.peers["p1"].core.metrics.steps.value("true")
    assert client.tokens == cluster.decode.expected(client)
    assert cluster.decode.core.take_handoff_messages().prefill_peers == {"p1"}
    cluster.settle(seconds=62.0)
    assert not cluster.decode.core.take_handoff_messages().prefill_peers, "one that nobody names any more is forgotten"


def test_what_cannot_be_computed_again_here_goes_elsewhere_with_its_tokens() -> None:
    """Preempted where prompts may not be computed: if a router can move it, it is given up at once."""
    cluster = Cluster(num_blocks=12, local_prefill=False)
    clients = [cluster.submit(f"r{i}", [i + 1] * 14, max_tokens=24, is_routed=True) for i in range(3)]
    cluster.settle(seconds=2.0)
    given_up = [client for client in clients if client.finish_reason == "pd_reschedule"]
    assert given_up
    assert {client.error_code for client in given_up} <= {"pd_preempted", "pd_no_decode_blocks"}
    for client in clients:
        assert client.tokens == cluster.decode.expected(client)[: len(client.tokens)]
        assert client.finish_reason in ("length", "pd_reschedule") or not client.tokens
    cluster.check_idle()


def test_logprobs_of_given_tokens_are_scored_again_by_the_peer_and_here_alike() -> None:
    for local_prefill_tokens in (0, 1000):
        cluster = Cluster(local_prefill_tokens=local_prefill_tokens)
        told: list[TokenDelta] = []
        take = cluster.decode._take
        cluster.decode._take = lambda delta, take=take, told=told: (told.append(delta), take(delta))  # type: ignore[method-assign]
        prompt, given = list(range(1, 20)), [7, 8, 9, 10]
        cluster.submit("r", prompt, generated=given, max_tokens=8, logprobs=2, rescore_from=1)
        cluster.submit("p", prompt, generated=given, max_tokens=8, logprobs=2, prompt_logprobs=1, rescore_from=-1)
        cluster.settle()
        first = {one: next(d for d in told if d.request_id == one and d.token_ids) for one in ("r", "p")}
        assert first["r"].rescored_logprobs == [expected_logprobs(token, 2) for token in given[1:]]
        assert first["r"].prompt_logprobs is None
        assert first["p"].prompt_logprobs == [expected_logprobs(token, 1) for token in prompt[1:]]
        assert first["p"].rescored_logprobs == [expected_logprobs(token, 2) for token in given]
        assert all(delta.rescored_logprobs is None for delta in told if delta not in first.values())


def test_an_abort_of_all_at_a_prefill_instance_leaves_what_it_computes_for_others() -> None:
    """Their clients are at the decode instance, and so are the callers that may end their requests."""
    cluster = Cluster()
    client = cluster.submit("r", list(range(1, 23)))
    cluster.turn()
    own = cluster.prefill.submit("own-0", [1, 2, 3], max_tokens=50)
    assert len(cluster.prefill.core._live) == 2
    assert cluster.prefill.abort_by_name(everything=True).aborted == ["own"]
    assert own.finish_reason == "abort"
    cluster.settle()
    assert client.tokens == cluster.decode.expected(client)
    cluster.settle(seconds=1.0)
    cluster.check_idle()


def test_a_prompt_under_which_two_peers_have_died_is_computed_alone_here() -> None:
    cluster = Cluster(num_prefill=2, local_prefill_tokens=4)
    client = cluster.submit("r", list(range(1, 23)))
    assert cluster.decode.plan() is None, "peers are asked"
    for _ in range(20):
        cluster.turn(steps=False)
        for peer in cluster.peers.values():
            if (plan := peer.plan()) is not None and plan.run:
                peer.crash_worker()
    assert client.worker_crashes == 2, "the api process is told of both, and tells the next engine"
    cluster.submit("other", [4, 5], max_tokens=5)
    plan = cluster.decode.plan()
    assert plan is not None and [assign.request_id for assign in plan.assign] == ["r"]
    assert cluster.decode.plan() is None, "no other step is in flight beside it"
    cluster.settle()
    cluster.decode.check_all_exact()


def test_requests_that_come_and_go_while_there_is_no_worker_are_not_kept() -> None:
    cluster = Cluster()
    decode = cluster.decode
    decode.lose_worker()
    stays = decode.submit("stays", list(range(1, 23)))
    for number in range(500):
        decode.submit(f"r{number}", list(range(1, 23)))
        decode.abort(f"r{number}")
    assert len(decode.core.scheduler._unrouted) == 1
    decode.start_worker()
    cluster.settle()
    assert stays.tokens == decode.expected(stays)


def many_small_ones_beside(cluster: Cluster, big: Client, prompt_of: Callable[[int], list[int]], max_turns: int) -> int:
    """Twelve at a time, and another one for each that ends, until the big one has ended. How many there were."""
    small: list[Client] = []
    number = 0
    for turn in range(max_turns):
        small = [client for client in small if client.finish_reason is None]
        while len(small) < 12:
            number += 1
            small.append(cluster.submit(f"s{number}", prompt_of(number), max_tokens=16))
        cluster.turn()
        if turn % 20 == 0:
            cluster.pass_time(0.05)
        if big.finish_reason is not None:
            return number
    raise AssertionError(f"{number} that came later were served, and the one before them was not")


def test_a_preempted_request_is_not_passed_by_for_ever_by_those_whose_prompts_peers_compute() -> None:
    cluster = Cluster(num_blocks=32, prefill={"num_blocks": 256})
    before = [cluster.submit(f"b{i}", [i, *range(1, 12)], max_tokens=16) for i in range(12)]
    big = cluster.submit("big", list(range(1, 61)), max_tokens=60)
    many_small_ones_beside(cluster, big, lambda number: [number % 60, *range(1, 12)], max_turns=1000)
    assert big.tokens == cluster.decode.expected(big)
    cluster.settle(seconds=2.0)
    assert all(client.finish_reason for client in before)
    cluster.decode.check_all_exact()
    cluster.check_idle()


def test_a_long_prompt_that_a_peer_computes_is_not_passed_by_for_ever_by_short_ones_of_our_own() -> None:
    cluster = Cluster(num_blocks=32, prefill={"num_blocks": 256}, local_prefill_tokens=8)
    for i in range(12):
        cluster.submit(f"b{i}", [i, *range(1, 5)], max_tokens=40)
    for _ in range(10):
        cluster.turn()
    big = cluster.submit("big", list(range(1, 91)), max_tokens=9)
    many_small_ones_beside(cluster, big, lambda number: [number % 60, *range(1, 5)], max_turns=1000)
    assert big.tokens == cluster.decode.expected(big)
    cluster.settle(seconds=2.0)
    cluster.decode.check_all_exact()
    cluster.check_idle()


def test_a_request_that_waits_for_a_slot_is_not_passed_by_those_whose_prompts_peers_compute() -> None:
    """There are blocks for all of them, and fewer slots than requests."""
    cluster = Cluster(max_num_seqs=2, num_blocks=256, prefill={"num_blocks": 256}, local_prefill_tokens=8)
    for i in range(4):
        cluster.submit(f"b{i}", [i, *range(1, 12)], max_tokens=16)
    for _ in range(10):
        cluster.turn()
    own = cluster.submit("own", list(range(1, 6)), max_tokens=9)
    many_small_ones_beside(cluster, own, lambda number: [number % 60, *range(1, 12)], max_turns=1000)
    assert own.tokens == cluster.decode.expected(own)
    cluster.settle(seconds=2.0)
    cluster.decode.check_all_exact()
    cluster.check_idle()


def test_a_prompt_of_a_peer_that_waits_for_a_slot_is_not_passed_by_requests_of_our_own() -> None:
    """A peer offers it again and again; between two offers the free slot stays its own."""
    cluster = Cluster(max_num_seqs=1, num_blocks=256, local_prefill_tokens=8, offer_hold_s=0.01)
    for i in range(4):
        cluster.submit(f"b{i}", [i, *range(1, 5)], max_tokens=16)
    for _ in range(4):
        cluster.turn()
    far = cluster.submit("far", list(range(1, 31)), max_tokens=9)
    many_small_ones_beside(cluster, far, lambda number: [number % 60, *range(1, 5)], max_turns=1000)
    assert far.tokens == cluster.decode.expected(far)
    cluster.settle(seconds=2.0)
    cluster.decode.check_all_exact()
    cluster.check_idle()


def test_the_second_in_the_queue_keeps_its_room_from_those_whose_prompts_peers_compute() -> None:
    """There is room for `first` and `own`, or for `first` and `far`. `far` came last."""
    cluster = Cluster(num_blocks=32, local_prefill_tokens=30)
    decode = cluster.decode
    cluster.submit("runs", [1] * 60, max_tokens=6)
    while not decode.core.scheduler.running:
        cluster.turn()
    while decode.plan() is not None:
        pass
    cluster.submit("own", [2] * 28, max_tokens=4)
    cluster.submit("first", [3] * 5, max_tokens=4, priority=-1)
    cluster.submit("far", [4] * 36, max_tokens=4)
    assert decode.plan() is None, "as many steps as may be are in flight"
    for _ in range(20):
        cluster.turn(steps=False)
        for peer in cluster.peers.values():
            peer.plan()
    live = decode.core._live
    assert live["far"] in decode.core.scheduler.leases.awaiting_blocks
    for _ in range(2):
        decode.answer()
        decode.plan()
    assert [live[name].status for name in ("first", "own", "far")] == [
        RequestStatus.RUNNING,
        RequestStatus.RUNNING,
        RequestStatus.ASKED,
    ]
    cluster.settle(2.0)
    decode.check_all_exact()
    cluster.check_idle()
