"""Tokens to text, one token at a time, never splitting a character.

What has been emitted is a function of the tokens so far. A character's first bytes are held until the rest has come; bytes
that cannot become a character are U+FFFD, exactly where decoding everything at once would put it. The text continues
what was there before (the prompt), so a leading space of the first token is kept.
"""

from codecs import utf_8_decode

from onward.text.token_table import TokenTable


class Detokenizer:
    __slots__ = ("_pending", "_pieces", "_texts")

    def __init__(self, table: TokenTable, skip_special_tokens: bool = True) -> None:
        self._pieces = table.visible_bytes_list if skip_special_tokens else table.token_bytes_list
        self._texts = table.visible_texts if skip_special_tokens else table.texts
        self._pending = b""

    def fresh_copy(self) -> "Detokenizer":
        """Returns a detokenizer for the same vocabulary, without any pending bytes."""
        new = Detokenizer.__new__(Detokenizer)
        new._pieces, new._texts, new._pending = self._pieces, self._texts, b""
        return new

    @property
    def pending(self) -> bytes:
        """The first bytes of an incomplete character: at most three."""
        return self._pending

    def push(self, token_id: int) -> str:
        """Returns the characters that this token completes, and keeps the first bytes of an incomplete one. An id
        behind the vocabulary, which is padding of the model's, completes none."""
        # The hot path, for nearly every token: two look-ups, nothing built.
        try:
            text = self._texts[token_id]
        except IndexError:  # padding of the model's vocabulary
            return ""
        if text is not None and not self._pending:
            return text
        data = self._pending + self._pieces[token_id]
        text, num_read = utf_8_decode(data, "replace", False)
        self._pending = data[num_read:]
        return text

    def flush(self) -> str:
        """Returns the rest of the text at the end of the output: U+FFFD if a character was left incomplete, else
        nothing."""
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text
