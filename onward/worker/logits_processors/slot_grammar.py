"""A slot's grammar: its matcher, and the mask of its next token. The computation of a mask begins before the model
computes the token's logits.

The grammar is created when the slot is assigned, by replaying the whole output, and advanced after each sample. So it
is a function of (request, tokens so far), and is the same after a preemption, a crash, or on another machine.
"""

import math
import time
from collections.abc import Sequence

from onward.errors import OnwardError
from onward.grammar.grammar_errors import GrammarLimitExceeded, InvalidGrammar, TokenNotAllowed
from onward.grammar.lazy import LazyGrammarCompiler
from onward.grammar.matcher import GrammarMatcher, TokenBitmask
from onward.proto.sampling_params import Grammar
from onward.worker.logits_processors.mask_executor import MaskExecutor, NextMask, wait_for_all, wait_for_one

NUM_MASK_THREADS = 2
"""Threads for slow masks. The library releases the interpreter lock, and a very slow mask delays only half of the
others."""
MAX_WAIT_S = 0.1
"""Wait for a mask if the step has no other slot that can sample."""
BRIEF_WAIT_S = 0.001
"""Wait for masks of positions whose rows are computed already: a small part of the time to compute them again."""
_MASK_TIME_DECAY = 0.9
"""Factor of the expected time of a mask from token to token. A slow mask has an effect for some forty tokens."""


class SlotGrammarError(Exception):
    """The grammar of one request has failed."""


class SlotGrammar:
    def __init__(
        self, grammar: Grammar, output: Sequence[int], compiler: LazyGrammarCompiler, mask_executor: MaskExecutor
    ) -> None:
        self._mask_executor = mask_executor
        self._matcher: GrammarMatcher | None = None
        self._expected_mask_s = 0.0
        """Expected time of a mask: that of the slowest recent one, with decay."""
        self._next: NextMask = mask_executor.submit(lambda: self._start_matcher(grammar, output, compiler), math.inf)
        """The mask of the position that is sampled next; `advance` replaces it."""

    @property
    def is_ready(self) -> bool:
        return self._next.done()

    def mask(self) -> TokenBitmask:
        """Returns the mask of the position that is sampled next."""
        assert self._next.done(), "a mask is ready before it is read"
        try:
            return self._next.result()
        except (InvalidGrammar, TokenNotAllowed, GrammarLimitExceeded, OnwardError) as error:
            raise SlotGrammarError(str(error)) from error

    def advance(self, token_id: int) -> bool:
        """Advances the grammar by a sampled token. Returns whether nothing can follow."""
        assert self._next.done(), "a token is sampled under the mask of its position"
        assert self._matcher is not None, "the matcher exists once its first mask is ready"
        try:
            self._matcher.advance(token_id)
        except (TokenNotAllowed, GrammarLimitExceeded) as error:
            raise SlotGrammarError(str(error)) from error
        if not self._matcher.done:
            self._next = self._mask_executor.submit(self._compute_mask, self._expected_mask_s)
        return self._matcher.done

    def wait(self) -> None:
        """Waits for the mask without a timeout, for a slot that cannot sample in a later step. The library's own limits
        bound the time."""
        wait_for_all([self._next])

    @staticmethod
    def wait_for_one(grammars: "Sequence[SlotGrammar]", limit_s: float = MAX_WAIT_S) -> None:
        wait_for_one([grammar._next for grammar in grammars], limit_s)

    @staticmethod
    def wait_briefly(grammars: "Sequence[SlotGrammar]") -> None:
        wait_for_all([grammar._next for grammar in grammars], BRIEF_WAIT_S)

    def _start_matcher(self, grammar: Grammar, output: Sequence[int], compiler: LazyGrammarCompiler) -> TokenBitmask:
        self._matcher = compiler.get().matcher(grammar, output)
        return self._compute_mask()

    def _compute_mask(self) -> TokenBitmask:
        assert self._matcher is not None, "the matcher exists before its first mask"
        started_s = time.thread_time()
        mask = self._matcher.mask()
        self._expected_mask_s = max(time.thread_time() - started_s, _MASK_TIME_DECAY * self._expected_mask_s)
        return mask
