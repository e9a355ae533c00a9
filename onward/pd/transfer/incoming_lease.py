"""The state of one lease on a decode worker: which pages a peer may write, and which it has written."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from onward.pd.transfer.page_geometry import PageGeometry

ByteRanges = Sequence[tuple[int, int]]
"""Offset and length of bytes in our pool."""


@dataclass(slots=True)
class IncomingLease:
    lease_id: str
    block_ids: list[int]
    checksums: bool
    geometry: PageGeometry
    sender: int | None = None
    """The connection that may write now."""
    is_revoked: bool = False
    """The lease was revoked, and its writer has not stopped yet."""
    revoked_s: float | None = None
    has_failed: bool = False
    """Its writer is lost or has broken the protocol, so the lease will not be completed."""
    is_received: bool = False
    """All pages have arrived, and its writer has ended."""
    first_s: float | None = None
    last_s: float = 0.0
    num_arrived_pages: int = 0
    _index: np.ndarray = field(init=False)
    """For each block of the pool: its index in the lease, or -1."""
    _arrived: np.ndarray = field(init=False)
    """[layer, index in the lease]"""

    def __post_init__(self) -> None:
        assert len(set(self.block_ids)) == len(self.block_ids), "a lease names each block once"
        self._index = np.full(self.geometry.num_blocks, -1, np.int32)
        self._index[self.block_ids] = np.arange(len(self.block_ids))
        self._arrived = np.zeros((self.geometry.num_layers, len(self.block_ids)), bool)

    @property
    def num_pages(self) -> int:
        return self._arrived.size

    @property
    def is_complete(self) -> bool:
        return self.num_arrived_pages == self.num_pages

    @property
    def num_bytes(self) -> int:
        return self.num_arrived_pages * self.geometry.page_bytes

    @property
    def seconds(self) -> float:
        return 0.0 if self.first_s is None else self.last_s - self.first_s

    def write_error(self, byte_ranges: ByteRanges) -> str | None:
        """Returns why these ranges must not be written, or None. Each page must belong to the lease and is written
        once."""
        for offset, num_bytes in byte_ranges:
            if not self.geometry.is_whole_pages(offset, num_bytes):
                return f"{num_bytes} bytes at {offset} are not whole pages of the pool"
        if sum(num_bytes for _, num_bytes in byte_ranges) > self.num_pages * self.geometry.page_bytes:
            return "these are more bytes than the lease is for"
        layers, blocks = self.geometry.pages_in(byte_ranges)
        indices = self._index[blocks]
        if (indices < 0).any():
            return f"block {blocks[indices < 0][0]} is not part of the lease"
        already_arrived = self._arrived[layers, indices]
        if already_arrived.any():
            return f"layer {layers[already_arrived][0]} of block {blocks[already_arrived][0]} was written before"
        if len(np.unique(layers * self.num_pages + indices)) < len(indices):
            return "a page is named twice"
        return None

    def mark_written(self, byte_ranges: ByteRanges, now_s: float) -> None:
        """Records ranges that have been written, for which `write_error` returned None before."""
        self.first_s = now_s if self.first_s is None else self.first_s
        self.last_s = now_s
        layers, blocks = self.geometry.pages_in(byte_ranges)
        self._arrived[layers, self._index[blocks]] = True
        self.num_arrived_pages += len(blocks)
        assert self.num_arrived_pages <= self.num_pages, "each page of a lease arrives once"
