"""The state of one push on a prefill worker: pages that are computed, pages in flight, and pages still to be computed.

Blocks are numbered from the push's first. Each is added once, by a step; its layers follow each other as they are
computed.
"""

import enum
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from onward.pd.transfer.backend import MemoryCopy
from onward.pd.transfer.page_geometry import MASK, PageGeometry, page_checksum, plan_copies
from onward.proto.kv_transfer import KvPush

MAX_BATCH_BYTES = 4 << 20
MAX_BATCH_PAGES = 512


class ComputedBlocks(NamedTuple):
    """Consecutive blocks of a push that a step completes, with their ids in our pool."""

    lease_id: str
    first: int
    source_ids: list[int]
    layers_done_before: int | None
    """The model's count of finished layers before that step; None if all layers are there already."""


class PushStage(enum.Enum):
    WAITING = enum.auto()
    """Waits for the connection."""
    JOINING = enum.auto()
    WRITING = enum.auto()
    FINISHING = enum.auto()
    """All pages are written and announced; the peer counts them."""
    STOPPING = enum.auto()
    """No batch is started any more; batches in flight are completed."""


@dataclass(slots=True)
class _PageRange:
    """Blocks [first, end) in one layer."""

    layer: int
    first: int
    end: int


@dataclass(slots=True)
class _BlocksInStep:
    first: int
    end: int
    layers_before: int
    next_layer: int = 0


@dataclass(slots=True)
class PushJob:
    push: KvPush
    ours: PageGeometry
    stage: PushStage = PushStage.WAITING
    failure: str | None = None
    """Why it stops, if not by the engine's command."""
    num_in_flight: int = 0
    """Number of batches in flight."""
    first_s: float | None = None
    last_s: float = 0.0
    checksums: list[int] = field(init=False)
    _source_ids: list[int] = field(init=False)
    _num_pages_left: int = field(init=False)
    _ready: deque[_PageRange] = field(default_factory=deque)
    _computing: list[_BlocksInStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.push.block_ids)
        self._source_ids = [0] * count
        self._num_pages_left = count * self.ours.num_layers
        self.checksums = [0] * count if self.push.checksums else []

    @property
    def lease_id(self) -> str:
        return self.push.lease_id

    @property
    def num_bytes(self) -> int:
        return len(self.push.block_ids) * self.ours.num_layers * self.ours.page_bytes

    @property
    def seconds(self) -> float:
        return 0.0 if self.first_s is None else self.last_s - self.first_s

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    @property
    def is_computing(self) -> bool:
        return bool(self._computing)

    @property
    def is_all_sent(self) -> bool:
        return self._num_pages_left == 0 and self.num_in_flight == 0

    def stop(self, failure: str | None) -> None:
        """Stops the push: no further batch is started. `failure` is None if the engine stops it."""
        self.stage, self.failure = PushStage.STOPPING, failure

    def add_blocks(self, computed: ComputedBlocks) -> None:
        end = computed.first + len(computed.source_ids)
        assert 0 <= computed.first <= end <= len(self._source_ids), "a step feeds blocks that the peer waits for"
        self._source_ids[computed.first : end] = computed.source_ids
        if computed.layers_done_before is not None:
            self._computing.append(_BlocksInStep(computed.first, end, computed.layers_done_before))
            return
        for layer in range(self.ours.num_layers):
            self._ready.append(_PageRange(layer, computed.first, end))

    def on_layers_done(self, layers_done: int) -> None:
        """Queues the pages of the layers that the model has finished. `layers_done` counts all layers that it has
        finished since its beginning, those of earlier steps included."""
        for step in self._computing:
            done = min(layers_done - step.layers_before, self.ours.num_layers)
            for layer in range(step.next_layer, done):
                self._ready.append(_PageRange(layer, step.first, step.end))
            step.next_layer = max(step.next_layer, done)
        self._computing = [step for step in self._computing if step.next_layer < self.ours.num_layers]

    def next_batch(self, theirs: PageGeometry, memory: memoryview) -> list[MemoryCopy]:
        """Returns the next pages that are ready, up to the size of a batch."""
        max_pages = max(1, min(MAX_BATCH_PAGES, MAX_BATCH_BYTES // self.ours.page_bytes))
        batch: list[MemoryCopy] = []
        for pages in self._take_pages(max_pages):
            sources = self._source_ids[pages.first : pages.end]
            batch += plan_copies(self.ours, theirs, pages.layer, sources, self.push.block_ids[pages.first : pages.end])
            self._add_checksums(memory, pages, sources)
            self._num_pages_left -= pages.end - pages.first
            assert self._num_pages_left >= 0, "each page of a push is sent once"
        return batch

    def _take_pages(self, max_pages: int) -> Iterator[_PageRange]:
        while max_pages and self._ready:
            pages = self._ready[0]
            if pages.end - pages.first > max_pages:
                cut = pages.first + max_pages
                yield _PageRange(pages.layer, pages.first, cut)
                pages.first = cut
                return
            self._ready.popleft()
            max_pages -= pages.end - pages.first
            yield pages

    def _add_checksums(self, memory: memoryview, pages: _PageRange, source_ids: Sequence[int]) -> None:
        if not self.checksums:
            return
        for index, block in enumerate(source_ids, pages.first):
            page = page_checksum(memory, self.ours, pages.layer, block)
            self.checksums[index] = (self.checksums[index] + page) & MASK
