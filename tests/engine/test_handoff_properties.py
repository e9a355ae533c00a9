"""Whatever the wire does to messages, and whichever process dies: the client gets its tokens, and nothing remains."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.pd_cluster import Cluster

FAULTS = ("lose", "double", "hold", "prefill_worker", "decode_worker", "prefill_instance", "stall", "abort", "time")


def _run(seed: int) -> Cluster:
    chance = random.Random(seed)
    cluster = Cluster(
        num_prefill=chance.choice([1, 2]),
        prefill={
            "num_blocks": chance.choice([16, 40]),
            "max_num_batched_tokens": chance.choice([8, 16, 32]),
            "num_draft_tokens": chance.choice([0, 3]),
        },
        num_draft_tokens=chance.choice([0, 4]),
        num_blocks=chance.choice([14, 24, 64]),
        local_prefill_tokens=chance.choice([0, 6]),
        kv_checksums=chance.random() < 0.5,
        lease_s=2.0,
    )
    faults = set(chance.sample(FAULTS, chance.randint(0, 4)))
    loss = 0.2 if "lose" in faults else 0.0
    cluster.loses = lambda message: chance.random() < loss
    if "hold" in faults:
        cluster.holds = lambda message: chance.random() < 0.5
    next_id = 0
    aborted = set()
    for _ in range(chance.randint(20, 120)):
        if chance.random() < 0.25 and next_id < 12:
            prompt = [chance.randrange(1, 5) for _ in range(chance.randint(1, 30))]
            cluster.submit(f"r{next_id}", prompt, max_tokens=chance.randint(1, 12), seed=next_id, temperature=1.0)
            next_id += 1
        if "double" in faults and cluster.to_prefill and chance.random() < 0.3:
            cluster.to_prefill.append(chance.choice(cluster.to_prefill))
        if "double" in faults and cluster.to_decode and chance.random() < 0.3:
            cluster.to_decode.append(chance.choice(cluster.to_decode))
        if "prefill_worker" in faults and chance.random() < 0.03:
            chance.choice(list(cluster.peers.values())).crash_worker(keeps_memory=chance.random() < 0.5)
        if "decode_worker" in faults and chance.random() < 0.03:
            cluster.decode.crash_worker(keeps_memory=chance.random() < 0.5)
        if "prefill_instance" in faults and chance.random() < 0.02:
            cluster.restart_prefill(chance.choice(list(cluster.peers)))
        if "stall" in faults:
            for peer in cluster.peers.values():
                peer.plane.stalled = chance.random() < 0.3
        if "abort" in faults and next_id and chance.random() < 0.1:
            name = f"r{chance.randrange(next_id)}"
            aborted.add(name)
            cluster.decode.abort(name)
        if "time" in faults and chance.random() < 0.2:
            cluster.pass_time(chance.choice([0.05, 0.5, 2.0]))
        cluster.turn(steps=chance.random() < 0.8, planes=chance.random() < 0.8)
        cluster.check()
    cluster.loses = cluster.holds = lambda message: False
    for peer in cluster.peers.values():
        peer.plane.stalled = False
    cluster.settle(seconds=12.0)
    for name, client in cluster.decode.clients.items():
        assert client.num_finishes == 1, name
        if client.finish_reason == "abort":
            assert name in aborted
        elif client.error_code == "crashed_worker":
            assert faults & {"prefill_worker", "decode_worker"}
        else:
            assert client.finish_reason in ("stop", "length"), (name, client.error_code)
            assert client.tokens == cluster.decode.expected(client), name
        assert client.tokens == cluster.decode.expected(client)[: len(client.tokens)], name
    cluster.check_idle()
    return cluster


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_every_client_gets_its_tokens_and_nothing_is_left_behind(seed: int) -> None:
    _run(seed)


@pytest.mark.full
@pytest.mark.parametrize("block", range(20))
def test_many_more_seeds_end_cleanly(block: int) -> None:
    for seed in range(block * 200, (block + 1) * 200):
        _run(seed)
