"""Blocks in the prefix cache of each instance, as reported by the instances. A hint: a wrong entry costs only time.

    changes of an instance   0 1 2 … |-- number … next_number --| expected next

If a change is missing, the index of that instance is cleared and a complete listing is requested. Knows nothing of tokens,
load or time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from onward.proto.block_hash import BlockHash
from onward.proto.kv_events import KvEvents

RESEND_ALL = -1
"""Expected of an instance of which nothing is known."""

MAX_BLOCKS = 1 << 20
"""Blocks of all instances together, about 100 MB. Further blocks are not stored; prompts then match a shorter
prefix."""


@dataclass(slots=True)
class _InstanceBlocks:
    blocks: set[BlockHash] = field(default_factory=set)
    expected: int = 0


class PrefixIndex:
    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._cached: dict[str, _InstanceBlocks] = {}

    def __len__(self) -> int:
        return self._num_blocks

    def next_event_number(self, instance: str) -> int:
        """Returns the number of the next expected change; `RESEND_ALL` if nothing is known of the instance."""
        cached = self._cached.get(instance)
        return cached.expected if cached else RESEND_ALL

    def apply(self, instance: str, events: KvEvents) -> int:
        """Applies changes and returns the number of the next expected one. Changes that were applied before are
        skipped."""
        if events.reset:
            self.forget(instance)
            expected = events.first_event
        else:
            # A new instance may also begin with its very first change, which equals a complete listing.
            expected = max(0, self.next_event_number(instance))
        if events.first_event > expected:
            self.forget(instance)
            return RESEND_ALL
        cached = self._cached.setdefault(instance, _InstanceBlocks())
        self._apply_changes(cached, events, expected - events.first_event)
        cached.expected = max(expected, events.next_number)
        return cached.expected

    def matched_blocks(self, instance: str, hashes: Sequence[BlockHash]) -> int:
        """Returns how many leading blocks of a prompt the instance has cached."""
        cached = self._cached.get(instance)
        if cached is None:
            return 0
        for index, block in enumerate(hashes):
            if block not in cached.blocks:
                return index
        return len(hashes)

    def forget(self, instance: str) -> None:
        cached = self._cached.pop(instance, None)
        if cached is not None:
            self._num_blocks -= len(cached.blocks)
            assert self._num_blocks >= 0, "the number of indexed blocks is never negative"

    def _apply_changes(self, cached: _InstanceBlocks, events: KvEvents, num_known: int) -> None:
        assert num_known >= 0, "changes after a gap are not applied"
        blocks = cached.blocks
        num_before = len(blocks)
        max_blocks = self._max_blocks - (self._num_blocks - num_before)
        for known, block in islice(events.changes, num_known, None):
            if not known:
                blocks.discard(block)
            elif len(blocks) < max_blocks:
                blocks.add(block)
        self._num_blocks += len(blocks) - num_before
        assert self._num_blocks <= self._max_blocks, "the index stays within its bound"
