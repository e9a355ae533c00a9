"""The bytes of each token, read once from a tokenizer's description.

Text is defined by these bytes: the text of tokens is their joined bytes read as UTF-8, with U+FFFD for invalid
sequences. No single token is converted to text by guessing. Does not tokenize text.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from onward.errors import StartupError

MAX_TOKENS = 1 << 22

WORD_MARK = "▁"
"""SentencePiece writes a space as this character."""


class TokenTable:
    """Bytes of every token, and the text of tokens that consist of complete characters.

    `texts` and `token_bytes_list` are parallel lists, indexed by token id. In `texts`, a token that forms characters
    only together with its neighbours is None. In the `visible_` pair, special tokens are empty.
    """

    __slots__ = (
        "special_ids",
        "strips_leading_space",
        "texts",
        "token_bytes_list",
        "visible_bytes_list",
        "visible_texts",
    )

    def __init__(
        self, pieces: Sequence[bytes], special_ids: Iterable[int] = (), strips_leading_space: bool = False
    ) -> None:
        self.token_bytes_list = list(pieces)
        self.texts = [_whole_text(piece) for piece in self.token_bytes_list]
        self.special_ids = frozenset(special_ids)
        self.strips_leading_space = strips_leading_space
        """The encoder puts a space before a text, which is not part of it."""
        self.visible_bytes_list = list(self.token_bytes_list)
        self.visible_texts = list(self.texts)
        for token_id in self.special_ids:
            self.visible_bytes_list[token_id] = b""
            self.visible_texts[token_id] = ""

    def __len__(self) -> int:
        return len(self.token_bytes_list)

    def token_bytes(self, token_id: int) -> bytes:
        """Ids behind the vocabulary (a model's padding) stand for nothing."""
        assert token_id >= 0
        return self.token_bytes_list[token_id] if token_id < len(self.token_bytes_list) else b""

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of the tokens as if they were the beginning of a text, so without the space that the encoder
        puts before a text."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")


def table_from_spec(spec: Mapping[str, Any]) -> TokenTable:
    """Returns the table of a `tokenizer.json`, given its contents. Its decoder determines how tokens are written."""
    steps = list(_steps(spec.get("decoder")))
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        to_bytes = _byte_level_bytes
    elif kinds & {"ByteFallback", "Metaspace"}:
        to_bytes = _sentencepiece_bytes
    else:
        raise StartupError(
            f"the tokenizer's decoder is {', '.join(sorted(map(str, kinds))) or 'missing'};"
            " supported: ByteLevel, and Metaspace or ByteFallback (SentencePiece)"
        )
    added = spec.get("added_tokens") or ()
    tokens = {token_id: to_bytes(token) for token, token_id in _vocabulary(spec).items()}
    tokens |= {token["id"]: _added_bytes(token, to_bytes) for token in added}
    if not all(isinstance(token_id, int) and 0 <= token_id < MAX_TOKENS for token_id in tokens):
        raise StartupError(f"the tokenizer has a token whose id is not a number below {MAX_TOKENS}")
    pieces = [tokens.get(token_id, b"") for token_id in range(max(tokens, default=-1) + 1)]
    special_ids = [token["id"] for token in added if token["special"]]
    return TokenTable(pieces, special_ids, any(map(_strips_leading_space, steps)))


def with_visible_markers(table: TokenTable, marks: Collection[str]) -> TokenTable:
    """Returns a table in which the marks of a format are text. Clients are not shown special tokens, but some models
    write the marks around calls and thoughts as such tokens, and the parser must see them. All other special tokens
    stay hidden.

    Returns `table` itself if no mark is a special token. Called once for a model."""
    wanted = {mark.encode() for mark in marks}
    shown = {token_id for token_id in table.special_ids if table.token_bytes_list[token_id] in wanted}
    if not shown:
        return table
    return TokenTable(table.token_bytes_list, table.special_ids - shown, table.strips_leading_space)


def _vocabulary(spec: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, list):  # a unigram model lists (piece, score)
        return {piece: token_id for token_id, (piece, _) in enumerate(vocabulary)}
    return vocabulary


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


def _strips_leading_space(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Strip":
        return step["content"] == " " and step["start"] > 0
    return step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _added_bytes(token: Mapping[str, Any], to_bytes: Callable[[str], bytes]) -> bytes:
    """Returns the bytes of an added token. These are its content as it is, except that word marks become spaces in
    SentencePiece tokens that are not special."""
    is_marked = to_bytes is _sentencepiece_bytes and not token["special"]
    return (token["content"].replace(WORD_MARK, " ") if is_marked else token["content"]).encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(WORD_MARK, " ").encode()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:  # not written in the byte alphabet, so it stands for itself
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte that each character stands for in the alphabet of byte-level BPE. Bytes that are visible in
    Latin-1 are written as their Latin-1 character, the others as characters from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_alphabet()
CHARACTER_OF_BYTE = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}
