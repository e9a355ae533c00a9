"""From the logits of a step to what each slot says: its next token, and how likely it and the prompt's tokens were.

rows of logits    of each span: those whose following, given tokens' logprobs are asked for; then the one that samples
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from onward.kernels.cpu.threads import ThreadPool
from onward.proto.sampling import Sampling
from onward.proto.step import TokenLogprobs
from onward.worker.batch import Span
from onward.worker.logprobs import token_logprobs
from onward.worker.penalties import LogitRules
from onward.worker.sampler import Draw, Sampler


class DrawingSlot(Protocol):
    """What a slot knows that decides its next token."""

    num_prompt: int
    num_tokens: int
    sampling: Sampling
    rules: LogitRules | None


@dataclass(slots=True, frozen=True)
class Drawn:
    token_id: int | None = None
    """None if the span did not sample, or its logits are not numbers."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class Drawing:
    def __init__(self, vocab_size: int, max_rows: int, threads: ThreadPool) -> None:
        self._vocab_size = vocab_size
        self._sampler = Sampler(vocab_size, max_rows, threads)

    def draw(
        self, logits: np.ndarray, spans: Sequence[Span], slots: Sequence[DrawingSlot], tokens: np.ndarray
    ) -> list[Drawn]:
        """One for each span. `slots` are the spans' own; `tokens` is the table of all slots' tokens."""
        prompts: list[list[TokenLogprobs] | None] = [None] * len(spans)
        rows: list[int] = []
        at = 0
        for index, (span, slot) in enumerate(zip(spans, slots, strict=True)):
            if span.reported is not None:
                prompts[index] = self._of_given(logits[at:], span.reported, slot, tokens[span.slot])
                at += len(span.reported)
            if span.samples:
                rows.append(at)
                at += 1
        if len(rows) < at:
            logits = logits[rows]
        sampling = [slot for span, slot in zip(spans, slots, strict=True) if span.samples]
        drawn = iter(self._sample(logits, sampling))
        return [
            Drawn(*(next(drawn) if span.samples else (None, None)), prompt)
            for span, prompt in zip(spans, prompts, strict=True)
        ]

    def _sample(
        self, logits: np.ndarray, slots: Sequence[DrawingSlot]
    ) -> list[tuple[int | None, list[TokenLogprobs] | None]]:
        if not slots:
            return []
        # The model's own logits, kept from what rules and sampling do to them.
        raw = {
            row: logits[row, : self._vocab_size].copy()
            for row, s in enumerate(slots)
            if s.sampling.logprobs is not None
        }
        for row, slot in enumerate(slots):
            if slot.rules is not None:
                slot.rules.apply(logits[row, : self._vocab_size])
        draws = [Draw(slot.sampling, slot.num_tokens - slot.num_prompt) for slot in slots]
        token_ids = self._sampler.sample(logits, draws)
        for slot, token in zip(slots, token_ids, strict=True):
            if slot.rules is not None and token is not None:
                slot.rules.advance(token)
        return [
            (token, [token_logprobs(raw[row], token, slots[row].sampling.logprobs or 0)])
            if row in raw and token is not None
            else (token, None)
            for row, token in enumerate(token_ids)
        ]

    def _of_given(
        self, logits: np.ndarray, positions: range, slot: DrawingSlot, tokens: np.ndarray
    ) -> list[TokenLogprobs]:
        """Each row tells how likely the token after it was: one of the prompt, or of the output, drawn once before."""
        prompt_top, output_top = slot.sampling.prompt_logprobs or 0, slot.sampling.logprobs or 0
        return [
            token_logprobs(
                logits[row, : self._vocab_size],
                int(tokens[position + 1]),
                prompt_top if position + 1 < slot.num_prompt else output_top,
            )
            for row, position in enumerate(positions)
        ]
