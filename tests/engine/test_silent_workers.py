"""Workers that stop without dying, between instances: who is ill is seen where it is ill, and others do not wait for it."""

from onward.engine.handoff.prefill_service import WORKER_SILENCE_TIMEOUT_S
from onward.engine.request import RequestStatus
from onward.proto.handoff import CancelHandoff, LeaseGrant, PrefillDone, PrefillOffer, PrefillRequest, RefuseHandoff
from tests.engine.harness import Client
from tests.engine.pd_cluster import Cluster

PROMPT = list(range(1, 23))


def until(cluster: Cluster, condition, **how: bool) -> None:
    for _ in range(500):
        if condition():
            return
        cluster.turn(**how)
    raise AssertionError("it never comes to that")


def pass_time(cluster: Cluster, seconds: float) -> None:
    for _ in range(round(seconds / 0.1)):
        cluster.pass_time(0.1)
        cluster.turn()


def sent(cluster: Cluster, kind: type) -> list:
    return [message for message in cluster.seen if isinstance(message, kind)]


def status(cluster: Cluster) -> RequestStatus:
    return cluster.decode.core._live["r"].status


def stalled_s(cluster: Cluster) -> float:
    return cluster.decode.core.stats(cluster.decode.now_s).stalled_s


def computed(cluster: Cluster) -> int:
    """As the router is told of it, each second."""
    return next(held.num_computed for held in cluster.decode.holding[-1].held if held.request_id == "r")


def test_while_a_peer_computes_its_word_counts_as_progress_and_our_worker_owes_nothing() -> None:
    cluster = Cluster()
    cluster.submit("r", PROMPT)
    cluster.prefill.plane.slow_targets.add(cluster.decode.plane.address)
    until(cluster, lambda: bool(sent(cluster, LeaseGrant)))
    pass_time(cluster, 2.0)
    before = computed(cluster)
    pass_time(cluster, 20.0)
    assert computed(cluster) > before + 10
    assert stalled_s(cluster) == 0


def test_a_peer_that_is_done_does_not_hide_that_our_worker_has_stopped() -> None:
    cluster = Cluster()
    cluster.submit("r", PROMPT)
    until(cluster, lambda: bool(sent(cluster, LeaseGrant)))
    cluster.decode.stop_worker()
    until(cluster, lambda: bool(sent(cluster, PrefillDone)))
    pass_time(cluster, 2.0)
    before = computed(cluster)
    pass_time(cluster, 20.0)
    assert status(cluster) is RequestStatus.GRANTED
    assert computed(cluster) == before, "a router would see that nothing moves"
    assert stalled_s(cluster) > 20, "and so does the supervisor"
    cluster.decode.continue_worker()
    cluster.settle()
    assert stalled_s(cluster) == 0
    cluster.decode.check_all_exact()


def test_a_worker_that_does_not_let_a_peer_in_is_seen_to_have_stopped() -> None:
    cluster = Cluster()
    client = cluster.submit("r", PROMPT)
    cluster.decode.stop_worker()
    until(cluster, lambda: bool(sent(cluster, PrefillOffer)))
    pass_time(cluster, 10.0)
    assert stalled_s(cluster) > 9
    cluster.decode.continue_worker()
    cluster.settle(seconds=3.0)
    assert stalled_s(cluster) == 0
    assert client.tokens == cluster.decode.expected(client)


def in_a_step_of_the_peer(**config: object) -> tuple[Cluster, Client]:
    cluster = Cluster(**config)  # type: ignore[arg-type]
    client = cluster.submit("r", PROMPT)
    until(cluster, lambda: bool(sent(cluster, LeaseGrant)))
    cluster.prefill.stop_worker()
    until(cluster, lambda: bool(cluster.prefill.plans))
    return cluster, client


def test_a_peer_whose_worker_has_stopped_says_so_long_before_the_handoff_times_out() -> None:
    cluster, client = in_a_step_of_the_peer()
    pass_time(cluster, WORKER_SILENCE_TIMEOUT_S - 2)
    assert not client.tokens, "it may only be slow"
    pass_time(cluster, 4.0)
    assert "no step" in sent(cluster, CancelHandoff)[0].error.message
    cluster.settle()
    assert client.tokens == cluster.decode.expected(client), "computed by the decode instance itself"


def test_the_next_peer_is_asked_when_the_worker_of_one_has_stopped() -> None:
    cluster, client = in_a_step_of_the_peer(num_prefill=2, local_prefill=False)
    pass_time(cluster, WORKER_SILENCE_TIMEOUT_S + 2)
    cluster.settle()
    assert client.tokens == cluster.decode.expected(client)
    assert len(sent(cluster, PrefillRequest)) == 2


def test_a_peer_whose_worker_has_stopped_takes_nothing_new_until_it_goes_on() -> None:
    cluster, _ = in_a_step_of_the_peer()
    pass_time(cluster, WORKER_SILENCE_TIMEOUT_S + 5)
    late = cluster.submit("late", PROMPT[::-1])
    cluster.settle()
    assert "no step" in sent(cluster, RefuseHandoff)[0].error.message
    assert late.tokens == cluster.decode.expected(late)
    cluster.prefill.continue_worker()
    cluster.settle(seconds=5.0)
    refusals = len(sent(cluster, RefuseHandoff))
    again = cluster.submit("again", [*PROMPT, *PROMPT])
    cluster.settle()
    assert (again.tokens, len(sent(cluster, RefuseHandoff))) == (cluster.decode.expected(again), refusals)
    cluster.settle(seconds=1.0)
    cluster.check_idle()


def test_a_worker_that_cannot_be_stopped_from_writing_is_given_up_before_the_peer_gives_up_its_memory() -> None:
    cluster, _ = in_a_step_of_the_peer()
    for _ in range(280):
        pass_time(cluster, 0.1)
        if cluster.prefill.core.worker_replacement_reason(cluster.prefill.now_s):
            break
    else:
        raise AssertionError("it is waited for without end")
    assert cluster.decode.core.worker_replacement_reason(cluster.decode.now_s) is None


def test_what_lies_ready_is_taken_although_the_worker_has_stopped_since() -> None:
    cluster = Cluster()
    client = cluster.submit("r", PROMPT)
    cluster.holds = lambda message: isinstance(message, PrefillDone)
    until(cluster, lambda: bool(sent(cluster, PrefillDone)))
    cluster.prefill.stop_worker()
    other = cluster.submit("other", PROMPT[::-1])
    pass_time(cluster, WORKER_SILENCE_TIMEOUT_S + 2)
    assert all(message.handoff_id != 1 for message in sent(cluster, CancelHandoff))
    cluster.holds = lambda message: False
    cluster.settle(seconds=1.0)
    assert client.tokens == cluster.decode.expected(client)
    assert other.tokens == cluster.decode.expected(other)
