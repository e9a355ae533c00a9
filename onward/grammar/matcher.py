"""Where one output stands in its grammar: which tokens may come next, whether it may end here, whether it must.

A function of the grammar and of the tokens so far: replaying them gives the same state, wherever it is done. Used by one
thread at a time.
"""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import llguidance

from onward.grammar.grammar_errors import GrammarLimitExceeded, TokenNotAllowed
from onward.grammar.llguidance_tokenizer import GrammarVocabulary


@dataclass(frozen=True, slots=True)
class TokenBitmask:
    """Which tokens may come next."""

    bits: bytes
    """One bit for each token, lowest first. Bits behind the vocabulary have no meaning."""
    may_end: bool
    """The output is complete as it is."""

    @property
    def is_empty(self) -> bool:
        return self.bits == bytes(len(self.bits))

    def allows(self, token_id: int) -> bool:
        return bool(self.bits[token_id >> 3] >> (token_id & 7) & 1)

    def token_ids(self) -> list[int]:
        """Returns the ids of the tokens that may come next, in ascending order. Bits behind the vocabulary are not
        filtered out. Tests every bit, so it is slow for a large vocabulary."""
        return [token_id for token_id in range(8 * len(self.bits)) if self.allows(token_id)]


class GrammarMatcher:
    __slots__ = ("_address", "_bits", "_end_id", "_inner", "_mask", "done", "position")

    def __init__(self, inner: llguidance.LLMatcher, vocabulary: GrammarVocabulary) -> None:
        self._inner = inner
        self._end_id = vocabulary.end_id
        # As the library wants it: words of 32 bits, the end included.
        self._bits = bytearray(4 * (vocabulary.end_id // 32 + 1))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._bits))
        self._mask: TokenBitmask | None = None
        """Mask of the next token, if it is known."""
        self.position = 0
        """Position of the next token."""
        self.done = False
        """Nothing can follow."""

    def advance(self, token_id: int) -> None:
        # An id behind the vocabulary is padding of the model's, or our own end: neither is a part of any text.
        if self.done or token_id >= self._end_id or not self._inner.consume_token(token_id):
            raise TokenNotAllowed(self.position)
        self.position += 1
        self._mask = None
        self.done = self._is_finished()

    def replay(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.advance(token_id)

    def mask(self) -> TokenBitmask:
        if self._mask is None:
            # The library's own way to hand out bytes takes twenty times as long as the mask.
            self._inner.unsafe_compute_mask_ptr(self._address, len(self._bits))
            self._raise_if_failed()
            byte_index, bit = self._end_id >> 3, 1 << (self._end_id & 7)
            may_end = bool(self._bits[byte_index] & bit)
            self._bits[byte_index] &= ~bit & 0xFF
            self._mask = TokenBitmask(bytes(self._bits), may_end)
        return self._mask

    def _is_finished(self) -> bool:
        if self._inner.is_stopped():
            self._raise_if_failed()
            return True
        # Where an output may end, the library does not always see at once that it must.
        return self._inner.is_accepting() and self.mask().is_empty

    def _raise_if_failed(self) -> None:
        if self._inner.is_error():
            raise GrammarLimitExceeded(shorten_error(self._inner.get_error()))


def shorten_error(problem: str) -> str:
    """Returns an error message of the library as one line of at most 300 characters. The library may quote a whole
    grammar over many lines."""
    line = " ".join(problem.replace("<non-verbose/>", "").split())
    if line.startswith("Resource '"):
        line = f"$ref: {line}"  # which it forgets to say
    return line if len(line) <= 300 else line[:297] + "..."
