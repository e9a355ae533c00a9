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
        chains: list[DraftVerifier | None] = [None] * len(spans)
        at = 0
        for index, (span, slot) in enumerate(zip(spans, slots, strict=True)):
            if span.logprob_positions is not None:
                prompts[index] = self._logprobs_of_given_tokens(
                    logits[at:], span.logprob_positions, slot, tokens[span.slot]
                )
                at += len(span.logprob_positions)
            if span.is_sampled:
                chain = DraftVerifier(slot, at, span.drafts)
                # Asked once: a mask may become ready while we are at it.
                chains[index] = chain if chain.pending_grammar is None else None
                at += 1 + len(span.drafts)
        assert at == len(logits), "every row of logits belongs to one span"
        self._sample_verifiers(logits[:at], [chain for chain in chains if chain is not None])
        return [
            SamplerOutput([], mask_pending=span.is_sampled, prompt_logprobs=prompt)
            if chain is None
            else _output_of(chain, prompt)
            for span, chain, prompt in zip(spans, chains, prompts, strict=True)
        ]

    def _sample_verifiers(self, logits: np.ndarray, chains: list[DraftVerifier]) -> None:
        """Row after row, of all chains at once. Where nothing but the row decides, all of a chain's rows go at once."""
        draws = [(chain, depth) for chain in chains for depth in _rows_at_once(chain)]
        while draws:
            rows = [chain.first_row + depth for chain, depth in draws]
            self._sample_rows(logits if len(rows) == len(logits) else logits[rows], draws)
            going_on = [chain for chain in chains if chain.is_sequential and not chain.is_finished]
            late = [grammar for chain in going_on if (grammar := chain.pending_grammar) is not None]
            if late:
                SlotGrammar.wait_briefly(late)
            draws = [(chain, chain.depth) for chain in going_on if chain.pending_grammar is None]
            chains = [chain for chain, _ in draws]

    def _sample_rows(self, logits: np.ndarray, draws: Sequence[tuple[DraftVerifier, int]]) -> None:
        # The model's own logits, kept from what rules and sampling do to them.
        raw = {
            row: logits[row, : self._vocab_size].copy()
            for row, (chain, _) in enumerate(draws)
            if chain.slot.sampling.logprobs is not None
        }
        for row, (chain, _) in enumerate(draws):
            if chain.slot.logits_processor is not None:
                chain.slot.logits_processor.apply(logits[row, : self._vocab_size])
        self._mask_logits(logits, draws)
        asked = [SamplingRow(chain.slot.sampling, chain.position + depth - chain.depth) for chain, depth in draws]
        for row, ((chain, _), token) in enumerate(zip(draws, self._sampler.sample(logits, asked), strict=True)):
            if not chain.is_finished:
                chain.accept(token, raw.get(row))

    def _mask_logits(self, logits: np.ndarray, draws: Sequence[tuple[DraftVerifier, int]]) -> None:
        """What the slots' grammars and budgets do not allow."""
        for row, (chain, _) in enumerate(draws):
            if chain.slot.grammar is not None or chain.slot.thinking is not None:
                try:
                    constraints.mask_logits(chain.slot, logits[row, : self._vocab_size])
                except SlotGrammarError as error:
                    chain.fail(str(error))

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


def _rows_at_once(chain: DraftVerifier) -> range:
    return range(1 if chain.is_sequential else 1 + len(chain.drafts))


def _output_of(chain: DraftVerifier, prompt_logprobs: list[TokenLogprobs] | None) -> SamplerOutput:
    logprobs = None if chain.slot.sampling.logprobs is None else chain.logprobs
    assert logprobs is None or len(logprobs) == len(chain.token_ids), "every sampled token has its logprobs"
    return SamplerOutput(chain.token_ids, logprobs, chain.grammar_done, chain.error, prompt_logprobs=prompt_logprobs)
