"""Which blocks the prefix cache has learnt and forgotten, numbered, so that a reader can go on where it stopped.

Only the latest changes are kept. Who is further behind gets all names that are known now, and goes on from there.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from onward.proto.block_hash import BlockHash
from onward.proto.kv_events import KvEvents

MAX_KEPT_CHANGES = 65_536
MAX_CHANGES_PER_ANSWER = 16_384
"""In one answer. The reader asks again for the rest."""


class KvEventLog:
    def __init__(self) -> None:
        self._changes: deque[tuple[bool, BlockHash]] = deque(maxlen=MAX_KEPT_CHANGES)
        self._next_number = 0
        self._oldest_valid = 0
        """What came before belongs to memory that is gone."""

    def append(self, known: bool, block_hash: BlockHash) -> None:
        self._changes.append((known, block_hash))
        self._next_number += 1

    def reset(self) -> None:
        """The memory is gone, and every name with it."""
        self._changes.clear()
        self._next_number += 1  # so that a reader who was up to date learns of it
        self._oldest_valid = self._next_number

    def since(self, number: int, block_hashes: Iterable[BlockHash]) -> KvEvents:
        """The changes from `number` on. `block_hashes` are all cached blocks, for a reader that needs a reset."""
        oldest = self._next_number - len(self._changes)
        if not max(oldest, self._oldest_valid) <= number <= self._next_number:
            known = [(True, block_hash) for block_hash in block_hashes]
            return KvEvents(self._next_number - len(known), known, reset=True)
        return KvEvents(number, list(islice(self._changes, number - oldest, number - oldest + MAX_CHANGES_PER_ANSWER)))
