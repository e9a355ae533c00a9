"""Bounds on a vocabulary from a file: its tokens are data from strangers, and their lengths are work."""

from collections.abc import Sequence

from onward.errors import StartupError
from onward.text.token_table import MAX_TOKENS

MAX_TOKEN_CHARS = 4096
MAX_CHARS = 32 << 20
"""Characters of all tokens together. Every way to cut a token in two is examined."""


def check_tokens(tokens: Sequence[str] | Sequence[bytes], source: str) -> None:
    if len(tokens) > MAX_TOKENS:
        raise StartupError(f"{source} has {len(tokens)} tokens, more than {MAX_TOKENS}")
    if max(map(len, tokens), default=0) > MAX_TOKEN_CHARS or sum(map(len, tokens)) > MAX_CHARS:
        raise StartupError(
            f"{source} has a token longer than {MAX_TOKEN_CHARS} characters, or more than {MAX_CHARS} in all"
        )
    if len(set(tokens)) != len(tokens):
        raise StartupError(f"{source} names a token twice, so ids and tokens cannot be matched")
