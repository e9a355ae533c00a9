"""Failures that other engines had with KV between machines. The number is that of the failures page; each docstring is the
rule that keeps it out. Real engine cores and handoff machines; workers whose model is a hash, with a canary in their
memory; a wire that the test controls."""

import logging
import socket

import pytest

from onward.engine.request import RequestStatus
from onward.proto.handoff import (
    CancelHandoff,
    HandoffHeartbeat,
    LeaseGrant,
    Ping,
    PrefillDone,
    PrefillOffer,
    PrefillRequest,
    PrefillTaken,
    RefuseHandoff,
    ToDecode,
)
from onward.proto.kv_transfer import KvLayout, PushFailed, WritesComplete
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import SlotTokens, StepResult
from onward.transport.zmq_sockets import SocketPoller
from tests.engine.harness import Client
from tests.engine.pd_cluster import Cluster, Instance

PROMPT = list(range(1, 23))
"""Six blocks of four."""


def sent(cluster: Cluster, kind: type) -> list:
    return [message for message in cluster.seen if isinstance(message, kind)]


def until(cluster: Cluster, condition, **how: bool) -> None:
    """Turns until it is so."""
    for _ in range(500):
        if condition():
            return
        cluster.turn(**how)
    raise AssertionError("it never comes to that")


def granted(cluster: Cluster, request_id: str = "r") -> bool:
    request = cluster.decode.core._live.get(request_id)
    return request is not None and request.status is RequestStatus.GRANTED


def in_mid_transfer(**config: object) -> tuple[Cluster, Client]:
    """Some of the blocks have been written, and the others will be."""
    cluster = Cluster(**config)  # type: ignore[arg-type]
    client = cluster.submit("r", PROMPT)
    until(cluster, lambda: len(cluster.prefill.plane.outgoing) > 2, planes=False)
    cluster.planes.step()
    assert 0 < len(cluster.decode.plane.expected_leases["d-1"].missing) < 6
    return cluster, client


def kv_blocks(instance: Instance) -> dict[str, int]:
    return instance.core.stats(instance.now_s).kv_blocks


def ended_well(cluster: Cluster, *clients: Client) -> None:
    for client in clients:
        assert client.finish_reason == "length"
        assert client.tokens == cluster.decode.expected(client)
    cluster.check_idle()


def test_f20_blocks_that_a_late_write_may_reach_are_nobody_s_until_the_writer_is_quiet() -> None:
    """Leased until the writer is quiet: an abort gives the request up, not the blocks."""
    cluster, client = in_mid_transfer(num_blocks=12)
    cluster.prefill.plane.stalled = True
    cluster.decode.abort("r")
    assert client.finish_reason == "abort"
    others = [cluster.submit(f"o{i}", [9 + i] * 10, max_tokens=4) for i in range(3)]
    for _ in range(30):
        cluster.turn()
        assert kv_blocks(cluster.decode)["quarantined"] == 6
        cluster.check()
    cluster.prefill.plane.stalled = False
    cluster.settle(seconds=8.0)
    ended_well(cluster, *others)


def test_f21_a_slow_prefill_keeps_its_lease_and_its_blocks_as_long_as_it_lives() -> None:
    """Lease and heartbeat instead of one timeout: who is slow is not dead, and nothing is freed that is still needed."""
    cluster, client = in_mid_transfer(lease_s=1.0, prefill={"lease_s": 1.0})
    for _ in range(60):
        cluster.pass_time(0.1)
        cluster.turn(planes=False)
        assert granted(cluster)
        assert kv_blocks(cluster.prefill)["sending"] == 6
    assert len(sent(cluster, HandoffHeartbeat)) > 20
    cluster.settle()
    ended_well(cluster, client)


@pytest.mark.parametrize("when", ["asked", "offered", "granted", "pushing"])
def test_f22_a_request_that_ends_at_the_decode_side_ends_at_the_prefill_side(when: str) -> None:
    """A negative reply on every path, and at once: no time passes here."""
    cluster = Cluster(num_blocks=12)
    if when == "offered":  # there is no room for it
        cluster.submit("first", [7] * 30, max_tokens=12)
        until(cluster, lambda: cluster.decode.clients["first"].tokens)
    cluster.submit("r", PROMPT)
    reached = {
        "asked": lambda: sent(cluster, PrefillRequest),
        "offered": lambda: len(sent(cluster, PrefillOffer)) == 2 and not cluster.to_decode,
        "granted": lambda: sent(cluster, LeaseGrant),
        "pushing": lambda: cluster.prefill.plane.outgoing,
    }
    until(cluster, reached[when], planes=False)
    cluster.decode.abort("r")
    if when == "offered":
        cluster.decode.abort("first")
    cluster.settle()
    assert sent(cluster, CancelHandoff)
    cluster.check_idle()


def test_f23_a_push_that_fails_is_told_and_the_prompt_is_computed_elsewhere() -> None:
    """Negative completion: the decode side never waits for a count that cannot come."""
    cluster, client = in_mid_transfer()
    cluster.prefill.plane.drop_push("d-1")
    cluster.prefill.plane.reports.append(PushFailed("d-1", "the network is down"))
    cluster.settle()
    assert sent(cluster, CancelHandoff)[0].error.code == "pd_transfer_failed"
    ended_well(cluster, client)


def test_f24_a_refusal_of_blocks_reaches_the_prefill_side() -> None:
    """As F22: what was decided is sent, after a short hold and not after the peer's own timeout."""
    cluster = Cluster(num_blocks=12, max_num_seqs=2)
    first = cluster.submit("first", [7] * 30, max_tokens=12)
    until(cluster, lambda: first.tokens)
    late = cluster.submit("late", PROMPT)
    until(cluster, lambda: len(sent(cluster, PrefillOffer)) == 2 and not cluster.to_decode, steps=True)
    cluster.pass_time(cluster.decode.config.offer_hold_s + 0.01)
    cluster.deliver()
    assert sent(cluster, RefuseHandoff)[0].error.code == "pd_no_decode_blocks"
    assert kv_blocks(cluster.prefill)["owned"] == 0
    cluster.settle(seconds=2.0)
    ended_well(cluster, first, late)


def test_f25_a_decode_instance_that_does_not_answer_holds_up_nobody_else() -> None:
    """Bounded hold, then another one; and meanwhile the queue moves on."""
    prefill = Cluster().prefill
    layout = prefill.worker.hello().kv_layout
    assert layout is not None

    def ask(decode: str, number: int) -> None:
        sampling = SamplingParams(seed=0)
        message = PrefillRequest(number, layout, f"{decode}{number}", PROMPT, len(PROMPT), sampling)
        prefill.core.receive_from_decode(decode, message, prefill.now_s)

    for number in range(1, 4):
        ask("silent", number)
    ask("other", 1)
    offers = []
    for _ in range(5):
        prefill.plan()
        prefill.tick(0.0)
        offers += [(d, m) for d, m in prefill.core.take_handoff_messages().to_decode if isinstance(m, PrefillOffer)]
    assert ("other", PrefillOffer(1, f"{prefill.core.incarnation}.0", 6)) in offers
    assert sum(decode == "silent" for decode, _ in offers) < 3, "its memory is not asked for before it is needed"
    prefill.tick(prefill.config.lease_s + 0.1)
    assert prefill.core.stats(prefill.now_s).requests["offered"] == 0
    prefill.core.audit_idle()


def test_f26_the_same_offer_twice_takes_blocks_once() -> None:
    """Idempotent grants."""
    cluster = Cluster()
    client = cluster.submit("r", PROMPT)
    until(cluster, lambda: sent(cluster, PrefillOffer), planes=False)
    offer = ("p0", sent(cluster, PrefillOffer)[0])
    for _ in range(4):
        cluster.to_decode.append(offer)
        cluster.turn(planes=False)
    assert kv_blocks(cluster.decode)["leased"] == 6
    assert len({grant.lease_id for grant in sent(cluster, LeaseGrant)}) == 1
    assert len(sent(cluster, LeaseGrant)) > 1, "each asking was answered"
    cluster.settle()
    ended_well(cluster, client)


def test_f27_what_a_worker_says_for_a_granted_slot_is_stale() -> None:
    """Granted is not running: no step and no output before Ready is verified."""
    cluster, client = in_mid_transfer()
    core = cluster.decode.core
    request = core._live["r"]
    other = cluster.decode.submit("o", [5, 5], max_tokens=2)
    core.scheduler.take_unrouted()  # the other one runs here
    assert cluster.decode.plan() is not None
    plan = cluster.decode.plans.popleft()
    assert request.slot not in {assign.slot for assign in plan.assign}
    junk = [SlotTokens(request.slot, epoch, 0, 22, [3]) for epoch in (request.slot_epoch, 0, 99)]  # type: ignore[arg-type]
    core.commit(StepResult(plan.step, [*junk, *cluster.decode.worker.step(plan).events]), cluster.decode.now_s)
    cluster.decode.deliver()
    assert client.tokens == []
    assert cluster.decode.metric("stale", "tokens") == 3
    cluster.settle()
    ended_well(cluster, client, other)


def test_f28_leased_blocks_are_counted_and_not_given_twice() -> None:
    """Count leases, in the metrics and at admission."""
    cluster, client = in_mid_transfer(num_blocks=12, local_prefill_tokens=8)
    assert kv_blocks(cluster.decode)["leased"] == 6
    local = [cluster.submit(f"l{i}", [30 + i] * 8, max_tokens=4) for i in range(4)]
    for _ in range(20):
        cluster.turn(planes=False)
        cluster.check()
        counts = kv_blocks(cluster.decode)
        assert counts["leased"] == 6
        assert sum(counts.values()) == 12
    cluster.settle()
    ended_well(cluster, client, *local)


def test_f29_a_peer_with_a_new_incarnation_is_a_new_peer() -> None:
    """Incarnations: what the old one was asked is asked again, and nothing that it said is believed."""
    cluster = Cluster(local_prefill=False)
    cluster.holds = lambda message: isinstance(message, PrefillOffer)
    client = cluster.submit("r", PROMPT)
    until(cluster, lambda: sent(cluster, PrefillOffer))
    old = f"{cluster.prefill.core.incarnation}.0"
    cluster.restart_prefill("p0")
    cluster.settle(seconds=1.0)
    cluster.holds = lambda message: False  # now the old one's offer arrives
    cluster.settle(seconds=1.0)
    assert {grant.incarnation for grant in sent(cluster, LeaseGrant)}.isdisjoint({old})
    ended_well(cluster, client)


def test_f30_a_lease_holds_all_that_its_request_needs_to_arrive() -> None:
    """Reserve what work in flight still needs: of several that load at once, none can starve the others."""
    cluster = Cluster(num_blocks=15, max_num_seqs=8, prefill={"num_blocks": 200, "max_num_batched_tokens": 512})
    clients = [cluster.submit(f"r{i}", [i + 1] * 22, max_tokens=3) for i in range(6)]
    for _ in range(300):
        cluster.turn()
        for request in cluster.decode.core.scheduler.allocator.awaiting_kv:
            assert len(request.block_ids) == 6, "all it needs, or nothing"
    cluster.settle(seconds=4.0)
    ended_well(cluster, *clients)


def test_f31_sending_to_a_peer_that_does_not_read_never_blocks() -> None:
    """Send deadlines, never in the loop: what is not taken counts as lost."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        wires = SocketPoller()
        try:
            peer = wires.handoff_client(f"tcp://127.0.0.1:{deaf.getsockname()[1]}", "", "d")
            taken = [peer.send(Ping()) for _ in range(20_000)]
        finally:
            wires.close()
    assert not taken[-1]


def test_f32_a_word_that_arrives_with_its_deadline_counts() -> None:
    """Drain, then judge."""
    cluster = Cluster(lease_s=1.0, local_prefill=False)
    client = cluster.submit("r", PROMPT)
    held: list[tuple[str, ToDecode]] = []
    cluster.holds = lambda message: isinstance(message, PrefillDone)
    until(cluster, lambda: any(isinstance(message, PrefillDone) for _, message in cluster.to_decode))
    held += [(address, message) for address, message in cluster.to_decode if isinstance(message, PrefillDone)]
    core, now_s = cluster.decode.core, cluster.decode.now_s + cluster.decode.config.handoff_timeout_s + 1
    core.receive_from_prefill(*held[0], now_s)
    core.tick(now_s)
    cluster.decode.now_s = now_s
    cluster.decode.deliver()
    assert len(client.tokens) == 1
    cluster.holds = lambda message: False
    cluster.settle(seconds=3.0)
    ended_well(cluster, client)


def test_f33_nothing_runs_before_every_block_is_counted_and_equal() -> None:
    """Ready is verified, or nothing runs."""
    cluster, client = in_mid_transfer(kv_checksums=True)
    incarnation = f"{cluster.prefill.core.incarnation}.0"
    core = cluster.decode.core
    core.receive_from_prefill("p0", PrefillDone(1, incarnation, [5], 0, checksums=[0] * 6), cluster.decode.now_s)
    core.tick(cluster.decode.now_s)
    assert granted(cluster)
    assert client.tokens == []
    core.receive_kv_report(WritesComplete("d-1", [1] * 6), cluster.decode.now_s)
    cluster.settle()
    assert any(cancel.error.code == "pd_transfer_failed" for cancel in sent(cluster, CancelHandoff))
    ended_well(cluster, client)


def test_f34_a_slow_transfer_holds_up_no_other_prompt() -> None:
    """The loop does not block."""
    cluster = Cluster()
    slow = cluster.submit("slow", PROMPT)
    until(cluster, lambda: cluster.prefill.plane.outgoing, planes=False)
    cluster.prefill.plane.slow_targets.add(cluster.decode.plane.address)
    others = [cluster.submit(f"o{i}", [40 + i] * 9) for i in range(3)]
    for _ in range(40):
        cluster.turn()
    # Their KV cannot move either, but it is computed, and their tokens are drawn.
    computed = cluster.prefill.core._handoffs._service._tasks.values()
    assert sum(job.result is not None for job in computed) == 4
    cluster.prefill.plane.slow_targets.clear()
    cluster.settle()
    ended_well(cluster, slow, *others)


def test_f35_success_is_counted_when_the_peer_has_taken_it() -> None:
    """Count at the end."""
    cluster = Cluster()
    cluster.holds = lambda message: isinstance(message, PrefillTaken)
    client = cluster.submit("r", PROMPT)
    until(cluster, lambda: any(isinstance(message, PrefillTaken) for _, message in cluster.to_prefill))
    ended = cluster.prefill.core._handoffs._service._metrics.ended
    assert ended.value("prefill", "taken") == 0
    assert cluster.prefill.metric("finished", "handed_over") == 0, "the token is sampled, and that is not enough"
    cluster.holds = lambda message: False
    cluster.settle()
    assert ended.value("prefill", "taken") == 1
    assert cluster.prefill.metric("finished", "handed_over") == 1
    ended_well(cluster, client)


def test_f35_a_handoff_that_fails_behind_its_token_is_no_success_and_both_sides_say_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster(prefill={"lease_s": 1.0})
    cluster.loses = lambda message: isinstance(message, PrefillDone)
    with caplog.at_level(logging.INFO):
        client = cluster.submit("r", PROMPT)
        until(cluster, lambda: any(isinstance(message, PrefillDone) for message in cluster.seen))
        cluster.prefill.crash_worker()
        cluster.loses = lambda message: False
        cluster.settle(seconds=20.0)
    assert cluster.prefill.metric("finished", "handed_over") == 0
    assert cluster.prefill.metric("finished", "error") == 1
    ended_well(cluster, client)
    failed = [record.message for record in caplog.records if "handoff failed" in record.message]
    assert any("side=prefill" in line and "lost its KV memory" in line for line in failed)
    assert any("side=decode" in line and "code=pd_prefill_failed" in line for line in failed)
    finished = [record.message for record in caplog.records if "request finished" in record.message]
    assert any("role=prefill" in line for line in finished) and any("role=decode" in line for line in finished)


@pytest.mark.parametrize("lost", [PrefillTaken, PrefillDone, PrefillOffer, LeaseGrant, PrefillRequest])
def test_f36_a_lost_message_costs_a_moment_and_holds_nothing(lost: type) -> None:
    """Acknowledged messages, and leases for the rest."""
    cluster = Cluster(local_prefill=False)
    gone: list[object] = []

    def loses(message: object) -> bool:
        if isinstance(message, lost) and not gone:
            gone.append(message)
            return True
        return False

    cluster.loses = loses
    client = cluster.submit("r", PROMPT)
    cluster.settle(seconds=2.0)
    assert gone
    ended_well(cluster, client)


def test_f36_when_every_last_word_is_lost_the_lease_ends_it() -> None:
    """No watchdog of minutes."""
    cluster = Cluster()
    cluster.loses = lambda message: isinstance(message, (PrefillTaken, HandoffHeartbeat))
    client = cluster.submit("r", PROMPT)
    cluster.settle(seconds=cluster.decode.config.lease_s * 1.3)
    ended_well(cluster, client)


def test_f37_a_dead_prefill_peer_is_not_the_decode_instance_s_illness() -> None:
    """Health is about oneself."""
    cluster, client = in_mid_transfer()
    cluster.prefill.kill()
    other = cluster.submit("o", [3] * 9)
    cluster.settle(seconds=3.0)
    stats = cluster.decode.core.stats(cluster.decode.now_s)
    assert stats.worker_ready
    assert stats.stalled_s == 0
    ended_well(cluster, client, other)


def test_f37_a_slow_prefill_peer_is_no_stall_of_the_decode_instance() -> None:
    """Health is about oneself: while a peer is at work, our own worker owes nothing."""
    cluster = Cluster()
    client = cluster.submit("r", PROMPT)
    until(cluster, lambda: sent(cluster, PrefillOffer), planes=False)
    for _ in range(400):
        cluster.pass_time(0.1)
        cluster.turn(planes=False)
        assert cluster.decode.core.stats(cluster.decode.now_s).stalled_s < 1
    cluster.settle()
    assert client.tokens == cluster.decode.expected(client)


def test_peers_that_cannot_exchange_kv_say_what_differs() -> None:
    cluster = Cluster()
    hello = cluster.decode.core._handoffs._remote
    hello._layout = KvLayout("hash", "int64", 4, 99, 1, 1)
    client = cluster.submit("r", PROMPT)
    cluster.settle()
    refusal = sent(cluster, RefuseHandoff)[0].error
    assert refusal.code == "pd_layout_mismatch"
    assert "num_layers" in refusal.message and "99" in refusal.message
    assert not refusal.retryable
    later = cluster.submit("later", PROMPT)
    cluster.settle(seconds=10.0)
    assert len(sent(cluster, PrefillRequest)) == 1, "it is not asked again for every prompt"
    assert later.tokens == cluster.decode.expected(later)
    assert client.tokens == cluster.decode.expected(client)
