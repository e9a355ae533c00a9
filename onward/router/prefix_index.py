"""Which blocks each instance has in its prefix cache, as far as it has told. A hint: a wrong entry costs time only.

    events of an instance   0 1 2 … |-- number … number + len(stored) + len(removed) --| next expected

Every stored and every removed block is one event, and each list of events says the number of its first. A part that is
missing makes the whole doubtful, so the instance's index starts anew, and 0 is expected: everything from the beginning,
or a reset with all that is there now. Knows nothing of tokens, load or time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from onward.proto.block_hash import BlockHash
from onward.proto.router import KvEvents

MAX_BLOCKS = 1 << 20
"""Of all instances together, about 100 MB. Blocks beyond are not remembered: prompts match shorter, no worse."""


@dataclass(slots=True)
class _Cached:
    blocks: set[BlockHash] = field(default_factory=set)
    expected: int = 0


class PrefixIndex:
    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self._cached: dict[str, _Cached] = {}

    def __len__(self) -> int:
        return self._num_blocks

    def expected(self, instance: str) -> int:
        """The number of the event that should come next."""
        cached = self._cached.get(instance)
        return cached.expected if cached else 0

    def apply(self, instance: str, events: KvEvents) -> int:
        """Returns the number that is expected next."""
        end = events.number + len(events.stored) + len(events.removed)
        expected = self.expected(instance)
        if not events.reset and end <= expected:
            return expected  # told before: our answer to it was lost
        if events.reset or events.number != expected:
            # Also where old and new events come in one list: which of them undid which cannot be told.
            self.forget(instance)
        if not events.reset and events.number not in (0, expected):
            return 0
        self._take(self._cached.setdefault(instance, _Cached()), events)
        self._cached[instance].expected = end
        return end

    def matched_blocks(self, instance: str, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks of a prompt are there."""
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

    def _take(self, cached: _Cached, events: KvEvents) -> None:
        """A block that is in both lists counts as stored: that is how a block comes back."""
        before = len(cached.blocks)
        cached.blocks.difference_update(events.removed)
        room = self._max_blocks - (self._num_blocks - before)
        for block in events.stored:
            if len(cached.blocks) >= room:
                break
            cached.blocks.add(block)
        self._num_blocks += len(cached.blocks) - before
