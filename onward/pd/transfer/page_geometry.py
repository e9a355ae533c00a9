"""The location of pages in a KV pool, the copies from our pool to a peer's, and checksums of pages.

pool    | layer 0: block 0, block 1, … | layer 1: block 0, … | …      a page: one block of one layer
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from onward.pd.transfer.backend import MemoryCopy

MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class PageGeometry:
    num_layers: int
    num_blocks: int
    page_bytes: int

    def __post_init__(self) -> None:
        assert self.num_layers > 0, "a pool has layers"
        assert self.page_bytes > 0, "a page has bytes"

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.num_blocks * self.page_bytes

    def page_offset(self, layer: int, block: int) -> int:
        return (layer * self.num_blocks + block) * self.page_bytes

    def is_whole_pages(self, offset: int, num_bytes: int) -> bool:
        is_inside = offset >= 0 and 0 < num_bytes <= self.num_bytes - offset
        return is_inside and offset % self.page_bytes == 0 and num_bytes % self.page_bytes == 0

    def pages_in(self, byte_ranges: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the layer and the block of every page in these ranges, which are whole pages."""
        firsts, counts = np.array(byte_ranges, np.int64).reshape(-1, 2).T // self.page_bytes
        ends = np.cumsum(counts)
        pages = np.arange(counts.sum()) + np.repeat(firsts - (ends - counts), counts)
        return np.divmod(pages, self.num_blocks)


def plan_copies(
    ours: PageGeometry, theirs: PageGeometry, layer: int, source_ids: Sequence[int], target_ids: Sequence[int]
) -> list[MemoryCopy]:
    """Returns the copies of one layer of these blocks. Blocks that are consecutive in both pools become one copy."""
    assert ours.page_bytes == theirs.page_bytes, "equal layouts have equal pages"
    assert 0 <= layer < ours.num_layers, "the layer is one of the model's"
    assert len(source_ids) == len(target_ids), "each source block has a target block"
    sources, targets = np.array(source_ids, np.int64), np.array(target_ids, np.int64)
    assert sources.max() < ours.num_blocks, "source blocks are blocks of our own pool"
    is_cut = (np.diff(sources) != 1) | (np.diff(targets) != 1)
    starts = np.concatenate([[0], np.flatnonzero(is_cut) + 1])
    sizes = np.diff(np.append(starts, len(sources))) * ours.page_bytes
    source_at = (sources[starts] + layer * ours.num_blocks) * ours.page_bytes
    target_at = (targets[starts] + layer * theirs.num_blocks) * theirs.page_bytes
    return list(map(MemoryCopy._make, zip(source_at.tolist(), target_at.tolist(), sizes.tolist(), strict=True)))


def page_checksum(memory: memoryview, geometry: PageGeometry, layer: int, block: int) -> int:
    """Returns the checksum of a page, seeded by the layer so that exchanged layers are detected. The checksums of a
    block's pages are added up, in any order."""
    offset = geometry.page_offset(layer, block)
    return xxhash.xxh3_64_intdigest(memory[offset : offset + geometry.page_bytes], seed=layer)


def block_checksum(memory: memoryview, geometry: PageGeometry, block: int) -> int:
    """Returns the checksum of one block in all layers. It shows whether both sides have the same bytes, and does not
    guard against forgery."""
    return sum(page_checksum(memory, geometry, layer, block) for layer in range(geometry.num_layers)) & MASK
