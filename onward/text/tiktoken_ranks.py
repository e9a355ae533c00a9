"""Reads a vocabulary in tiktoken's form: one token for each line, its bytes in base64 and its rank, which is its id.

The file does not say how text is cut into words (`byte_level_bpe.WordSplit`), nor which special tokens there are.
"""

import re
from base64 import b64decode
from binascii import Error as Base64Error

from onward.errors import StartupError
from onward.text.token_table import MAX_TOKENS
from onward.text.vocabulary_limits import check_tokens

_FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+[ \t]*\r?(\n|\Z)")


def looks_like_ranks(data: bytes) -> bool:
    """Returns whether the file has tiktoken's form. A SentencePiece model, which may have the same name, begins with
    binary data."""
    return _FIRST_LINE.match(data) is not None


def parse_ranks(data: bytes, source: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    lines = [line for line in data.splitlines() if line.strip()]
    if len(lines) > MAX_TOKENS:
        raise StartupError(f"{source} has {len(lines)} tokens, more than {MAX_TOKENS}")
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[b64decode(token, validate=True)] = int(rank)
        except (ValueError, Base64Error):
            raise StartupError(f"{source} is not valid: entry {number} is not a token in base64 and its rank") from None
    check_ranks(ranks, len(lines), source)
    return ranks


def check_ranks(ranks: dict[bytes, int], num_entries: int, source: str) -> None:
    check_tokens(list(ranks), source)
    if len(ranks) != num_entries or len(set(ranks.values())) != num_entries:
        raise StartupError(f"{source} names a token or a rank twice, so ids and tokens cannot be matched")
    if not all(0 <= rank < MAX_TOKENS for rank in ranks.values()):
        raise StartupError(f"{source} has a token whose rank is not a number below {MAX_TOKENS}")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise StartupError(f"{source} has no token for the byte 0x{missing[0]:02X}, so some texts would have no tokens")
