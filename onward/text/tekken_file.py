"""Reads Mistral's `tekken.json`: tiktoken's ranks in JSON, with the word pattern and the special tokens."""

from base64 import b64decode
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer

from onward.errors import StartupError
from onward.text.byte_level_bpe import WordSplit, build_model, tokenizer_from_ranks
from onward.text.tiktoken_ranks import check_ranks
from onward.text.token_table import MAX_TOKENS

BEGIN, END = "<s>", "</s>"


class _Settings(msgspec.Struct, frozen=True):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Token(msgspec.Struct, frozen=True):
    rank: int
    token_bytes: str


class _SpecialToken(msgspec.Struct, frozen=True):
    rank: int
    token_str: str


class TekkenFile(msgspec.Struct, frozen=True):
    config: _Settings
    vocab: list[_Token]
    special_tokens: list[_SpecialToken]
    """The oldest files lack them: each program of that time had them built in."""


def build_from_tekken(raw: dict[str, Any], source: str) -> Tokenizer:
    try:
        file = msgspec.convert(raw, TekkenFile)
    except msgspec.ValidationError as fault:
        raise StartupError(f"{source}: {fault}") from None
    num_special = file.config.default_num_special_tokens
    num_ranks = file.config.default_vocab_size - num_special
    if not 0 <= num_special <= MAX_TOKENS or not 0 < num_ranks <= len(file.vocab):
        raise StartupError(
            f"{source}: config.default_vocab_size is {file.config.default_vocab_size}, with {num_special} special tokens "
            f"and {len(file.vocab)} others"
        )
    build_model(lambda: Regex(file.config.pattern), f"{source}: config.pattern")
    special_tokens = _special_tokens(file, num_special, source)
    # The file has more tokens than the model.
    ranks = {_token_bytes(token, source): token.rank for token in file.vocab[:num_ranks]}
    check_ranks(ranks, num_ranks, source)
    tokenizer = tokenizer_from_ranks(ranks, WordSplit(file.config.pattern), source, special_tokens)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in special_tokens])
    return tokenizer


def _special_tokens(file: TekkenFile, num_special: int, source: str) -> list[str]:
    """Returns the special tokens in the order of their ids. Ids without a token get a placeholder."""
    named = {token.rank: token.token_str for token in file.special_tokens}
    if len(set(named.values())) != len(file.special_tokens) or not all(0 <= rank < num_special for rank in named):
        raise StartupError(f"{source}: special_tokens: a token or a rank occurs twice, or is not below {num_special}")
    return [named.get(token_id, f"<SPECIAL_{token_id}>") for token_id in range(num_special)]


def _token_bytes(token: _Token, source: str) -> bytes:
    try:
        return b64decode(token.token_bytes, validate=True)
    except ValueError:
        raise StartupError(f"{source}: vocab: the token of rank {token.rank} is not in base64") from None
