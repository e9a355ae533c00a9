"""Randomness as a dependency, like the clock: unguessable ids, and seeds. The simulator passes its own source."""

import random
import secrets
from typing import Protocol

SEED_BITS = 53
"""Bits of a seed that the server chooses: a client that reads it from JSON as a double sends back the same seed."""


class RandomSource(Protocol):
    def hex_token(self) -> str:
        """Returns 128 random bits as hex."""
        ...

    def bits(self, count: int) -> int: ...

    def below(self, bound: int) -> int: ...


class SystemRandomSource:
    def __init__(self) -> None:
        self._random = random.SystemRandom()

    def hex_token(self) -> str:
        return secrets.token_hex(16)

    def bits(self, count: int) -> int:
        return secrets.randbits(count)

    def below(self, bound: int) -> int:
        return self._random.randrange(bound)
