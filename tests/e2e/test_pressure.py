"""A KV pool so small that requests are preempted many times: outputs equal the undisturbed ones."""

import pytest

from tests.e2e.server import Server
from tests.e2e.streams import chat_body, run_streams

BODIES = [chat_body(i, 80) for i in range(32)]
NUM_BLOCKS = 24
Result = tuple[str, list[int], list[str], int]


@pytest.fixture(scope="module")
def expected() -> list[Result]:
    with Server() as big:
        streams = run_streams(big.url, BODIES)
        assert big.metrics()["onward_preemptions_total"] == 0
    return [stream.result() for stream in streams]


@pytest.mark.parametrize("transport", ["shm", pytest.param("zmq", marks=pytest.mark.full)])
def test_preempted_streams_equal_those_of_a_big_pool(transport: str, expected: list[Result]) -> None:
    # Two or three of the thirty-two fit at their full length.
    with Server("--transport", transport, "--num-kv-blocks", str(NUM_BLOCKS)) as small:
        streams = run_streams(small.url, BODIES)
        metrics = small.metrics()
        blocks = small.get("/info")["kv_blocks"]
    assert metrics["onward_preemptions_total"] >= 10
    assert [stream.result() for stream in streams] == expected
    assert blocks["free"] + blocks["cached"] == NUM_BLOCKS, "at idle every block is free or cached"
