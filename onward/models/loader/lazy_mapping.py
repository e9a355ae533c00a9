"""A mapping whose values are made at each access."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

Value = TypeVar("Value")


class LazyMapping(Mapping[str, Value]):
    def __init__(self, names: Iterable[str], make: Callable[[str], Value]) -> None:
        self._names, self._make = dict.fromkeys(names), make

    def __getitem__(self, name: str) -> Value:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
