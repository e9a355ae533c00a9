"""Slots are a resource with an owner, fenced like blocks: a surplus step may still speak for the last tenant."""


class SlotPool:
    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._fenced: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        return len(self._fenced)

    def take(self) -> int:
        return self._free.pop()

    def release(self, slot: int, fence_step: int | None) -> None:
        assert slot not in self._free, f"slot {slot} is free already"
        if fence_step is None:
            self._free.append(slot)
        else:
            self._fenced[slot] = fence_step

    def lift_fences(self, step: int) -> None:
        for slot in [slot for slot, fence in self._fenced.items() if fence <= step]:
            del self._fenced[slot]
            self._free.append(slot)
