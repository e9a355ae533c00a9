"""Checks whether a block's draft-model KV belongs to the tokens that a new slot has there.

A draft model has KV memory of its own under the block ids of the served model, and is not notified when those blocks are
reused: they may come from the prefix cache, from a peer, or from another request. So each block that it fills gets a hash
over its tokens and all tokens before them, and a slot uses a block only if the hash equals its own.
"""

from dataclasses import dataclass

import numpy as np

from onward.proto.block_hash import BlockHash, hash_block, root_hash

_ROOT = root_hash("")
"""No salt is needed: a slot reads only hashes of blocks that the engine has given to it."""


@dataclass(slots=True)
class HashedPrefix:
    """How many of a slot's leading blocks have hashes, and the last of them."""

    count: int = 0
    last: BlockHash = _ROOT


class DraftBlockHashes:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._block_size = block_size

    def match_prefix(self, table: np.ndarray, tokens: np.ndarray) -> HashedPrefix:
        """Returns the leading blocks of a slot that have the KV of its tokens. `tokens` are the ones whose KV may be
        there."""
        prefix = HashedPrefix()
        for index in range(len(tokens) // self._block_size):
            block_hash = self._hash_at(prefix.last, tokens, index)
            if self._hashes[table[index]] != block_hash:
                break
            prefix.count, prefix.last = index + 1, block_hash
        return prefix

    def invalidate(self, table: np.ndarray, start: int, end: int) -> None:
        """Removes the hashes of blocks whose positions [start, end) are about to be written."""
        assert start < end, "at least one position is written"
        for index in range(start // self._block_size, (end - 1) // self._block_size + 1):
            self._hashes[table[index]] = None

    def record(self, prefix: HashedPrefix, table: np.ndarray, tokens: np.ndarray) -> None:
        """Stores the hash of every block that `tokens` fill; they are final, and their KV is computed."""
        for index in range(prefix.count, len(tokens) // self._block_size):
            prefix.count, prefix.last = index + 1, self._hash_at(prefix.last, tokens, index)
            self._hashes[table[index]] = prefix.last

    def _hash_at(self, parent: BlockHash, tokens: np.ndarray, index: int) -> BlockHash:
        return hash_block(parent, tokens[index * self._block_size : (index + 1) * self._block_size].tolist())
