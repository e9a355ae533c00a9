"""The blocks of one KV memory: reference counts, states, and the prefix cache.

A cached block is a free block that still has a hash, so the index of hashes is the prefix cache. A block is reused only
when its reference count is zero and its fence has passed, since a step in flight may still write a released block.

    FREE ──allocate──> OWNED ──release──> FENCED ──fence passed──> CACHED (it has a hash) or FREE
      ^                  ^                                            │
      └──── evicted ─────┴──────────────── acquired by a hit ─────────┘

Handoffs add three states. LEASED: a peer may write the block. SENDING: a transfer reads the block and holds a reference
of its own. QUARANTINED: no request holds the block, but a peer's write may still arrive.

A pool has the lifetime of the memory that it describes, which may be longer than a worker's.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from onward.engine.scheduling.persisted_block_hashes import PersistedBlockHashes
from onward.proto.block_hash import BlockHash
from onward.proto.kv_events import KvEvents

MAX_KEPT_CHANGES = 65_536
MAX_CHANGES_PER_ANSWER = 16_384
"""In one answer. The reader asks again for the rest."""


class KvEventLog:
    """Which blocks the prefix cache has learnt and forgotten, numbered, so that a reader can go on where it stopped. A
    reader that is further behind than the kept changes gets all hashes that are known now, and goes on from there."""

    def __init__(self) -> None:
        self._changes: deque[tuple[bool, BlockHash]] = deque(maxlen=MAX_KEPT_CHANGES)
        self._next_number = 0
        self._oldest_valid = 0
        """Changes before this number belong to memory that is gone."""

    def append(self, known: bool, block_hash: BlockHash) -> None:
        self._changes.append((known, block_hash))
        self._next_number += 1

    def reset(self) -> None:
        """Forgets all changes because the memory is lost, and every hash with it. The next answer to each reader is a
        reset."""
        self._changes.clear()
        self._next_number += 1  # so that a reader that was up to date notices the reset
        self._oldest_valid = self._next_number

    def since(self, number: int, block_hashes: Iterable[BlockHash]) -> KvEvents:
        """Returns the changes from `number` on, at most MAX_CHANGES_PER_ANSWER. If they are not kept any more or belong
        to lost memory, returns a reset with `block_hashes`, which must be the hashes of all cached blocks."""
        oldest = self._next_number - len(self._changes)
        if not max(oldest, self._oldest_valid) <= number <= self._next_number:
            known = [(True, block_hash) for block_hash in block_hashes]
            return KvEvents(self._next_number - len(known), known, reset=True)
        return KvEvents(number, list(islice(self._changes, number - oldest, number - oldest + MAX_CHANGES_PER_ANSWER)))


class ReclaimEstimate:
    """Counts the blocks that could be handed out if certain requests gave up theirs. Changes nothing in the pool.

    A block comes free only with its last share, so what a request frees depends on the others that give up theirs.
    """

    def __init__(self, holders: Sequence[int], kept: frozenset[int], num_blocks: int) -> None:
        self._holders, self._kept = holders, kept
        self._shares: Counter[int] = Counter()
        self.num_blocks = num_blocks

    def add(self, blocks: Sequence[int]) -> None:
        """Adds to `num_blocks` the blocks that come free if the holder of `blocks` gives up its share of them."""
        for block in blocks:
            self._shares[block] += 1
            self.num_blocks += self._is_freed(block)

    def undo_add(self, blocks: Sequence[int]) -> None:
        """Takes an `add` back."""
        for block in blocks:
            self.num_blocks -= self._is_freed(block)
            self._shares[block] -= 1

    def _is_freed(self, block: int) -> bool:
        return self._shares[block] == self._holders[block] and block not in self._kept


class BlockPool:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        log: KvEventLog | None = None,
        persisted_hashes: PersistedBlockHashes | None = None,
    ) -> None:
        """`persisted_hashes` is the hash table in shared memory beside the KV memory, or None. Blocks that an earlier
        engine has sealed there become cached blocks of this pool."""
        assert num_blocks > 0, "a pool has blocks"
        assert block_size > 0, "a block has tokens"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._block_hash: list[BlockHash | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[BlockHash, int] = {}
        self._log = log
        self._fenced: dict[int, int] = {}
        self._leased: set[int] = set()
        self._sending: Counter[int] = Counter()
        self._quarantined: set[int] = set()
        self._persisted_hashes = persisted_hashes
        if persisted_hashes is not None:
            self._adopt(persisted_hashes)

    def use_persisted_hashes(self, persisted_hashes: PersistedBlockHashes | None) -> None:
        """Starts to use the hash table of new memory, in which no block has a hash yet."""
        assert not self._by_hash, "hashes belong to the memory of the blocks"
        self._persisted_hashes = persisted_hashes

    def _adopt(self, persisted_hashes: PersistedBlockHashes) -> None:
        for block, block_hash in persisted_hashes.sealed():
            if block_hash in self._by_hash:  # no pool has such a table; a start must not fail by it
                persisted_hashes.break_seal(block)
                continue
            self._by_hash[block_hash] = block
            self._block_hash[block] = block_hash
            self._cached[block] = None
            if self._log is not None:
                self._log.append(True, block_hash)
        self._free = [block for block in self._free if block not in self._cached]

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_fenced(self) -> int:
        return len(self._fenced)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def cached_hashes(self) -> Collection[BlockHash]:
        """Hashes of all blocks that a lookup can find."""
        return self._by_hash.keys()

    def count_by_state(self) -> dict[str, int]:
        """Counts blocks by state; each block has one state. A block that a transfer reads counts as sending, even if
        requests hold it too."""
        counts = {
            "free": len(self._free),
            "cached": len(self._cached),
            "leased": len(self._leased),
            "sending": len(self._sending),
            "fenced": len(self._fenced),
            "quarantined": len(self._quarantined),
        }
        return counts | {"owned": self.num_blocks - sum(counts.values())}

    def state_of(self, block: int) -> str:
        """Returns the state under which `count_by_state` counts this block."""
        if block in self._sending:
            return "sending"
        if block in self._leased:
            return "leased"
        if block in self._fenced:
            return "fenced"
        if block in self._quarantined:
            return "quarantined"
        if self._ref_counts[block]:
            return "owned"
        return "cached" if block in self._cached else "free"

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Hands out blocks, plain free ones first, then the cached ones that were unused longest."""
        assert count <= self.num_available, "the caller has looked"
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        while len(taken) < count:
            block, _ = self._cached.popitem(last=False)
            self._drop_hash(block)
            taken.append(block)
        for block in taken:
            self._ref_counts[block] = 1
        return taken

    def count_cached_prefix(self, block_hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """Returns how many leading hashes belong to usable blocks, and how many of these blocks count as available
        now."""
        hits = available = 0
        for block_hash in block_hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            hits += 1
            available += block in self._cached
        return hits, available

    def acquire_cached(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """Takes a share of known blocks, all of which `count_cached_prefix` has just counted.

        A fence is no obstacle: a block with a hash is computed to its end, and steps in flight write behind that.
        """
        blocks = self.find_cached(block_hashes)
        for block in blocks:
            if self._persisted_hashes is not None and not self._ref_counts[block]:
                self._persisted_hashes.record_acquire(block)
            self._cached.pop(block, None)
            self._fenced.pop(block, None)
            self._ref_counts[block] += 1
        return blocks

    def cache_block(self, block: int, block_hash: BlockHash) -> None:
        """Gives a fully computed block its hash. The first block with a hash keeps it; a twin stays without one."""
        assert self._ref_counts[block] > 0, "only an owner knows what it computed"
        if block_hash not in self._by_hash and self._block_hash[block] is None:
            self._by_hash[block_hash] = block
            self._block_hash[block] = block_hash
            if self._persisted_hashes is not None:
                self._persisted_hashes.seal(block, block_hash)
            if self._log is not None:
                self._log.append(True, block_hash)

    def release(self, blocks: Sequence[int], fence_step: int | None) -> None:
        """Drops one reference of each block. A block is not reused before the result of `fence_step` has arrived."""
        # Backwards, so that the end of a history is evicted before its beginning.
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} is released without being owned"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if fence_step is None:
                    self._make_available(block)
                else:
                    self._fenced[block] = fence_step

    def lift_fences(self, step: int | None) -> None:
        """Makes the blocks available whose fence is `step` or an earlier one. The result of `step` has arrived, so
        these blocks are not written any more. None lifts all fences: no step is in flight."""
        for block in [block for block, fence in self._fenced.items() if step is None or fence <= step]:
            del self._fenced[block]
            self._make_available(block)

    def start_lease(self, blocks: Sequence[int]) -> None:
        """Marks blocks that a peer may write from now on. Each block must have exactly one holder, which must not use
        it until the lease ends."""
        assert all(self._ref_counts[block] == 1 for block in blocks), "only blocks of one's own are leased"
        self._leased.update(blocks)

    def end_lease(self, blocks: Sequence[int]) -> None:
        """Ends the lease of blocks that a peer has written completely. Their holder keeps them."""
        self._leased.difference_update(blocks)

    def start_quarantine(self, blocks: Sequence[int]) -> None:
        """Releases leased blocks that a peer may still write. They are not reused before `end_quarantine`."""
        for block in blocks:
            self._leased.remove(block)
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] == 0, "a leased block has one holder"
        self._quarantined.update(blocks)

    def end_quarantine(self, blocks: Sequence[int]) -> None:
        """Makes quarantined blocks available again. The caller must be certain that the peer writes nothing more."""
        for block in blocks:
            self._quarantined.remove(block)
            self._make_available(block)

    def start_sending(self, blocks: Sequence[int]) -> None:
        """Gives a transfer its own reference of each block that it reads, because the transfer may outlast the
        request."""
        for block in blocks:
            assert self._ref_counts[block] > 0, "only owned blocks can be sent"
            self._ref_counts[block] += 1
            self._sending[block] += 1

    def end_sending(self, blocks: Sequence[int], fence_step: int | None) -> None:
        """Drops a transfer's reference of each block. `fence_step` must be the newest step in flight: the transfer may
        have been the last holder while the request's own fence has not passed yet."""
        for block in blocks:
            self._sending[block] -= 1
            if not self._sending[block]:
                del self._sending[block]
        self.release(blocks, fence_step)

    def find_cached(self, block_hashes: Sequence[BlockHash]) -> list[int]:
        """Returns the blocks of these hashes, all of which `count_cached_prefix` has just counted."""
        return [self._by_hash[block_hash] for block_hash in block_hashes]

    def estimate_reclaim(self, kept: Collection[int] = ()) -> "ReclaimEstimate":
        """Starts with what is available, or will be when its fence has passed, without the blocks in `kept`."""
        num_kept = sum(block in self._cached or block in self._fenced for block in kept)
        return ReclaimEstimate(self._ref_counts, frozenset(kept), self.num_available + self.num_fenced - num_kept)

    def audit_idle(self) -> None:
        """Asserts that every block is free or cached, and that each cached block can be found by its hash. This holds
        only when the engine is idle."""
        for state in ("fenced", "leased", "sending", "quarantined"):
            blocks = getattr(self, f"_{state}")
            assert not blocks, f"{state} at idle: {sorted(blocks)}"
        held = [block for block, holders in enumerate(self._ref_counts) if holders]
        assert not held, f"held at idle: {held}"
        assert len(self._free) + len(self._cached) == self.num_blocks, "every block is free or cached"
        assert len(set(self._free) | set(self._cached)) == self.num_blocks, "no block is listed twice"
        assert set(self._by_hash.values()) == set(self._cached), "the index has the cached blocks"

    def _make_available(self, block: int) -> None:
        if self._block_hash[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None
            if self._persisted_hashes is not None:
                self._persisted_hashes.record_release(block)

    def _drop_hash(self, block: int) -> None:
        block_hash = self._block_hash[block]
        assert block_hash is not None, "a cached block has a hash"
        del self._by_hash[block_hash]
        self._block_hash[block] = None
        if self._persisted_hashes is not None:
            self._persisted_hashes.break_seal(block)
        if self._log is not None:
            self._log.append(False, block_hash)
