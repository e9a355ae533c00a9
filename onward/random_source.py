"""Randomness, passed in, as the clock is: ids that nobody can guess, and seeds. The simulator passes another."""

import random
import secrets
from typing import Protocol

SEED_BITS = 53
"""Of a seed that we choose: a client that reads it from JSON as a double sends back the same one."""


class RandomSource(Protocol):
    def hex_token(self) -> str:
        """128 bits, as hex."""
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
