"""Samples a step's tokens on the CPU. Penalties and bad words, masks and `min_tokens` change the logits before that."""

from collections.abc import Sequence

import numpy as np

from onward.kernels.cpu.threads import ThreadPool
from onward.worker.device import StepOutput
from onward.worker.logits_processors.penalties import FORBIDDEN
from onward.worker.sampler import Sampler, SamplingRow
from onward.worker.slot_state import SlotState
from onward.worker.token_bitmasks import TokenBitmasks
from onward.worker.token_logprobs import token_logprobs
from onward.worker.token_span import TokenSpan


class StepSampler:
    def __init__(self, vocab_size: int, max_rows: int, threads: ThreadPool) -> None:
        self._vocab_size = vocab_size
        self._sampler = Sampler(vocab_size, max_rows, threads)

    def sample(
        self, logits: np.ndarray, spans: Sequence[TokenSpan[SlotState]], positions: Sequence[int],
        masks: TokenBitmasks | None,
    ) -> StepOutput:  # fmt: skip
        """Returns a token for each row of logits, which it overwrites. `positions` are the tokens' indexes in the
        outputs of their slots."""
        careful = [
            (row, span.slot_state)
            for row, (span, position) in enumerate(zip(spans, positions, strict=True))
            if position < span.slot_state.processed_until
        ]
        # Copies of the model's own logits, because processors and sampling change them.
        raw = {row: self._row(logits, row).copy() for row, slot in careful if slot.sampling.logprobs is not None}
        for row, slot in careful:
            if slot.logits_processor is not None:
                slot.logits_processor.apply(self._row(logits, row))
        if masks is not None:
            self._apply_masks(logits, masks)
        sampling_rows = [
            SamplingRow(span.slot_state.sampling, position) for span, position in zip(spans, positions, strict=True)
        ]
        output = StepOutput(*self._sampler.sample_rows(logits, sampling_rows))
        for row, slot in careful:
            if output.are_valid[row] and (masks is None or row not in masks.discarded):
                self._follow(output, row, slot, raw.get(row))
        return output

    def _row(self, logits: np.ndarray, row: int) -> np.ndarray:
        return logits[row, : self._vocab_size]

    def _follow(self, output: StepOutput, row: int, slot: SlotState, raw_logits: np.ndarray | None) -> None:
        token = output.token_ids[row]
        if slot.logits_processor is not None:
            slot.logits_processor.advance(token)
        if raw_logits is not None:
            output.logprobs[row] = token_logprobs(raw_logits, token, slot.sampling.logprobs or 0)

    def _apply_masks(self, logits: np.ndarray, masks: TokenBitmasks) -> None:
        for row, bits in zip(masks.rows, masks.bits, strict=True):
            allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
            self._row(logits, row)[~allowed] = FORBIDDEN
        for row, token in masks.forced:
            self._row(logits, row)[:] = FORBIDDEN
            logits[row, token] = 0.0
