"""What a person sees of the engine: each slot and block as it is, and a bounded amount of it."""

from collections import Counter

import msgspec
import pytest

from onward.engine.live_snapshot import map_blocks
from onward.engine.scheduling.block_pool import BlockPool
from onward.proto.live import BLOCK_STATES, MAX_BLOCK_CELLS, MAX_LIVE_REQUESTS, LiveEngine
from tests.engine.harness import Harness

NAMES = {char: name for name, char in BLOCK_STATES.items()}


def look(harness: Harness) -> LiveEngine:
    live = harness.core.live_engine(harness.now_s)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(live), type=LiveEngine)


def counted(live: LiveEngine) -> dict[str, int]:
    return {name: number for name, number in live.kv_blocks.items() if number}


def test_a_request_is_seen_waiting_then_prefilling_then_decoding_with_its_blocks() -> None:
    harness = Harness(num_blocks=32, max_num_batched_tokens=8)
    client = harness.submit("a", list(range(12)), max_tokens=4)
    assert [(one.state, one.slot) for one in look(harness).requests] == [("waiting", None)]
    seen: list[str] = []
    for _ in range(20):
        harness.tick(0.01)
        harness.plan()
        live = look(harness)
        assert Counter(NAMES[char] for char in live.block_map) == counted(live), "the map is the pool"
        for one in live.requests:
            assert one.slot is not None and one.num_blocks
            seen.append(one.state)
        harness.answer()
        if client.finish_reason:
            break
    assert list(dict.fromkeys(seen)) == ["prefilling", "decoding"]
    assert look(harness).requests == []


def test_a_preempted_request_is_seen_as_such() -> None:
    harness = Harness(num_blocks=8, block_size=4, prefix_caching=False)
    for name in "ab":
        harness.submit(name, list(range(10)), max_tokens=20)
    states: set[str] = set()
    for _ in range(60):
        harness.tick(0.01)
        harness.plan()
        states |= {one.state for one in look(harness).requests}
        if harness.plans:
            harness.answer()
    assert "preempting" in states
    assert look(harness).num_preemptions >= 1


def test_a_view_lists_so_many_requests_and_counts_the_others() -> None:
    harness = Harness(max_queue=2000)
    for number in range(MAX_LIVE_REQUESTS + 50):
        harness.submit(f"r{number}", [1, 2, 3], max_tokens=2)
    harness.plan()
    live = look(harness)
    assert (len(live.requests), live.num_requests) == (MAX_LIVE_REQUESTS, MAX_LIVE_REQUESTS + 50)
    assert sum(one.slot is not None for one in live.requests) == harness.config.max_num_seqs, (
        "those with a slot come first"
    )


@pytest.mark.parametrize("num_blocks", [1, MAX_BLOCK_CELLS, MAX_BLOCK_CELLS + 1, 100_000])
def test_a_map_of_any_pool_has_so_many_cells_at_most(num_blocks: int) -> None:
    block_map, blocks_per_cell = map_blocks(BlockPool(num_blocks, 16))
    assert 0 < len(block_map) <= MAX_BLOCK_CELLS and set(block_map) == {"."}
    assert (len(block_map) - 1) * blocks_per_cell < num_blocks <= len(block_map) * blocks_per_cell


def test_the_state_of_each_block_is_the_one_it_is_counted_in() -> None:
    pool = BlockPool(8, 4)
    owned, leased, sent, fenced, parked = (pool.allocate(1) for _ in range(5))
    pool.start_lease(leased)
    pool.start_sending(sent)
    pool.release(fenced, 3)
    pool.start_lease(parked)
    pool.start_quarantine(parked)
    states = [pool.state_of(block) for block in range(8)]
    assert Counter(states) == {name: number for name, number in pool.count_by_state().items() if number}
    assert [states[some[0]] for some in (owned, leased, sent, fenced, parked)] == [
        "owned",
        "leased",
        "sending",
        "fenced",
        "quarantined",
    ]
