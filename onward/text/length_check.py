"""Refuses a text that cannot fit into the context, or cuts it, before it is tokenized as a whole.

Tokenizing costs about 2 µs and 400 bytes for each token, so a text of some megabytes takes seconds and gigabytes only to be
refused. Two checks come first:

1. by characters: no text of more characters than the context has tokens times the longest token's bytes can fit.
2. by pieces: a long text is tokenized piece by piece, until its pieces have twice the tokens that fit. A cut changes only
   the tokens around it, so a text that fits never reaches that.

The first is exact unless a tokenizer drops or joins text without limit (fused unknown tokens, collapsed whitespace). With
such a tokenizer a text that is longer than that is refused even if it would have fitted.

Where a request keeps only the first or the last tokens of a prompt, a long text is cut to the part that has them, at the
same cost.
"""

from collections.abc import Callable

from onward.errors import InvalidRequest
from onward.text.truncation import Truncation

PIECE_CHARS = 64 << 10
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


def check_text_length(text: str, max_tokens: int, max_bytes_per_token: int, count: Callable[[str], int]) -> None:
    """Raises `InvalidRequest`. `count` gives the number of tokens of a piece."""
    max_chars = max_tokens * max_bytes_per_token
    if len(text) > max_chars:
        raise _too_long(f"it has {len(text)} characters, and no text of more than {max_chars}", max_tokens)
    if _is_short(text, max_tokens):
        return
    num_tokens = 0
    for start in range(0, len(text), PIECE_CHARS):
        num_tokens += count(text[start : start + PIECE_CHARS])
        if num_tokens > 2 * max_tokens:
            raise _too_long(f"it has more than {num_tokens // 2} tokens, which is more than", max_tokens)


def kept_text(text: str, truncation: Truncation, count: Callable[[str], int]) -> str:
    """Returns a beginning or an end of the text that has the tokens that `truncation` keeps. It has twice as many, so that
    the cut, which changes the tokens around it, changes none of them. The result is the same for any context."""
    if _is_short(text, truncation.max_tokens):
        return text
    return _beginning(text, truncation, count) if truncation.side == "right" else _end(text, truncation, count)


def _beginning(text: str, truncation: Truncation, count: Callable[[str], int]) -> str:
    end, num_counted = 0, 0
    while end < len(text) and num_counted <= 2 * truncation.max_tokens:
        start, end = end, end + PIECE_CHARS
        num_counted += count(text[start:end])
    return text[:end]


def _end(text: str, truncation: Truncation, count: Callable[[str], int]) -> str:
    start, num_counted = len(text), 0
    while start > 0 and num_counted <= 2 * truncation.max_tokens:
        end, start = start, max(0, start - PIECE_CHARS)
        num_counted += count(text[start:end])
    return text[start:]


def _is_short(text: str, max_tokens: int) -> bool:
    """Returns whether the text is so short that tokenizing it costs no more than counting its tokens first."""
    return len(text) <= max(PIECE_CHARS, 4 * max_tokens)


def _too_long(problem: str, max_tokens: int) -> InvalidRequest:
    return InvalidRequest(
        f"the text is too long: {problem} fits into the context of {max_tokens} tokens", code=CONTEXT_LENGTH_EXCEEDED
    )
