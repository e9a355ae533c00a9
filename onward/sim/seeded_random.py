"""Random draws that depend on a seed and on who asks, and on nothing else: not on the order in which others ask."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class SeededRandom:
    def __init__(self, seed: int, name: str = "") -> None:
        self._seed, self._name = seed, name
        # Text seeds go through a fixed hash, whatever PYTHONHASHSEED says.
        self._random = random.Random(f"{seed}/{name}")

    def substream(self, name: str) -> "SeededRandom":
        """Draws of its own for one part."""
        return SeededRandom(self._seed, f"{self._name}/{name}")

    def happens(self, rate: float) -> bool:
        return rate > 0 and self._random.random() < rate

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self._random.random()

    def jittered(self, value: float) -> float:
        """Mostly near, sometimes much more: as delays are."""
        return value * (0.5 + self._random.expovariate(2.0))

    def randint(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + int(self._random.random() * (high - low + 1))

    def below(self, bound: int) -> int:
        return int(self._random.random() * bound)

    def choice(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def weighted_choice(self, weights: dict[T, float]) -> T:
        at = self._random.random() * sum(weights.values())
        for item, weight in weights.items():
            at -= weight
            if at < 0:
                return item
        return next(reversed(weights))

    def hex_token(self) -> str:
        """A name that nobody else has."""
        return f"{self._random.getrandbits(128):032x}"

    def bits(self, count: int) -> int:
        return self._random.getrandbits(count)
