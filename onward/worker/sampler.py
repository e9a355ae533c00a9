"""From logits to the next token of each slot. What a slot draws depends on its request and position only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onward.kernels.cpu.sampling import sample_rows
from onward.proto.sampling import Sampling

_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of logits and who it is for."""

    sampling: Sampling
    position: int
    """Index in the output of the token to be drawn."""


class Sampler:
    def __init__(self, vocab_size: int, max_rows: int) -> None:
        self._vocab_size = vocab_size
        self._temperatures, self._min_ps = (np.zeros(max_rows, np.float32) for _ in range(2))
        self._top_ps = np.ones(max_rows, np.float64)
        self._top_ks, self._token_ids = (np.zeros(max_rows, np.int64) for _ in range(2))
        self._seeds, self._choices, self._positions = (np.zeros(max_rows, np.uint64) for _ in range(3))
        self._is_valid = np.zeros(max_rows, np.bool_)

    def sample(self, logits: np.ndarray, draws: Sequence[Draw]) -> list[int | None]:
        """One token per row, or None where the logits are not numbers. `logits` is overwritten."""
        assert logits.dtype == np.float32 and logits.flags.c_contiguous
        for row, draw in enumerate(draws):
            self._take(row, draw)
            _forbid_end(logits[row], draw)
        count = len(draws)
        sample_rows(
            logits.reshape(-1), logits.view(np.int32).reshape(-1), logits.shape[1], self._vocab_size, count,
            self._temperatures, self._top_ks, self._top_ps, self._min_ps, self._seeds, self._choices, self._positions,
            self._token_ids, self._is_valid,
        )  # fmt: skip
        valid = self._is_valid[:count].tolist()
        return [t if ok else None for t, ok in zip(self._token_ids[:count].tolist(), valid, strict=True)]

    def _take(self, row: int, draw: Draw) -> None:
        s = draw.sampling
        self._temperatures[row], self._top_ks[row] = s.temperature, s.top_k
        self._top_ps[row], self._min_ps[row] = s.top_p, s.min_p
        self._seeds[row], self._choices[row] = s.seed & _U64, s.choice & _U64
        self._positions[row] = draw.position


def _forbid_end(logits: np.ndarray, draw: Draw) -> None:
    if draw.position < draw.sampling.min_tokens and draw.sampling.end_token_ids:
        logits[[t for t in draw.sampling.end_token_ids if 0 <= t < len(logits)]] = -np.inf
