"""Random numbers that depend only on the seed and on the name of the substream, not on the use of other substreams."""

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
        """Returns an independent substream."""
        return SeededRandom(self._seed, f"{self._name}/{name}")

    def happens(self, rate: float) -> bool:
        return rate > 0 and self._random.random() < rate

    def uniform(self, low: float, high: float) -> float:
        return low + (high - low) * self._random.random()

    def jittered(self, value: float) -> float:
        """Returns a number that is mostly near the value and sometimes much larger, as delays are."""
        return value * (0.5 + self._random.expovariate(2.0))

    def randint(self, low: int, high: int) -> int:
        """Returns a number from `low` to `high`, both included."""
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
        """Returns a name of 128 random bits, so that no two are equal."""
        return f"{self._random.getrandbits(128):032x}"

    def bits(self, count: int) -> int:
        return self._random.getrandbits(count)
