"""What a simulated worker guesses: as many tokens as chance has it, right ones and wrong ones. A function of its seed and
of the history, so that a run can be repeated."""

import hashlib
from collections.abc import Callable

RIGHT_RATE = 170 / 256
_NONE_RATE = 30 / 256


class HashDraftProposer:
    def __init__(self, seed: int) -> None:
        self._seed = seed.to_bytes(8, "little")

    def propose(self, history: bytes, count: int, follow: Callable[[list[int]], int], vocab_size: int) -> list[int]:
        """`follow` says what truly comes behind the history and these tokens."""
        key = hashlib.blake2b(history, digest_size=16, key=self._seed).digest()
        draws = [byte / 256 for byte in hashlib.blake2b(key, digest_size=1 + count).digest()]
        drafts: list[int] = []
        if draws[0] < _NONE_RATE:
            return drafts
        for draw in draws[1:]:
            correct = follow(drafts)
            drafts.append(correct if draw < RIGHT_RATE else (correct + 1) % vocab_size)
        return drafts
