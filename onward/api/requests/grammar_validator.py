"""What every new grammar passes before any work is done: can it be compiled at a bearable price, and where are we in it?

The first is asked of a process that may be lost; the second is found by replaying the given tokens. Both in a queue of
their own, so that neither tokens nor prompts wait for somebody's grammar. Knows no HTTP.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from onward.api.requests.preprocessing_executors import GRAMMAR_LIMITS
from onward.api.requests.structured_outputs import RequestedGrammar
from onward.grammar.grammar_checker import GrammarChecker
from onward.grammar.grammar_compiler import GrammarCompiler
from onward.grammar.grammar_errors import GrammarLimitExceeded, InvalidGrammar, TokenNotAllowed
from onward.grammar.lazy import LazyGrammarCompiler
from onward.proto.model import TokenizerFiles
from onward.proto.reasoning_params import ReasoningParams
from onward.proto.sampling_params import Grammar
from onward.text.reasoning.reasoning_tracker import ReasoningTracker
from onward.text.tokenizer import Tokenizer
from onward.web.fair_executor import FairExecutor
from onward.web.json_body import field_error

MAX_VALIDATED = 64
"""Grammars that need not wait again."""


class GrammarCheck(Protocol):
    def check(self, grammar: Grammar) -> None:
        """Raises `InvalidGrammar`."""
        ...


class GrammarValidator:
    def __init__(self, text: TokenizerFiles, tokenizer: Tokenizer | None, check: GrammarCheck | None = None) -> None:
        self._tokenizer = tokenizer
        self._check = GrammarChecker(text.tokenizer or "", GRAMMAR_LIMITS.running) if check is None else check
        self._grammars = LazyGrammarCompiler(self._new_grammars)
        self._passed: OrderedDict[Grammar, None] = OrderedDict()

    async def validate(
        self,
        queue: FairExecutor,
        caller: str,
        wanted: RequestedGrammar,
        given: Sequence[Sequence[int]],
        given_path: str,
        thinking: ReasoningParams | None = None,
    ) -> tuple[int | None, ...]:
        """Of each list of given tokens: how many complete the grammar, so that nothing can follow. None: they do not.
        Thinking is no part of it."""
        if self._tokenizer is None:
            raise field_error(wanted.field_path, "this model has no tokenizer, so nothing can be said about its text")
        if wanted.grammar in self._passed and not any(given):
            self._passed.move_to_end(wanted.grammar)
            return (None,) * len(given)
        ends = await queue.run(caller, lambda: self._completion_points(wanted, given, given_path, thinking))
        self._remember(wanted.grammar)
        return ends

    def _remember(self, grammar: Grammar) -> None:
        self._passed[grammar] = None
        while len(self._passed) > MAX_VALIDATED:
            self._passed.popitem(last=False)

    def close(self) -> None:
        if isinstance(self._check, GrammarChecker):
            self._check.close()

    def _completion_points(
        self,
        wanted: RequestedGrammar,
        given: Sequence[Sequence[int]],
        given_path: str,
        thinking: ReasoningParams | None,
    ) -> tuple[int | None, ...]:
        try:
            self._check.check(wanted.grammar)
            return tuple(
                self._end(wanted, one, _path(given_path, index, given), _answer_from(one, thinking))
                for index, one in enumerate(given)
            )
        except (InvalidGrammar, GrammarLimitExceeded) as error:
            raise field_error(wanted.field_path, str(error)) from error

    def _end(self, wanted: RequestedGrammar, token_ids: Sequence[int], path: str, answer_from: int) -> int | None:
        """End tokens that lead nowhere are cut off before."""
        if len(token_ids) <= answer_from:
            return None  # nothing needs to be compiled in this process
        matcher = self._grammars.get().matcher(wanted.grammar)
        for position, token_id in enumerate(token_ids[answer_from:], answer_from):
            try:
                matcher.advance(token_id)
            except TokenNotAllowed:
                raise field_error(f"{path}[{position}]", f"is not allowed here by {wanted.field_path}") from None
            if matcher.done:
                return position + 1
        return None

    def _new_grammars(self) -> GrammarCompiler:
        assert self._tokenizer is not None, "who has none is refused before"
        return GrammarCompiler(self._tokenizer)


def _answer_from(token_ids: Sequence[int], thinking: ReasoningParams | None) -> int:
    if thinking is None:
        return 0
    found = ReasoningTracker(thinking, token_ids).answer_position
    return len(token_ids) if found is None else found


def _path(path: str, index: int, given: Sequence[object]) -> str:
    return path if len(given) == 1 else f"{path}[{index}]"
