"""Whether a block's KV, kept by a model that drafts, is of the tokens that a new slot has there.

Such a model has a memory of its own under the block ids of the served one, and nobody tells it what those blocks are used
for meanwhile: they may come from the prefix cache, from a peer, or from another request. So each block that it has filled
bears a name, a hash over its tokens and all before them, and a slot may use what bears the name it would give itself.
"""

from dataclasses import dataclass

import numpy as np

from onward.proto.block_hash import BlockHash, hash_block, root_hash

_ROOT = root_hash("")
"""Salts need not be minded: what is here is reached only through blocks that the engine has given to the slot."""


@dataclass(slots=True)
class HashedPrefix:
    """How many of a slot's leading blocks have names, and the last of them."""

    count: int = 0
    last: BlockHash = _ROOT


class DraftBlockHashes:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._names: list[BlockHash | None] = [None] * num_blocks
        self._block_size = block_size

    def match_prefix(self, table: np.ndarray, tokens: np.ndarray) -> HashedPrefix:
        """The leading blocks of a slot that hold what it needs. `tokens` are those whose KV may be there."""
        found = HashedPrefix()
        for index in range(len(tokens) // self._block_size):
            name = self._extended(found.last, tokens, index)
            if self._names[table[index]] != name:
                break
            found.count, found.last = index + 1, name
        return found

    def invalidate(self, table: np.ndarray, start: int, end: int) -> None:
        """Positions [start, end) are about to be written."""
        assert start < end, "at least one position is written"
        for index in range(start // self._block_size, (end - 1) // self._block_size + 1):
            self._names[table[index]] = None

    def record(self, named: HashedPrefix, table: np.ndarray, tokens: np.ndarray) -> None:
        """Names every block that `tokens`, which are final and whose KV is there, fill."""
        for index in range(named.count, len(tokens) // self._block_size):
            named.count, named.last = index + 1, self._extended(named.last, tokens, index)
            self._names[table[index]] = named.last

    def _extended(self, parent: BlockHash, tokens: np.ndarray, index: int) -> BlockHash:
        return hash_block(parent, tokens[index * self._block_size : (index + 1) * self._block_size].tolist())
