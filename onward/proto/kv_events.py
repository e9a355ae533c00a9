"""What changes in an instance's prefix cache, for those who send requests where their prompt is known already."""

import msgspec

from onward.proto.field_types import SerialOrNone


class KvEvents(msgspec.Struct, frozen=True, rename={"first_event": "number"}):
    """In order. Names of blocks, as `proto.block_hash` makes them."""

    first_event: SerialOrNone
    """Of the first event here. One that was expected earlier and is not here is lost: ask for all there is, from -1."""
    changes: list[tuple[bool, bytes]] = []
    """(True, name): the cache knows this block now. (False, name): not any more."""
    reset: bool = False
    """Forget what was known before these: they are all there is."""

    @property
    def next_number(self) -> int:
        return self.first_event + len(self.changes)
