"""Samples the tokens of one slot in one step: the next token, and further tokens for as long as drafts are accepted.

    rows     newest token | draft 0 | draft 1 | ...        row d has the logits of the token after it
    sampled  token 0      | token 1 | token 2 | ...        token d + 1 counts only if token d equals draft d

Each token is sampled exactly as without drafts: from the logits after the same tokens, under the same constraints, with
the noise of its position. So drafts decide how many tokens a step returns, and never which.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from onward.proto.step import TokenLogprobs
from onward.worker.device import SampledRow, StepOutput
from onward.worker.logits_processors import constraints
from onward.worker.logits_processors.slot_grammar import SlotGrammar, SlotGrammarError
from onward.worker.slot_state import SlotState
from onward.worker.token_span import TokenSpan


@dataclass(slots=True)
class DraftVerifier:
    """The sampled tokens of one slot in one step, as far as its drafts are right."""

    span: TokenSpan[SlotState]
    first_row: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    grammar_done: bool = False
    error: str | None = None
    """Error of the request's grammar at the first token."""
    is_finished: bool = False

    @property
    def slot(self) -> SlotState:
        return self.span.slot_state

    @property
    def depth(self) -> int:
        return len(self.token_ids)

    @property
    def is_sequential(self) -> bool:
        """Whether rows must be sampled one after the other, because constraints or a logits processor make a row's
        token depend on the tokens before it."""
        return self.slot.logits_processor is not None or self.slot.is_constrained

    @property
    def pending_grammar(self) -> SlotGrammar | None:
        """The grammar whose mask the next row needs, if that mask is not ready."""
        grammar = constraints.active_grammar(self.slot)
        return None if grammar is None or grammar.is_ready else grammar

    def sampled_row(self, depth: int) -> SampledRow:
        return SampledRow(self.first_row + depth, self.span, depth)

    def accept(self, token: int | None, logprobs: TokenLogprobs | None) -> None:
        """Takes the token of the next row, and advances the slot's constraints by it. `token` is None if the logits
        leave none."""
        assert not self.is_finished, "a finished verifier accepts no token"
        assert self.depth <= len(self.span.drafts), "every token but the first follows an accepted draft"
        self.is_finished = True
        if token is None or not self._advance(token):
            return
        if logprobs is not None:
            self.logprobs.append(logprobs)
        is_last = self.grammar_done or self._ends_output(token)
        is_accepted = self.depth < len(self.span.drafts) and self.span.drafts[self.depth] == token
        self.token_ids.append(token)
        self.is_finished = is_last or not is_accepted

    def fail(self, error: str) -> None:
        """Ends the verification because the grammar has failed. After the first row the error is not stored; the next
        step meets it again."""
        assert not self.is_finished, "a finished verifier cannot fail"
        self.is_finished = True
        if not self.token_ids:
            self.error = error

    def _advance(self, token: int) -> bool:
        if self.depth:
            self.slot.keep_draft()
        try:
            self.grammar_done = self.slot.is_constrained and self.slot.accept_token(token)
        except SlotGrammarError as error:
            if self.depth:
                self.slot.undo_sample()
                self.slot.error = str(error)
            else:
                self.error = str(error)
            return False
        return True

    def _ends_output(self, token: int) -> bool:
        """Returns whether the output ends with this token. The engine would cut later tokens, so none is sampled."""
        sampling, position = self.slot.sampling, self.span.position + self.depth
        if sampling.max_tokens is not None and position + 1 >= sampling.max_tokens:
            return True
        return token in sampling.end_token_ids and position >= sampling.min_tokens


def verify_drafts(
    verifiers: Sequence[DraftVerifier], sample: Callable[[Sequence[tuple[DraftVerifier, int]]], StepOutput]
) -> None:
    """Samples for all verifiers together: one row at a time of a sequential verifier, and all rows at once of another.
    `sample` gets verifiers with the depths of their rows."""
    rows = [(verifier, depth) for verifier in verifiers for depth in _rows_at_once(verifier)]
    while rows:
        output = sample(rows)
        for row, ((verifier, _), token, is_valid) in enumerate(
            zip(rows, output.token_ids, output.are_valid, strict=True)
        ):
            if not verifier.is_finished:
                verifier.accept(token if is_valid else None, output.logprobs.get(row))
        active = [verifier for verifier in verifiers if verifier.is_sequential and not verifier.is_finished]
        pending = [grammar for verifier in active if (grammar := verifier.pending_grammar) is not None]
        if pending:
            SlotGrammar.wait_briefly(pending)
        rows = [(verifier, verifier.depth) for verifier in active if verifier.pending_grammar is None]
        verifiers = [verifier for verifier, _ in rows]


def _rows_at_once(verifier: DraftVerifier) -> range:
    return range(1 if verifier.is_sequential else 1 + len(verifier.span.drafts))
