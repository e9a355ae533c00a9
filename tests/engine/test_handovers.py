"""Prompts that a peer computes: two real engines, and what the client of the decode instance sees."""

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
