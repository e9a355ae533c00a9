"""Refuses a text that cannot fit into the context, before it is tokenized as a whole.

Tokenizing costs about 2 µs and 400 bytes for each token, so a text of some megabytes takes seconds and gigabytes only to be
refused. Two checks come first:

1. by characters: no text of more characters than the context has tokens times the longest token's bytes can fit.
2. by pieces: a long text is tokenized piece by piece, until its pieces have twice the tokens that fit. A cut changes only
   the tokens around it, so a text that fits never reaches that.

The first is exact unless a tokenizer drops or joins text without limit (fused unknown tokens, collapsed whitespace). With
such a tokenizer a text that is longer than that is refused even if it would have fitted.
"""

from collections.abc import Callable

from onward.errors import InvalidRequest

PIECE_CHARS = 64 << 10
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


def check_text_length(text: str, max_tokens: int, max_bytes_per_token: int, count: Callable[[str], int]) -> None:
    """Raises `InvalidRequest`. `count` gives the number of tokens of a piece."""
    max_chars = max_tokens * max_bytes_per_token
    if len(text) > max_chars:
        raise _too_long(f"it has {len(text)} characters, and no text of more than {max_chars}", max_tokens)
    if len(text) <= max(PIECE_CHARS, 4 * max_tokens):
        return  # tokenizing it costs no more than counting
    num_tokens = 0
    for start in range(0, len(text), PIECE_CHARS):
        num_tokens += count(text[start : start + PIECE_CHARS])
        if num_tokens > 2 * max_tokens:
            raise _too_long(f"it has more than {num_tokens // 2} tokens, which is more than", max_tokens)


def _too_long(problem: str, max_tokens: int) -> InvalidRequest:
    return InvalidRequest(
        f"the text is too long: {problem} fits into the context of {max_tokens} tokens", code=CONTEXT_LENGTH_EXCEEDED
    )
