"""A KV pool so small that requests are preempted many times: outputs equal the undisturbed ones."""

import pytest

from tests.e2e.server import Server
from tests.e2e.streams import chat_body, run_streams

BODIES = [chat_body(i, 96) for i in range(12)]


@pytest.mark.parametrize("block_size", ["16"])
def test_preempted_streams_equal_those_of_a_big_pool(block_size: str) -> None:
    with Server("--block-size", block_size) as big:
        expected = [stream.result() for stream in run_streams(big.url, BODIES)]
        assert big.metrics()["onward_preemptions_total"] == 0
    # About three of the twelve fit at their full length.
    with Server("--block-size", block_size, "--num-kv-blocks", "30", "--max-num-seqs", "12") as small:
        streams = run_streams(small.url, BODIES)
        metrics = small.metrics()
        info = small.get("/info")
    assert metrics["onward_preemptions_total"] >= 10
    assert [stream.result() for stream in streams] == expected
    blocks = info["kv_blocks"]
    assert blocks["free"] + blocks["cached"] == 30, "at idle every block is free or cached"
