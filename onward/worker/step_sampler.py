"""From the logits of a step to what each slot says: its next tokens, and how likely they and the prompt's tokens were.

rows of logits    of each span: those whose following, given tokens' logprobs are asked for; then those that sample
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onward.kernels.cpu.threads import ThreadPool
from onward.proto.step import TokenLogprobs
from onward.worker.batch_builder import TokenSpan
from onward.worker.draft_verifier import DraftVerifier, SampledSlot
from onward.worker.logits_processors import constraints
from onward.worker.logits_processors.slot_grammar import SlotGrammar, SlotGrammarError
from onward.worker.sampler import Sampler, SamplingRow
from onward.worker.token_logprobs import token_logprobs


@dataclass(slots=True, frozen=True)
class SamplerOutput:
    token_ids: list[int]
    """Empty if the span did not sample, had to wait, or has no token that could be drawn."""
    logprobs: list[TokenLogprobs] | None = None
    grammar_done: bool = False
    error: str | None = None
    """Of the request's grammar, behind `token_ids`."""
    mask_pending: bool = False
    """The grammar's mask was not ready, so that nothing was drawn."""
    prompt_logprobs: list[TokenLogprobs] | None = None


class StepSampler:
    def __init__(self, vocab_size: int, max_rows: int, threads: ThreadPool) -> None:
        self._vocab_size = vocab_size
        self._sampler = Sampler(vocab_size, max_rows, threads)

    def sample(
        self, logits: np.ndarray, spans: Sequence[TokenSpan], slots: Sequence[SampledSlot], tokens: np.ndarray
    ) -> list[SamplerOutput]:
        """One for each span. `slots` are the spans' own; `tokens` is the table of all slots' tokens, drafts included."""
        prompts: list[list[TokenLogprobs] | None] = [None] * len(spans)
        verifiers: list[DraftVerifier | None] = [None] * len(spans)
        row = 0
        for index, (span, slot) in enumerate(zip(spans, slots, strict=True)):
            if span.logprob_positions is not None:
                prompts[index] = self._logprobs_of_given_tokens(
                    logits[row:], span.logprob_positions, slot, tokens[span.slot]
                )
                row += len(span.logprob_positions)
            if span.is_sampled:
                verifier = DraftVerifier(slot, row, span.drafts)
                # Asked once: a mask may become ready while we are at it.
                verifiers[index] = verifier if verifier.pending_grammar is None else None
                row += 1 + len(span.drafts)
        assert row == len(logits), "every row of logits belongs to one span"
        self._sample_verifiers(logits[:row], [verifier for verifier in verifiers if verifier is not None])
        return [
            SamplerOutput([], mask_pending=span.is_sampled, prompt_logprobs=prompt)
            if verifier is None
            else _output_of(verifier, prompt)
            for span, verifier, prompt in zip(spans, verifiers, prompts, strict=True)
        ]

    def _sample_verifiers(self, logits: np.ndarray, verifiers: list[DraftVerifier]) -> None:
        """Samples row after row, for all verifiers at once; all rows of a verifier that is not sequential at once."""
        verifier_rows = [(verifier, depth) for verifier in verifiers for depth in _rows_at_once(verifier)]
        while verifier_rows:
            rows = [verifier.first_row + depth for verifier, depth in verifier_rows]
            self._sample_rows(logits if len(rows) == len(logits) else logits[rows], verifier_rows)
            active = [verifier for verifier in verifiers if verifier.is_sequential and not verifier.is_finished]
            pending = [grammar for verifier in active if (grammar := verifier.pending_grammar) is not None]
            if pending:
                SlotGrammar.wait_briefly(pending)
            verifier_rows = [(verifier, verifier.depth) for verifier in active if verifier.pending_grammar is None]
            verifiers = [verifier for verifier, _ in verifier_rows]

    def _sample_rows(self, logits: np.ndarray, verifier_rows: Sequence[tuple[DraftVerifier, int]]) -> None:
        # The model's own logits, kept from what rules and sampling do to them.
        raw = {
            row: logits[row, : self._vocab_size].copy()
            for row, (verifier, _) in enumerate(verifier_rows)
            if verifier.slot.sampling.logprobs is not None
        }
        for row, (verifier, _) in enumerate(verifier_rows):
            if verifier.slot.logits_processor is not None:
                verifier.slot.logits_processor.apply(logits[row, : self._vocab_size])
        self._mask_logits(logits, verifier_rows)
        sampling_rows = [
            SamplingRow(verifier.slot.sampling, verifier.position + depth - verifier.depth)
            for verifier, depth in verifier_rows
        ]
        for row, ((verifier, _), token) in enumerate(
            zip(verifier_rows, self._sampler.sample(logits, sampling_rows), strict=True)
        ):
            if not verifier.is_finished:
                verifier.accept(token, raw.get(row))

    def _mask_logits(self, logits: np.ndarray, verifier_rows: Sequence[tuple[DraftVerifier, int]]) -> None:
        """What the slots' grammars and budgets do not allow."""
        for row, (verifier, _) in enumerate(verifier_rows):
            if verifier.slot.grammar is not None or verifier.slot.thinking is not None:
                try:
                    constraints.mask_logits(verifier.slot, logits[row, : self._vocab_size])
                except SlotGrammarError as error:
                    verifier.fail(str(error))

    def _logprobs_of_given_tokens(
        self, logits: np.ndarray, positions: range, slot: SampledSlot, tokens: np.ndarray
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


def _rows_at_once(verifier: DraftVerifier) -> range:
    return range(1 if verifier.is_sequential else 1 + len(verifier.drafts))


def _output_of(verifier: DraftVerifier, prompt_logprobs: list[TokenLogprobs] | None) -> SamplerOutput:
    logprobs = None if verifier.slot.sampling.logprobs is None else verifier.logprobs
    assert logprobs is None or len(logprobs) == len(verifier.token_ids), "every sampled token has its logprobs"
    return SamplerOutput(
        verifier.token_ids, logprobs, verifier.grammar_done, verifier.error, prompt_logprobs=prompt_logprobs
    )
