"""What every new grammar passes before any work is done: can it be compiled at a bearable price, and where are we in it?

The first is asked of a process that may be lost; the second is found by replaying the given tokens. Both in a queue of
their own, so that neither tokens nor prompts wait for somebody's grammar. Knows no HTTP.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from onward.api.structured import Wanted
from onward.api.work_queues import GRAMMARS
from onward.grammar.check_process import CheckProcesses
from onward.grammar.faults import GrammarFailed, GrammarRefused, TokenRefused
from onward.grammar.grammars import Grammars
from onward.grammar.lazy import LazyGrammars
from onward.proto.model import ModelText
from onward.proto.sampling import Grammar
from onward.proto.thinking import ThinkingRule
from onward.text.reasoning.thinking_tokens import Thinking
from onward.text.tokenizer import Tokenizer
from onward.web.body import wrong
from onward.web.fair_queue import FairQueue

MAX_PASSED = 64
"""Grammars that need not wait again."""


class Check(Protocol):
    def check(self, grammar: Grammar) -> None:
        """Raises `GrammarRefused`."""
        ...


class GrammarGate:
    def __init__(self, text: ModelText, tokenizer: Tokenizer | None, check: Check | None = None) -> None:
        self._tokenizer = tokenizer
        self._check = CheckProcesses(text.tokenizer or "", GRAMMARS.running) if check is None else check
        self._grammars = LazyGrammars(self._new_grammars)
        self._passed: OrderedDict[Grammar, None] = OrderedDict()

    async def pass_through(
        self,
        queue: FairQueue,
        caller: str,
        wanted: Wanted,
        given: Sequence[Sequence[int]],
        given_path: str,
        thinking: ThinkingRule | None = None,
    ) -> tuple[int | None, ...]:
        """Of each list of given tokens: how many complete the grammar, so that nothing can follow. None: they do not.
        Thinking is no part of it."""
        if self._tokenizer is None:
            raise wrong(wanted.path, "this model has no tokenizer, so nothing can be said about its text")
        if wanted.grammar in self._passed and not any(given):
            self._passed.move_to_end(wanted.grammar)
            return (None,) * len(given)
        ends = await queue.run(caller, lambda: self._ends(wanted, given, given_path, thinking))
        self._remember(wanted.grammar)
        return ends

    def _remember(self, grammar: Grammar) -> None:
        self._passed[grammar] = None
        while len(self._passed) > MAX_PASSED:
            self._passed.popitem(last=False)

    def close(self) -> None:
        if isinstance(self._check, CheckProcesses):
            self._check.close()

    def _ends(
        self, wanted: Wanted, given: Sequence[Sequence[int]], given_path: str, thinking: ThinkingRule | None
    ) -> tuple[int | None, ...]:
        try:
            self._check.check(wanted.grammar)
            return tuple(
                self._end(wanted, one, _path(given_path, index, given), _answer_from(one, thinking))
                for index, one in enumerate(given)
            )
        except (GrammarRefused, GrammarFailed) as error:
            raise wrong(wanted.path, str(error)) from error

    def _end(self, wanted: Wanted, token_ids: Sequence[int], path: str, answer_from: int) -> int | None:
        """End tokens that lead nowhere are cut off before."""
        if len(token_ids) <= answer_from:
            return None  # nothing needs to be compiled in this process
        matcher = self._grammars.get().matcher(wanted.grammar)
        for position, token_id in enumerate(token_ids[answer_from:], answer_from):
            try:
                matcher.advance(token_id)
            except TokenRefused:
                raise wrong(f"{path}[{position}]", f"is not allowed here by {wanted.path}") from None
            if matcher.done:
                return position + 1
        return None

    def _new_grammars(self) -> Grammars:
        assert self._tokenizer is not None, "who has none is refused before"
        return Grammars(self._tokenizer)


def _answer_from(token_ids: Sequence[int], thinking: ThinkingRule | None) -> int:
    if thinking is None:
        return 0
    found = Thinking(thinking, token_ids).answer_from
    return len(token_ids) if found is None else found


def _path(path: str, index: int, given: Sequence[object]) -> str:
    return path if len(given) == 1 else f"{path}[{index}]"
