"""A slot's grammar: its matcher, and the mask of its next token, which is made by another thread while the model computes.

Built when the slot is assigned, by replaying the whole output, and advanced after each sample. So it is a function of
(request, tokens so far), and is the same after a preemption, a crash, or on another machine.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait

import numpy as np

from onward.errors import OnwardError
from onward.grammar.faults import GrammarFailed, GrammarRefused, TokenRefused
from onward.grammar.lazy import LazyGrammars
from onward.grammar.matcher import Mask, Matcher
from onward.proto.sampling import Grammar

NUM_THREADS = 2
"""That make masks: the library lets go of the interpreter, and a slow one holds up only its neighbours' half."""
MAX_WAIT_S = 0.1
"""For a mask, where the step has nothing else to give."""
BRIEF_WAIT_S = 0.001
"""For a mask of a position whose row is computed already: a small part of what computing it again would take."""
_FORBIDDEN = np.float32(-np.inf)


class GrammarFault(Exception):
    """This request's grammar cannot go on."""


class SlotGrammar:
    def __init__(self, grammar: Grammar, output: Sequence[int], grammars: LazyGrammars, threads: Executor) -> None:
        self._threads = threads
        self._matcher: Matcher | None = None
        self._next: Future[Mask] = threads.submit(self._begin, grammar, output, grammars)
        """Of the position that is drawn next, and of no other: `advance` replaces it."""

    @property
    def is_ready(self) -> bool:
        return self._next.done()

    def mask(self) -> Mask:
        """Of the position that is drawn next."""
        assert self._next.done(), "nobody waits for it here"
        try:
            return self._next.result()
        except (GrammarRefused, TokenRefused, GrammarFailed, OnwardError) as error:
            raise GrammarFault(str(error)) from error

    def forbid(self, logits: np.ndarray, end_token_ids: Iterable[int]) -> None:
        """What may not come next, in one row of logits. An end token may where the output is complete, and only there,
        whatever it would be as text."""
        mask = self.mask()
        bits = np.frombuffer(mask.bits, np.uint8)
        allowed = np.unpackbits(bits, count=min(len(logits), 8 * len(bits)), bitorder="little").view(np.bool_)
        ends = [token_id for token_id in end_token_ids if token_id < len(logits)]
        kept = logits[ends]
        logits[len(allowed) :] = _FORBIDDEN
        logits[: len(allowed)][~allowed] = _FORBIDDEN
        logits[ends] = kept if mask.may_end else _FORBIDDEN

    def advance(self, token_id: int) -> bool:
        """Whether nothing can follow."""
        assert self._matcher is not None, "its mask was used, so it is there"
        try:
            self._matcher.advance(token_id)
        except (TokenRefused, GrammarFailed) as error:
            raise GrammarFault(str(error)) from error
        if not self._matcher.done:
            self._next = self._threads.submit(self._matcher.mask)
        return self._matcher.done

    def wait(self) -> None:
        """For who cannot come back later. Masks are bounded by the library's own limits."""
        wait([self._next])

    @staticmethod
    def wait_for_one(grammars: "Sequence[SlotGrammar]", limit_s: float = MAX_WAIT_S) -> None:
        wait([one._next for one in grammars], limit_s, FIRST_COMPLETED)

    @staticmethod
    def wait_briefly(grammars: "Sequence[SlotGrammar]") -> None:
        wait([one._next for one in grammars], BRIEF_WAIT_S)

    def _begin(self, grammar: Grammar, output: Sequence[int], grammars: LazyGrammars) -> Mask:
        self._matcher = grammars.get().matcher(grammar, output)
        return self._matcher.mask()
