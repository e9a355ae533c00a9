"""Changes of an instance's prefix cache, for routers that send requests to instances with a cached prefix."""

import msgspec

from onward.proto.field_types import SerialOrNone


class KvEvents(msgspec.Struct, frozen=True, rename={"first_event": "number"}):
    """Changes of an instance's prefix cache in order, numbered from `first_event`; with `reset`, all cached blocks.
    The name of a block is its hash (`proto.block_hash`)."""

    first_event: SerialOrNone
    """Number of the first event. If the reader expected an earlier one, events were lost, and it asks for a complete
    listing, from -1."""
    changes: list[tuple[bool, bytes]] = []
    """(True, name): the cache knows this block now. (False, name): not any more."""
    reset: bool = False
    """Forget what was known before these: they are all there is."""

    @property
    def next_number(self) -> int:
        return self.first_event + len(self.changes)
