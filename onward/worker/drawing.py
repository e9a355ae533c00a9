"""From the logits of a step to what each slot says: its next token, and how likely it and the prompt's tokens were.

rows of logits    of each span: those whose following, given tokens' logprobs are asked for; then the one that samples
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from onward.kernels.cpu.threads import ThreadPool
from onward.proto.sampling import Sampling
from onward.proto.step import TokenLogprobs
from onward.text.reasoning.thinking_tokens import Thinking
from onward.worker import answer_rules
from onward.worker.batch import Span
from onward.worker.logprobs import token_logprobs
from onward.worker.penalties import LogitRules
from onward.worker.sampler import Draw, Sampler
from onward.worker.slot_grammar import GrammarFault, SlotGrammar


class DrawingSlot(Protocol):
    """What a slot knows that decides its next token."""

    num_prompt: int
    num_tokens: int
    sampling: Sampling
    rules: LogitRules | None
    grammar: SlotGrammar | None
    thinking: Thinking | None


@dataclass(slots=True, frozen=True)
class Drawn:
    token_id: int | None = None
    """None if the span did not sample, had to wait, or has no token that could be drawn."""
    logprobs: list[TokenLogprobs] | None = None
    grammar_done: bool = False
    fault: str | None = None
    """Of the request's grammar."""
    waits: bool = False
    """The grammar's mask was not ready, so that nothing was drawn."""
    prompt_logprobs: list[TokenLogprobs] | None = None


_NOTHING, _WAITS = Drawn(), Drawn(waits=True)


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
        # Asked once: a mask may become ready while we are at it.
        draws = [span.samples and _can_draw(slot) for span, slot in zip(spans, slots, strict=True)]
        at = 0
        for index, (span, slot) in enumerate(zip(spans, slots, strict=True)):
            if span.reported is not None:
                prompts[index] = self._of_given(logits[at:], span.reported, slot, tokens[span.slot])
                at += len(span.reported)
            if span.samples:
                rows += [at] if draws[index] else []
                at += 1
        if len(rows) < at:
            logits = logits[rows]
        drawn = iter(self._sample(logits, [slot for slot, is_drawn in zip(slots, draws, strict=True) if is_drawn]))
        each = [
            next(drawn) if is_drawn else _WAITS if span.samples else _NOTHING
            for span, is_drawn in zip(spans, draws, strict=True)
        ]
        return [
            one if prompt is None else replace(one, prompt_logprobs=prompt)
            for one, prompt in zip(each, prompts, strict=True)
        ]

    def _sample(self, logits: np.ndarray, slots: Sequence[DrawingSlot]) -> list[Drawn]:
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
        faults = self._forbid(logits, slots)
        draws = [Draw(slot.sampling, slot.num_tokens - slot.num_prompt) for slot in slots]
        token_ids = self._sampler.sample(logits, draws)
        return [
            _drawn(slot, token, raw.get(row)) if faults[row] is None else Drawn(fault=faults[row])
            for row, (slot, token) in enumerate(zip(slots, token_ids, strict=True))
        ]

    def _forbid(self, logits: np.ndarray, slots: Sequence[DrawingSlot]) -> list[str | None]:
        """What the slots' grammars and budgets do not allow. For each slot what is wrong with its grammar, if something
        is."""
        faults: list[str | None] = []
        for row, slot in enumerate(slots):
            fault = None
            if slot.grammar is not None or slot.thinking is not None:
                try:
                    answer_rules.forbid(slot, logits[row, : self._vocab_size])
                except GrammarFault as error:
                    fault = str(error)
            faults.append(fault)
        return faults

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


def _can_draw(slot: DrawingSlot) -> bool:
    grammar = answer_rules.grammar_in_force(slot)
    return grammar is None or grammar.is_ready


def _drawn(slot: DrawingSlot, token: int | None, raw: np.ndarray | None) -> Drawn:
    """Moves what the slot knows of its own output behind the new token."""
    if token is None:
        no_token = "grammar, bad words, biases and min_tokens together leave no token to draw"
        return Drawn(fault=None if slot.grammar is None else no_token)
    if slot.rules is not None:
        slot.rules.advance(token)
    grammar_done = False
    if slot.grammar is not None or slot.thinking is not None:
        try:
            grammar_done = answer_rules.advance(slot, token)
        except GrammarFault as error:
            return Drawn(fault=str(error))
    logprobs = None if raw is None else [token_logprobs(raw, token, slot.sampling.logprobs or 0)]
    return Drawn(token, logprobs, grammar_done)
