"""A dictionary of bounded size that evicts its oldest entry. It keeps facts about things that have ended, so that a
late message can be answered."""

from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedDict(Generic[Key, Value]):
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: OrderedDict[Key, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: Key) -> bool:
        return key in self._items

    def get(self, key: Key) -> Value | None:
        return self._items.get(key)

    def put(self, key: Key, value: Value) -> None:
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > self._capacity:
            self._items.popitem(last=False)
