"""Compiled grammars of one vocabulary, the most recently used ones kept, and matchers over them."""

import threading
from collections import OrderedDict
from collections.abc import Iterable

import llguidance

from onward.grammar.grammar_errors import GrammarLimitExceeded, InvalidGrammar
from onward.grammar.grammar_limits import parser_limits
from onward.grammar.llguidance_source import to_llguidance
from onward.grammar.llguidance_tokenizer import GrammarVocabulary
from onward.grammar.matcher import GrammarMatcher, shorten_error
from onward.proto.sampling_params import Grammar
from onward.text.tokenizer import Tokenizer

MAX_COMPILED = 32


class GrammarCompiler:
    """Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, max_compiled: int = MAX_COMPILED) -> None:
        self._vocabulary = GrammarVocabulary(tokenizer)
        self._max_compiled = max_compiled
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    def matcher(self, grammar: Grammar, token_ids: Iterable[int] = ()) -> GrammarMatcher:
        """Returns a matcher of this grammar that has read `token_ids`. Raises `InvalidGrammar` if the grammar cannot be
        compiled, `TokenNotAllowed` if it does not allow one of the tokens, and `GrammarLimitExceeded` if following
        them exceeds a limit of the library."""
        matcher = GrammarMatcher(self._copy_compiled(grammar), self._vocabulary)
        matcher.replay(token_ids)
        return matcher

    def check(self, grammar: Grammar) -> None:
        """Compiles it and looks at its first token. Raises `InvalidGrammar`."""
        try:
            mask = self.matcher(grammar).mask()
        except GrammarLimitExceeded as error:
            raise InvalidGrammar(str(error)) from error
        if mask.is_empty:
            raise InvalidGrammar("it allows no output, or only an empty one")

    def _copy_compiled(self, grammar: Grammar) -> llguidance.LLMatcher:
        """Returns a copy of the kept matcher, which shares the compiled grammar. The kept one is never advanced."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = compiled
                while len(self._compiled) > self._max_compiled:
                    self._compiled.popitem(last=False)
        return compiled.deep_copy()

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        vocabulary = self._vocabulary
        source = to_llguidance(grammar, vocabulary.is_special)
        compiled = llguidance.LLMatcher(vocabulary.ll_tokenizer, source, log_level=0, limits=parser_limits())
        if compiled.is_error():
            raise InvalidGrammar(shorten_error(compiled.get_error()))
        return compiled
