"""The hashes of KV blocks in shared memory beside the KV memory, so that they outlive the engine as the blocks do.

    row of a block    | hash, 16 bytes | seal, 8 bytes | release, 8 bytes |

The seal is a hash of the block's number and its block hash. `release` numbers the times at which a block was given up by
its last holder; 0: a request holds it. Blocks of requests are evicted last by the engine that adopts them.

The engine writes a row when a block gets its hash, and breaks its seal before the block may be written again. A row that
was being written when its engine died has no seal that fits, and counts as none.
"""

import hashlib

from onward.proto.block_hash import BLOCK_HASH_BYTES, BlockHash

TABLE_FORMAT = 1
"""Raised whenever rows or the way block hashes are made change: a new server then does not use the table of an old one."""
_SEAL_BYTES = 8
_RELEASE_BYTES = 8
_SEAL_END = BLOCK_HASH_BYTES + _SEAL_BYTES
_ROW_BYTES = _SEAL_END + _RELEASE_BYTES
_NO_SEAL = bytes(_SEAL_BYTES)
_MAX_RELEASES = 1 << (8 * _RELEASE_BYTES)


def table_bytes(num_blocks: int) -> int:
    return num_blocks * _ROW_BYTES


class PersistedBlockHashes:
    """A table in shared memory: block -> hash, with a seal. It outlives the engine, so that the next one can adopt blocks.
    The lookup hash -> block is BlockPool's."""

    def __init__(self, rows: memoryview, num_blocks: int) -> None:
        assert len(rows) == table_bytes(num_blocks), "one row for each block"
        self._rows = rows
        self._num_blocks = num_blocks
        self._last_release = max((self._release_of(block) for block in range(num_blocks)), default=0)

    def seal(self, block: int, block_hash: BlockHash) -> None:
        """Writes the hash and seal of a block that is computed to its end and held by a request. The block must not be
        written until `break_seal`."""
        self.break_seal(block)
        self.record_acquire(block)
        start = block * _ROW_BYTES
        self._rows[start : start + BLOCK_HASH_BYTES] = block_hash
        self._rows[start + BLOCK_HASH_BYTES : start + _SEAL_END] = _seal_of(block, block_hash)

    def break_seal(self, block: int) -> None:
        """Erases the seal of a block, so that its row counts as empty. Must precede any new write of the block."""
        start = block * _ROW_BYTES
        self._rows[start + BLOCK_HASH_BYTES : start + _SEAL_END] = _NO_SEAL

    def record_acquire(self, block: int) -> None:
        """Records that a request holds the block."""
        self._set_release(block, 0)

    def record_release(self, block: int) -> None:
        """Records that the last holder has released the block."""
        self._last_release = (self._last_release + 1) % _MAX_RELEASES
        self._set_release(block, self._last_release)

    def sealed(self) -> list[tuple[int, BlockHash]]:
        """Returns the sealed blocks with their hashes in eviction order: first blocks that no request held, the oldest
        release first, then blocks of requests."""
        found = [
            (block, block_hash) for block in range(self._num_blocks) if (block_hash := self._hash_of(block)) is not None
        ]
        return sorted(found, key=lambda row: (self._release_of(row[0]) == 0, self._release_of(row[0])))

    def _hash_of(self, block: int) -> BlockHash | None:
        start = block * _ROW_BYTES
        block_hash = bytes(self._rows[start : start + BLOCK_HASH_BYTES])
        seal = bytes(self._rows[start + BLOCK_HASH_BYTES : start + _SEAL_END])
        return block_hash if seal != _NO_SEAL and seal == _seal_of(block, block_hash) else None

    def _release_of(self, block: int) -> int:
        end = (block + 1) * _ROW_BYTES
        return int.from_bytes(self._rows[end - _RELEASE_BYTES : end], "little")

    def _set_release(self, block: int, number: int) -> None:
        end = (block + 1) * _ROW_BYTES
        self._rows[end - _RELEASE_BYTES : end] = number.to_bytes(_RELEASE_BYTES, "little")


def _seal_of(block: int, block_hash: BlockHash) -> bytes:
    return hashlib.blake2b(block.to_bytes(8, "little") + block_hash, digest_size=_SEAL_BYTES).digest()
