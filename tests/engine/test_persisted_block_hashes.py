"""Hashes of blocks beside their memory: a hash is found again if its row was written to the end, and not otherwise."""

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.engine.scheduling.block_pool import BlockPool
from onward.engine.scheduling.persisted_block_hashes import PersistedBlockHashes, table_bytes
from onward.proto.block_hash import BLOCK_HASH_BYTES

NUM_BLOCKS = 8
HASH, OTHER_HASH = b"n" * BLOCK_HASH_BYTES, b"o" * BLOCK_HASH_BYTES


def new_table() -> tuple[bytearray, PersistedBlockHashes]:
    memory = bytearray(table_bytes(NUM_BLOCKS))
    return memory, PersistedBlockHashes(memoryview(memory), NUM_BLOCKS)


def sealed_in(memory: bytearray) -> dict[int, bytes]:
    """What the next engine finds."""
    return dict(PersistedBlockHashes(memoryview(memory), NUM_BLOCKS).sealed())


def test_new_memory_has_no_hashes() -> None:
    memory, _ = new_table()
    assert sealed_in(memory) == {}


def test_a_sealed_block_has_its_hash_for_the_next_engine() -> None:
    memory, table = new_table()
    table.seal(3, HASH)
    table.seal(0, OTHER_HASH)
    assert sealed_in(memory) == {0: OTHER_HASH, 3: HASH}


def test_a_block_whose_seal_is_broken_has_no_hash_and_its_neighbours_keep_theirs() -> None:
    memory, table = new_table()
    for block in range(NUM_BLOCKS):
        table.seal(block, bytes([block]) * BLOCK_HASH_BYTES)
    table.break_seal(3)
    assert sealed_in(memory).keys() == set(range(NUM_BLOCKS)) - {3}


def test_a_block_may_get_another_hash() -> None:
    memory, table = new_table()
    table.seal(3, HASH)
    table.break_seal(3)
    table.seal(3, OTHER_HASH)
    assert sealed_in(memory) == {3: OTHER_HASH}


class WriteLog:
    """Memory that keeps each write to it, in order."""

    def __init__(self, memory: bytearray) -> None:
        self._memory = memory
        self.writes: list[tuple[int, int]] = []
        """Single bytes, as (offset, value)."""

    def __len__(self) -> int:
        return len(self._memory)

    def __getitem__(self, where: slice) -> bytes:
        return bytes(self._memory[where])

    def __setitem__(self, where: slice, data: bytes) -> None:
        assert where.stop - where.start == len(data), "a row keeps its size"
        self._memory[where] = data
        self.writes += zip(range(where.start, where.stop), data, strict=True)


@pytest.mark.parametrize("old_hash", [None, OTHER_HASH])
def test_a_row_that_was_written_in_part_has_no_hash(old_hash: bytes | None) -> None:
    """An engine may die after any byte, also while it gives a block another hash."""
    memory, table = new_table()
    if old_hash is not None:
        table.seal(3, old_hash)
    torn = bytearray(memory)
    log = WriteLog(memory)
    PersistedBlockHashes(cast(memoryview, log), NUM_BLOCKS).seal(3, HASH)
    assert len(log.writes) > table_bytes(1)
    assert sealed_in(memory) == {3: HASH}
    for offset, value in log.writes[:-1]:
        torn[offset] = value
        assert sealed_in(torn) == {}
    torn[log.writes[-1][0]] = log.writes[-1][1]
    assert torn == memory


@given(st.integers(0, table_bytes(1) - 9), st.integers(1, 255))
def test_a_row_with_a_changed_byte_has_no_hash(at: int, change: int) -> None:
    """The last eight say when the block was released, which is no part of its hash."""
    memory, table = new_table()
    table.seal(3, HASH)
    memory[table_bytes(3) + at] ^= change
    assert sealed_in(memory) == {}


def test_a_row_in_the_place_of_another_block_has_no_hash() -> None:
    memory, table = new_table()
    table.seal(3, HASH)
    memory[table_bytes(5) : table_bytes(6)] = memory[table_bytes(3) : table_bytes(4)]
    assert sealed_in(memory) == {3: HASH}


def test_of_two_blocks_with_one_hash_the_first_is_adopted_and_the_other_is_free() -> None:
    memory, table = new_table()
    table.seal(2, HASH)
    table.seal(5, HASH)
    pool = BlockPool(NUM_BLOCKS, 4, persisted_hashes=PersistedBlockHashes(memoryview(memory), NUM_BLOCKS))
    assert pool.find_cached([HASH]) == [2]
    assert pool.state_of(5) == "free"
    assert sealed_in(memory) == {2: HASH}
    pool.audit_idle()


def test_a_pool_seals_hashes_when_it_gives_them_and_breaks_them_when_it_hands_out_the_block() -> None:
    memory, table = new_table()
    pool = BlockPool(NUM_BLOCKS, 4, persisted_hashes=table)
    blocks = pool.allocate(NUM_BLOCKS)
    pool.cache_block(blocks[0], HASH)
    assert sealed_in(memory) == {blocks[0]: HASH}
    pool.release(blocks, None)
    assert sealed_in(memory) == {blocks[0]: HASH}
    pool.allocate(NUM_BLOCKS)
    assert sealed_in(memory) == {}


def test_adopted_blocks_are_handed_out_last() -> None:
    memory, table = new_table()
    table.seal(6, HASH)
    pool = BlockPool(NUM_BLOCKS, 4, persisted_hashes=PersistedBlockHashes(memoryview(memory), NUM_BLOCKS))
    assert 6 not in pool.allocate(NUM_BLOCKS - 1)
    assert sealed_in(memory) == {6: HASH}
    assert pool.allocate(1) == [6]
    assert sealed_in(memory) == {}


def test_adopted_blocks_of_requests_are_handed_out_after_those_that_nobody_held() -> None:
    """The requests return one after the other: the first must not evict what the last will look for."""
    memory, table = new_table()
    pool = BlockPool(NUM_BLOCKS, 4, persisted_hashes=table)
    blocks = pool.allocate(NUM_BLOCKS)
    block_hashes = [bytes([number]) * BLOCK_HASH_BYTES for number in range(NUM_BLOCKS)]
    for block, block_hash in zip(blocks, block_hashes, strict=True):
        pool.cache_block(block, block_hash)
    held, released = blocks[:3], [blocks[4], blocks[7], blocks[3], blocks[6], blocks[5]]
    for block in released:
        pool.release([block], None)
    pool.acquire_cached([block_hashes[7]])  # by a request that comes later
    pool = BlockPool(NUM_BLOCKS, 4, persisted_hashes=PersistedBlockHashes(memoryview(memory), NUM_BLOCKS))
    assert pool.allocate(4) == [blocks[4], blocks[3], blocks[6], blocks[5]]
    assert set(pool.allocate(4)) == {*held, blocks[7]}


def test_memory_of_another_size_is_refused() -> None:
    with pytest.raises(AssertionError):
        PersistedBlockHashes(memoryview(bytearray(table_bytes(NUM_BLOCKS - 1))), NUM_BLOCKS)
