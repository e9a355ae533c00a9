"""What one slot draws in one step: its next token, and further ones for as long as what was drafted in between is right.

    rows     newest token | draft 0 | draft 1 | ...        row d tells what follows it
    drawn    token 0      | token 1 | token 2 | ...        token d + 1 counts only if token d equals draft d

Each token is drawn exactly as if nothing had been drafted: from the logits that follow the same tokens, under the same
rules, with the noise of its position. So drafts decide how many tokens a step gives, and never which.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from onward.proto.sampling_params import SamplingParams
from onward.proto.step import TokenLogprobs
from onward.text.reasoning.reasoning_tracker import ReasoningTracker
from onward.worker.logits_processors import constraints
from onward.worker.logits_processors.penalties import LogitsProcessor
from onward.worker.logits_processors.slot_grammar import SlotGrammar, SlotGrammarError
from onward.worker.token_logprobs import token_logprobs


class SampledSlot(Protocol):
    """What a slot knows that decides its next token."""

    num_prompt: int
    num_tokens: int
    sampling: SamplingParams
    logits_processor: LogitsProcessor | None
    grammar: SlotGrammar | None
    thinking: ReasoningTracker | None


@dataclass(slots=True)
class DraftVerifier:
    slot: SampledSlot
    first_row: int
    drafts: Sequence[int] = ()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    grammar_done: bool = False
    error: str | None = None
    """Of the request's grammar, at the token behind `token_ids`."""
    is_finished: bool = False

    @property
    def depth(self) -> int:
        return len(self.token_ids)

    @property
    def position(self) -> int:
        """In the output, of the token that is drawn next."""
        return self.slot.num_tokens - self.slot.num_prompt + self.depth

    @property
    def is_sequential(self) -> bool:
        """Whether earlier tokens decide a row's token by more than the row itself: then it waits for its turn."""
        return self.slot.logits_processor is not None or self.slot.grammar is not None or self.slot.thinking is not None

    @property
    def pending_grammar(self) -> SlotGrammar | None:
        """The grammar whose mask the next row needs and has not."""
        grammar = constraints.active_grammar(self.slot)
        return None if grammar is None or grammar.is_ready else grammar

    def accept(self, token: int | None, raw_logits: np.ndarray | None) -> None:
        """The token of the next row; None where its logits leave none. Moves what the slot knows behind it."""
        assert not self.is_finished, "a finished verifier accepts no token"
        assert self.depth <= len(self.drafts), "every token but the first follows an accepted draft"
        self.is_finished = True
        if token is None:
            self._on_no_token()
            return
        if not self._advance(token):
            return
        if raw_logits is not None:
            self.logprobs.append(token_logprobs(raw_logits, token, self.slot.sampling.logprobs or 0))
        is_last = self.grammar_done or self._ends_output(token)
        is_accepted = self.depth < len(self.drafts) and self.drafts[self.depth] == token
        self.token_ids.append(token)
        self.is_finished = is_last or not is_accepted

    def fail(self, error: str) -> None:
        """Its grammar cannot say what may come next. Behind the first row that is the next step's to find."""
        assert not self.is_finished, "a finished verifier cannot fail"
        self.is_finished = True
        if not self.token_ids:
            self.error = error

    def _on_no_token(self) -> None:
        if not self.token_ids and self.slot.grammar is not None:
            self.error = "grammar, bad words, biases and min_tokens together leave no token to draw"

    def _advance(self, token: int) -> bool:
        slot = self.slot
        if slot.logits_processor is not None:
            slot.logits_processor.advance(token)
        if slot.grammar is not None or slot.thinking is not None:
            try:
                self.grammar_done = constraints.advance(slot, token)
            except SlotGrammarError as error:
                self.error = str(error)
                return False
        return True

    def _ends_output(self, token: int) -> bool:
        """What the engine would cut is not drawn."""
        sampling = self.slot.sampling
        if sampling.max_tokens is not None and self.position + 1 >= sampling.max_tokens:
            return True
        return token in sampling.end_token_ids and self.position >= sampling.min_tokens
