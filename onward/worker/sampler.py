"""Samples the next token of each slot from its logits. The noise depends on the request and the position only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onward.kernels.cpu.phases import WORDS_PER_PHASE
from onward.kernels.cpu.sampling import sample, scratch_size
from onward.kernels.cpu.threads import ThreadPool
from onward.models.layers.kernel_context import fill_context, new_context
from onward.proto.sampling_params import SamplingParams

_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row of logits is sampled."""

    sampling: SamplingParams
    position: int
    """Index in the output of the token to be sampled."""


class Sampler:
    def __init__(self, vocab_size: int, max_rows: int, threads: ThreadPool) -> None:
        self._threads, self._vocab_size = threads, vocab_size
        self._temperatures, self._min_ps = (np.zeros(max_rows, np.float32) for _ in range(2))
        self._top_ps = np.ones(max_rows, np.float64)
        self._top_ks, self._token_ids = (np.zeros(max_rows, np.int64) for _ in range(2))
        self._seeds, self._choices, self._positions = (np.zeros(max_rows, np.uint64) for _ in range(3))
        self._is_valid = np.zeros(max_rows, np.uint8)
        self._scratch = np.zeros((threads.size, scratch_size(vocab_size)), np.float32)
        self._work = np.zeros(WORDS_PER_PHASE, np.int64)
        self._context = new_context(sample)
        fill_context(
            self._context, vocab_size=vocab_size, temperatures=self._temperatures, min_ps=self._min_ps,
            top_ps=self._top_ps, top_ks=self._top_ks, token_ids=self._token_ids, seeds=self._seeds,
            choices=self._choices, positions=self._positions, is_valid=self._is_valid, scratch=self._scratch,
            scratch_stride=self._scratch.shape[1], work=self._work,
        )  # fmt: skip

    def sample(self, logits: np.ndarray, sampling_rows: Sequence[SamplingRow]) -> list[int | None]:
        """Returns one token per row, or None where the logits are not numbers."""
        tokens, valid = self.sample_rows(logits, sampling_rows)
        return [token if ok else None for token, ok in zip(tokens, valid, strict=True)]

    def sample_rows(self, logits: np.ndarray, sampling_rows: Sequence[SamplingRow]) -> tuple[list[int], list[int]]:
        """Returns one token per row, and whether it is valid. Overwrites the logits of end tokens before
        `min_tokens`."""
        assert logits.dtype == np.float32, "the kernel reads float32 logits"
        assert logits.flags.c_contiguous, "the kernel reads contiguous rows"
        assert logits.flags.writeable, "logits of forbidden tokens are overwritten in place"
        assert logits.shape[1] >= self._vocab_size, "a row of logits covers the vocabulary"
        assert len(sampling_rows) == len(logits), "every row of logits has one draw"
        assert len(sampling_rows) <= len(self._token_ids), "the sampler's buffers have room for every row"
        for row, sampling_row in enumerate(sampling_rows):
            self._set_row(row, sampling_row)
            _mask_end_tokens(logits[row], sampling_row)
        fill_context(self._context, logits=logits, stride=logits.shape[1], count=len(sampling_rows))
        self._work[:] = 0
        self._threads.run(sample, self._context)
        return self._token_ids[: len(sampling_rows)].tolist(), self._is_valid[: len(sampling_rows)].tolist()

    def _set_row(self, row: int, sampling_row: SamplingRow) -> None:
        params = sampling_row.sampling
        self._temperatures[row], self._top_ks[row] = params.temperature, params.top_k
        self._top_ps[row], self._min_ps[row] = params.top_p, params.min_p
        self._seeds[row], self._choices[row] = params.seed & _U64, params.choice_index & _U64
        self._positions[row] = sampling_row.position


def _mask_end_tokens(logits: np.ndarray, sampling_row: SamplingRow) -> None:
    if sampling_row.position < sampling_row.sampling.min_tokens and sampling_row.sampling.end_token_ids:
        logits[[t for t in sampling_row.sampling.end_token_ids if 0 <= t < len(logits)]] = -np.inf
