"""The names of KV blocks, written beside the KV memory, so that they outlive the engine as the blocks do.

    row of a block    | name, 16 bytes | seal, 8 bytes |      the seal is a hash of the block's number and its name

The engine writes a row when a block gets its name, and breaks its seal before the block may be written again. A row that
was being written when its engine died has no seal that fits, and counts as none.
"""

import hashlib
from collections.abc import Iterator

from onward.proto.block_hash import BLOCK_HASH_BYTES, BlockHash

_SEAL_BYTES = 8
_ROW_BYTES = BLOCK_HASH_BYTES + _SEAL_BYTES
_NO_SEAL = bytes(_SEAL_BYTES)


def table_bytes(num_blocks: int) -> int:
    return num_blocks * _ROW_BYTES


class BlockNameTable:
    def __init__(self, rows: memoryview, num_blocks: int) -> None:
        assert len(rows) == table_bytes(num_blocks), "one row for each block"
        self._rows = rows
        self._num_blocks = num_blocks

    def seal(self, block: int, name: BlockHash) -> None:
        """The block is computed to its end and is written no more while it has this name."""
        self.break_seal(block)
        start = block * _ROW_BYTES
        self._rows[start : start + BLOCK_HASH_BYTES] = name
        self._rows[start + BLOCK_HASH_BYTES : start + _ROW_BYTES] = _seal_of(block, name)

    def break_seal(self, block: int) -> None:
        """The block may be written again."""
        end = (block + 1) * _ROW_BYTES
        self._rows[end - _SEAL_BYTES : end] = _NO_SEAL

    def sealed(self) -> Iterator[tuple[int, BlockHash]]:
        """Blocks that have a name, by number."""
        for block in range(self._num_blocks):
            row = bytes(self._rows[block * _ROW_BYTES : (block + 1) * _ROW_BYTES])
            name, seal = row[:BLOCK_HASH_BYTES], row[BLOCK_HASH_BYTES:]
            if seal != _NO_SEAL and seal == _seal_of(block, name):
                yield block, name


def _seal_of(block: int, name: BlockHash) -> bytes:
    return hashlib.blake2b(block.to_bytes(8, "little") + name, digest_size=_SEAL_BYTES).digest()
