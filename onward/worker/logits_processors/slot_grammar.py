"""A slot's grammar: its matcher, and the mask of its next token, which is made before the model has computed its logits.

Built when the slot is assigned, by replaying the whole output, and advanced after each sample. So it is a function of
(request, tokens so far), and is the same after a preemption, a crash, or on another machine.
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
"""For slow masks: the library lets go of the interpreter, and a very slow one holds up only half of the others."""
MAX_WAIT_S = 0.1
"""For a mask, where the step has nothing else to give."""
BRIEF_WAIT_S = 0.001
"""For a mask of a position whose row is computed already: a small part of what computing it again would take."""
_MASK_TIME_DECAY = 0.9
"""Of how long a mask took, what is left when the next one comes: a slow one is remembered for some forty tokens."""


class SlotGrammarError(Exception):
    """This request's grammar cannot go on."""


class SlotGrammar:
    def __init__(
        self, grammar: Grammar, output: Sequence[int], compiler: LazyGrammarCompiler, mask_executor: MaskExecutor
    ) -> None:
        self._mask_executor = mask_executor
        self._matcher: GrammarMatcher | None = None
        self._expected_mask_s = 0.0
        """How long a mask computes: the slowest of late."""
        self._next: NextMask = mask_executor.submit(lambda: self._start_matcher(grammar, output, compiler), math.inf)
        """Of the position that is drawn next, and of no other: `advance` replaces it."""

    @property
    def is_ready(self) -> bool:
        return self._next.done()

    def mask(self) -> TokenBitmask:
        """Of the position that is drawn next."""
        assert self._next.done(), "a mask is ready before it is read"
        try:
            return self._next.result()
        except (InvalidGrammar, TokenNotAllowed, GrammarLimitExceeded, OnwardError) as error:
            raise SlotGrammarError(str(error)) from error

    def advance(self, token_id: int) -> bool:
        """Whether nothing can follow."""
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
        """For who cannot come back later. Masks are bounded by the library's own limits."""
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
