"""A model's vocabulary in the form that the grammar library needs: the bytes of each token, and an additional end
token.

The end of a grammar has an id behind the vocabulary, so that it is never confused with a token of the model: the
request decides which tokens end an output. The bytes are those from which text is decoded, so a grammar constrains
exactly the text that a client reads.
"""

from collections.abc import Sequence

import llguidance

from onward.text.tokenizer import Tokenizer

_END_NAME = b"<|end of the grammar|>"


class GrammarVocabulary:
    """A model's vocabulary for the grammar library. Immutable once built, so threads may share it. Building it takes
    a quarter of a second and some 20 MB for 50,000 tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        table = tokenizer.table
        self.end_id = len(table)
        wrapped = llguidance.TokenizerWrapper(_LlguidanceTokenizer(tokenizer))
        self.ll_tokenizer = llguidance.LLTokenizer(wrapped, n_vocab=len(table) + 1, eos_token=self.end_id)

    def is_special(self, text: str) -> bool:
        return self._tokenizer.token_id(text) in self._tokenizer.special_ids


class _LlguidanceTokenizer:
    """The names are the library's."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        table = tokenizer.table
        self.eos_token_id = len(table)
        self.tokens: Sequence[bytes] = [*table.token_bytes_list, _END_NAME]
        self.special_token_ids = [*sorted(table.special_ids), len(table)]
        self._id_of = {piece: token_id for token_id, piece in enumerate(table.token_bytes_list) if piece}
        for token_id in table.special_ids:
            self._id_of.pop(table.token_bytes_list[token_id], None)
        self._longest = max(map(len, self._id_of), default=0)

    def __call__(self, data: bytes) -> list[int]:
        """Returns the tokens in which the model would write these bytes. The library calls this where a grammar allows
        only one continuation. The model then finds the forced text in the tokens that it would have chosen itself."""
        text = data.decode("utf-8", "replace")
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        pieces = self._tokenizer.table.token_bytes_list
        if b"".join([pieces[token_id] for token_id in token_ids]) == data:
            return token_ids
        return self._longest_first(data)  # some tokenizers put a space before every text

    def _longest_first(self, data: bytes) -> list[int]:
        token_ids: list[int] = []
        while data:
            lengths = range(min(self._longest, len(data)), 0, -1)
            length = next((n for n in lengths if data[:n] in self._id_of), None)
            if length is None:
                break  # bytes that no token can write
            token_ids.append(self._id_of[data[:length]])
            data = data[length:]
        return token_ids
