"""What a peer or our own worker says of a request that has just ended, before the loop has come round to telling them."""

import pytest

from tests.engine.pd_cluster import Cluster

NUM_TURNS = 12


@pytest.mark.parametrize("num_turns", range(NUM_TURNS))
@pytest.mark.parametrize("num_blocks", [64, 12], ids=["room for all", "too small"])
def test_whatever_is_said_of_a_request_that_was_just_aborted_harms_nobody(num_turns: int, num_blocks: int) -> None:
    cluster = Cluster(num_blocks=num_blocks)
    fields = {"max_tokens": 6, "is_routed": True}
    ended = [cluster.submit(f"ended{i}", [i + 1] * 14, **fields) for i in range(4)]
    other = cluster.submit("other", list(range(40, 54)), max_tokens=6)
    for _ in range(num_turns):
        cluster.turn()
        cluster.pass_time(0.05)
    for client in ended:
        cluster.decode.abort(client.submit.request_id)
    cluster.report()
    cluster.deliver()
    cluster.report()
    cluster.settle(seconds=3.0)
    assert other.tokens == cluster.decode.expected(other)
    cluster.check_idle()
