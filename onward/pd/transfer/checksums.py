"""A number for the bytes of one block in all layers, the same on both sides if the bytes are. Not against forgery."""

import xxhash

from onward.pd.transfer.page_geometry import PageGeometry

MASK = (1 << 64) - 1


def page_checksum(memory: memoryview, geometry: PageGeometry, layer: int, block: int) -> int:
    """Seeded by the layer, so that exchanged layers show. Those of a block's pages are added up, in any order."""
    offset = geometry.page_offset(layer, block)
    return xxhash.xxh3_64_intdigest(memory[offset : offset + geometry.page_bytes], seed=layer)


def block_checksum(memory: memoryview, geometry: PageGeometry, block: int) -> int:
    return sum(page_checksum(memory, geometry, layer, block) for layer in range(geometry.num_layers)) & MASK
