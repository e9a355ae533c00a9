"""Validates a request's grammar before any work is done: it compiles within limits, and the given tokens match it.

A helper process, which may die, compiles a new grammar first. Then the given tokens are replayed through the grammar. Both
run in a thread pool for grammars, so that neither tokens nor prompts wait for them. Knows no HTTP.
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
"""Number of recently validated grammars to remember. A request with one of them and without given tokens does not wait."""


class GrammarCheck(Protocol):
    def check(self, grammar: Grammar) -> None:
        """Raises `InvalidGrammar`."""
        ...


class GrammarValidator:
    def __init__(self, files: TokenizerFiles, tokenizer: Tokenizer | None, check: GrammarCheck | None = None) -> None:
        self._tokenizer = tokenizer
        self._checker = GrammarChecker(files.tokenizer or "", GRAMMAR_LIMITS.running) if check is None else check
        self._compiler = LazyGrammarCompiler(self._new_compiler)
        self._validated: OrderedDict[Grammar, None] = OrderedDict()

    async def validate(
        self,
        executor: FairExecutor,
        caller: str,
        requested: RequestedGrammar,
        prior_token_ids: Sequence[Sequence[int]],
        prior_path: str,
        reasoning: ReasoningParams | None = None,
    ) -> tuple[int | None, ...]:
        """Returns for each list of given tokens how many of them complete the grammar, so that nothing can follow, or None
        if they do not. Reasoning is not part of the grammar."""
        if self._tokenizer is None:
            raise field_error(
                requested.field_path, "this model has no tokenizer, so nothing can be said about its text"
            )
        if requested.grammar in self._validated and not any(prior_token_ids):
            self._validated.move_to_end(requested.grammar)
            return (None,) * len(prior_token_ids)
        completed_at = await executor.run(
            caller, lambda: self._completion_points(requested, prior_token_ids, prior_path, reasoning)
        )
        self._remember(requested.grammar)
        return completed_at

    def _remember(self, grammar: Grammar) -> None:
        self._validated[grammar] = None
        while len(self._validated) > MAX_VALIDATED:
            self._validated.popitem(last=False)

    def close(self) -> None:
        if isinstance(self._checker, GrammarChecker):
            self._checker.close()

    def _completion_points(
        self,
        requested: RequestedGrammar,
        prior_token_ids: Sequence[Sequence[int]],
        prior_path: str,
        reasoning: ReasoningParams | None,
    ) -> tuple[int | None, ...]:
        try:
            self._checker.check(requested.grammar)
            return tuple(
                self._completion_point(
                    requested, token_ids, _path(prior_path, index, prior_token_ids), _output_start(token_ids, reasoning)
                )
                for index, token_ids in enumerate(prior_token_ids)
            )
        except (InvalidGrammar, GrammarLimitExceeded) as error:
            raise field_error(requested.field_path, str(error)) from error

    def _completion_point(
        self, requested: RequestedGrammar, token_ids: Sequence[int], path: str, output_start: int
    ) -> int | None:
        """Returns how many of the tokens complete the grammar, or None. The caller has cut off end tokens."""
        if len(token_ids) <= output_start:
            return None  # nothing needs to be compiled in this process
        matcher = self._compiler.get().matcher(requested.grammar)
        for position, token_id in enumerate(token_ids[output_start:], output_start):
            try:
                matcher.advance(token_id)
            except TokenNotAllowed:
                raise field_error(f"{path}[{position}]", f"is not allowed here by {requested.field_path}") from None
            if matcher.done:
                return position + 1
        return None

    def _new_compiler(self) -> GrammarCompiler:
        assert self._tokenizer is not None, "who has none is refused before"
        return GrammarCompiler(self._tokenizer)


def _output_start(token_ids: Sequence[int], reasoning: ReasoningParams | None) -> int:
    if reasoning is None:
        return 0
    position = ReasoningTracker(reasoning, token_ids).answer_position
    return len(token_ids) if position is None else position


def _path(path: str, index: int, prior_token_ids: Sequence[object]) -> str:
    return path if len(prior_token_ids) == 1 else f"{path}[{index}]"
