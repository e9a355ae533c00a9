"""KV memory of decode and prefill instances that outlives a worker: streams go on, handoffs begin anew, nothing leaks."""

import pytest

from onward.engine.request import RequestStatus
from onward.proto.handoff import PrefillDone
from tests.engine.pd_cluster import Cluster, Instance
from tests.engine.test_recomputed_tokens import recomputed

PROMPT = list(range(1, 23))
LONG = [*range(1, 60)]
OTHER = list(range(30, 52))


def run_turns(cluster: Cluster, count: int) -> None:
    for _ in range(count):
        cluster.turn()
        cluster.check()


def cluster_with_a_stream_and_a_lease(**config: object) -> Cluster:
    """One request runs at the decode instance, and a peer writes the KV of another one."""
    cluster = Cluster(prefill={"max_num_batched_tokens": 8}, **config)
    client = cluster.submit("running", PROMPT, max_tokens=40)
    for _ in range(200):
        if len(client.tokens) >= 3:
            break
        cluster.turn()
    cluster.submit("granted", LONG, max_tokens=8)
    for _ in range(200):
        if granted(cluster.decode) and cluster.prefill.plane.pushes:
            break
        cluster.turn()
    run_turns(cluster, 2)
    assert granted(cluster.decode), "its prompt is being computed and pushed"
    return cluster


def granted(instance: Instance) -> list[str]:
    return [r.request_id for r in instance.core._live.values() if r.status is RequestStatus.GRANTED]


def finish(cluster: Cluster) -> None:
    cluster.settle(seconds=3.0)
    for client in cluster.decode.clients.values():
        expected = cluster.decode.expected(client)
        assert client.tokens == (expected if client.finish_reason != "abort" else expected[: len(client.tokens)])
    cluster.check_idle()


def test_a_decode_worker_s_death_costs_running_streams_the_steps_in_flight_and_ends_every_lease() -> None:
    cluster = cluster_with_a_stream_and_a_lease(max_steps_in_flight=1, prefix_caching=False)
    decode = cluster.decode
    plan = decode.plan()
    assert plan is not None
    decode.crash_worker(keeps_memory=True)
    cluster.check()
    counts = decode.core.scheduler.pool.count_by_state()
    assert (counts["leased"], counts["quarantined"]) == (0, 0)
    assert granted(decode) == []
    finish(cluster)
    assert recomputed(decode) == {"worker": sum(run.num_tokens for run in plan.run)}


def test_the_request_whose_lease_ended_asks_its_peer_again() -> None:
    cluster = cluster_with_a_stream_and_a_lease()
    cluster.decode.crash_worker(keeps_memory=True)
    cluster.seen.clear()
    finish(cluster)
    assert len([message for message in cluster.seen if isinstance(message, PrefillDone)]) == 1


def test_blocks_of_a_revoked_lease_are_free_again_when_the_worker_is_dead_and_its_writers_are_quiet() -> None:
    cluster = cluster_with_a_stream_and_a_lease()
    cluster.prefill.plane.stalled = True
    cluster.decode.abort("granted")
    cluster.pass_time(0.1)
    assert cluster.decode.core.scheduler.pool.num_quarantined
    cluster.prefill.plane.stalled = False
    cluster.decode.crash_worker(keeps_memory=True)
    assert not cluster.decode.core.scheduler.pool.num_quarantined
    finish(cluster)


def test_memory_that_a_peer_may_still_write_is_not_kept_and_its_late_write_changes_nothing() -> None:
    cluster = cluster_with_a_stream_and_a_lease()
    old_memory = cluster.decode.worker.memory
    cluster.prefill.plane.stalled = True
    cluster.decode.crash_worker(keeps_memory=True)
    assert cluster.decode.worker.memory is not old_memory
    cluster.prefill.plane.stalled = False
    finish(cluster)


@pytest.mark.parametrize("num_turns", range(0, 12, 2))
def test_streams_are_exact_whenever_a_decode_worker_dies(num_turns: int) -> None:
    cluster = Cluster(prefill={"max_num_batched_tokens": 8}, num_blocks=32)
    for number, prompt in enumerate((PROMPT, LONG, OTHER)):
        cluster.submit(f"r{number}", prompt, max_tokens=12)
    for _ in range(4):
        run_turns(cluster, num_turns)
        cluster.decode.crash_worker(keeps_memory=True)
        cluster.check()
    finish(cluster)


# Prefill.


def test_a_prefill_worker_killed_in_mid_push_leaves_its_cached_blocks_and_holds_nothing_for_the_push() -> None:
    cluster = cluster_with_a_stream_and_a_lease()
    prefill = cluster.prefill
    cached = set(prefill.core.scheduler.pool.cached_hashes)
    assert prefill.core.scheduler.pool.count_by_state()["sending"]
    assert cached
    prefill.crash_worker(keeps_memory=True)
    cluster.check()
    assert not prefill.core.scheduler.pool.count_by_state()["sending"]
    assert set(prefill.core.scheduler.pool.cached_hashes) == cached
    finish(cluster)


def test_a_prompt_whose_push_broke_off_is_computed_from_the_kept_blocks() -> None:
    """By the same peer, where no other one and not the decode instance itself may compute it."""
    cluster = cluster_with_a_stream_and_a_lease(local_prefill=False)
    run_turns(cluster, 3)
    cluster.prefill.crash_worker(keeps_memory=True)
    num_plans = len(cluster.prefill.all_plans)
    finish(cluster)
    plans = cluster.prefill.all_plans[num_plans:]
    assert 0 < sum(run.num_tokens for plan in plans for run in plan.run) < len(LONG) // 2


def test_a_stopping_push_is_over_with_its_worker() -> None:
    cluster = cluster_with_a_stream_and_a_lease()
    cluster.prefill.plane.stalled = True
    cluster.decode.abort("granted")
    for _ in range(3):
        cluster.turn(planes=False)
    assert cluster.prefill.core.scheduler.outgoing_handoffs.num_sending
    cluster.prefill.crash_worker(keeps_memory=True)
    assert not cluster.prefill.core.scheduler.outgoing_handoffs.num_sending
    finish(cluster)


@pytest.mark.parametrize("num_turns", range(1, 12, 2))
def test_streams_are_exact_whenever_a_prefill_worker_dies(num_turns: int) -> None:
    cluster = Cluster(prefill={"max_num_batched_tokens": 8})
    for number, prompt in enumerate((PROMPT, LONG, OTHER)):
        cluster.submit(f"r{number}", prompt, max_tokens=12)
    run_turns(cluster, num_turns)
    cluster.prefill.crash_worker(keeps_memory=True)
    cluster.check()
    finish(cluster)
