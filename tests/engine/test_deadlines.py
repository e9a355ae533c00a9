"""A deadline ends work wherever it is: in the queue, at a peer, in a step, between two places. Nothing is left of it."""

from collections.abc import Callable

import pytest

from onward.engine.request import RequestStatus
from onward.proto.handoff import CancelHandoff, LeaseGrant, PrefillOffer, PrefillRequest
from tests.engine.harness import Client, Harness
from tests.engine.pd_cluster import Cluster, Instance

DEADLINE_S = 1.0
LATER_S = 1.1


def check_ended(client: Client) -> None:
    assert client.error is not None
    assert (client.error.code, client.error.status, client.num_finishes) == ("deadline_exceeded", 504, 1)


def waiting() -> tuple[Harness, Client]:
    harness = Harness(max_num_seqs=1)
    harness.submit("first", [9, 8, 7], max_tokens=40)
    harness.plan()
    return harness, harness.submit("late", [1, 2], max_tokens=40, deadline_in_s=DEADLINE_S)


def running() -> tuple[Harness, Client]:
    harness = Harness()
    client = harness.submit("late", [1, 2], max_tokens=40, deadline_in_s=DEADLINE_S)
    harness.plan()
    harness.answer()
    harness.plan()
    return harness, client


def prefilling() -> tuple[Harness, Client]:
    harness = Harness(max_num_batched_tokens=8)
    client = harness.submit("late", [1] * 30, max_tokens=40, deadline_in_s=DEADLINE_S)
    harness.plan()
    harness.answer()
    harness.plan()
    return harness, client


def preempting() -> tuple[Harness, Client]:
    harness = Harness(max_num_seqs=1)
    client = harness.submit("late", [1, 2, 3], max_tokens=30, priority=3, deadline_in_s=DEADLINE_S)
    harness.plan()
    harness.answer()
    harness.submit("urgent", [4, 5], max_tokens=5)
    harness.plan()
    return harness, client


STATES: dict[RequestStatus, Callable[[], tuple[Harness, Client]]] = {
    RequestStatus.WAITING: waiting,
    RequestStatus.RUNNING: running,
    RequestStatus.PREEMPTING: preempting,
}


@pytest.mark.parametrize("status", STATES)
def test_a_deadline_ends_a_request_in_this_state_and_others_go_on(status: RequestStatus) -> None:
    harness, client = STATES[status]()
    assert harness.core._live["late"].status is status
    harness.tick(DEADLINE_S - 0.2)
    assert client.finish_reason is None
    harness.tick(0.3)
    check_ended(client)
    harness.check()
    harness.run_until_idle()
    harness.core.audit_idle()
    others = [other for name, other in harness.clients.items() if name != "late"]
    assert all(other.tokens == harness.expected(other) for other in others)


def test_a_deadline_ends_a_prompt_that_is_half_computed() -> None:
    harness, client = prefilling()
    assert 0 < harness.core._live["late"].num_computed < 30
    harness.tick(LATER_S)
    check_ended(client)
    harness.run_until_idle()
    harness.core.audit_idle()


@pytest.mark.parametrize("status", STATES)
def test_a_deadline_passes_while_the_worker_is_away(status: RequestStatus) -> None:
    harness, client = STATES[status]()
    harness.lose_worker()
    harness.tick(LATER_S)
    check_ended(client)
    harness.start_worker()
    harness.run_until_idle()
    harness.core.audit_idle()


def test_a_deadline_that_has_passed_on_the_way_ends_the_request_before_it_costs_anything() -> None:
    harness = Harness()
    client = harness.submit("late", [1, 2], deadline_in_s=0.0)
    harness.tick(0.0)
    check_ended(client)
    assert harness.plan() is None


def asked_and_unheard(cluster: Cluster) -> None:
    cluster.holds = lambda message: isinstance(message, PrefillRequest)


def asked_and_queued(cluster: Cluster) -> None:
    cluster.holds = lambda message: isinstance(message, PrefillOffer)


def granted_and_untold(cluster: Cluster) -> None:
    cluster.holds = lambda message: isinstance(message, LeaseGrant)


def granted_and_computing(cluster: Cluster) -> None:
    cluster.prefill.stop_worker()


HOLD_UPS = {
    asked_and_unheard: RequestStatus.ASKED,
    asked_and_queued: RequestStatus.ASKED,
    granted_and_untold: RequestStatus.GRANTED,
    granted_and_computing: RequestStatus.GRANTED,
}


@pytest.mark.parametrize("hold_up", HOLD_UPS)
def test_a_deadline_ends_a_request_whose_prompt_is_at_a_peer(hold_up: Callable[[Cluster], None]) -> None:
    cluster = Cluster(local_prefill=False)
    hold_up(cluster)
    client = cluster.submit("late", list(range(1, 23)), max_tokens=6, deadline_in_s=DEADLINE_S)
    cluster.settle()
    assert cluster.decode.core._live["late"].status is HOLD_UPS[hold_up]
    cluster.pass_time(LATER_S)
    check_ended(client)
    release(cluster)
    cluster.settle(seconds=3.0)
    cluster.check_idle()


def in_its_queue(cluster: Cluster) -> None:
    """Another decode instance's prompt has its only slot."""
    cluster.holds = lambda message: isinstance(message, LeaseGrant)
    cluster.submit("first", [7] * 22, max_tokens=6)
    cluster.settle()


def offered(cluster: Cluster) -> None:
    cluster.holds = lambda message: isinstance(message, LeaseGrant)


def computing(cluster: Cluster) -> None:
    cluster.prefill.stop_worker()


AT_THE_PEER = {in_its_queue: RequestStatus.WAITING, offered: RequestStatus.OFFERED, computing: RequestStatus.RUNNING}


@pytest.mark.parametrize("place", AT_THE_PEER)
def test_a_peer_ends_a_prompt_at_its_deadline_though_nobody_takes_it_back(place: Callable[[Cluster], None]) -> None:
    cluster = Cluster(prefill={"max_num_seqs": 1, "max_num_batched_tokens": 100}, local_prefill=False)
    place(cluster)
    client = cluster.submit("late", list(range(1, 23)), max_tokens=6, deadline_in_s=DEADLINE_S)
    cluster.settle()
    assert late_at(cluster.prefill) is AT_THE_PEER[place]
    cluster.loses = lambda message: isinstance(message, CancelHandoff)
    cluster.pass_time(LATER_S)
    check_ended(client)
    assert late_at(cluster.prefill) is None, "the peer has it no more"
    cluster.loses = lambda message: False
    release(cluster)
    cluster.settle(seconds=8.0)
    cluster.check_idle()


def late_at(instance: Instance) -> RequestStatus | None:
    return next((r.status for r in instance.core._live.values() if r.request_id.startswith("late@")), None)


def release(cluster: Cluster) -> None:
    cluster.holds = lambda message: False
    cluster.prefill.continue_worker()


def test_a_grant_that_comes_behind_the_deadline_of_its_offer_starts_no_push() -> None:
    """The prefill instance's clock runs ahead: the offer ends there, and the grant comes before its peer was told."""
    cluster = Cluster()
    client = cluster.submit("r", list(range(1, 23)), deadline_in_s=DEADLINE_S)
    granted_and_untold(cluster)
    for _ in range(20):
        cluster.turn()
    assert any(isinstance(message, LeaseGrant) for _, message in cluster.to_prefill)
    cluster.prefill.tick(LATER_S)
    cluster.holds = lambda message: False
    cluster.deliver()
    assert not cluster.prefill.core.scheduler.outgoing_handoffs.num_sending
    cluster.settle()
    assert client.tokens == cluster.decode.expected(client)
    cluster.check_idle()
