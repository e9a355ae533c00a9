"""Builds a tokenizer from the vocabulary inside a GGUF file.

The file names the algorithm (`tokenizer.ggml.model`) and, for byte-level BPE, how text is cut into words before merging
(`tokenizer.ggml.pre`). Both decide token ids, so an unknown name is an error and never a guess. Knows nothing of files:
it takes the metadata as a mapping, and whoever converts the model saves the result as `tokenizer.json`.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from onward.errors import StartupError
from onward.text.token_table import MAX_TOKENS, WORD_MARK

MAX_TOKEN_CHARS = 4096
MAX_CHARS = 32 << 20
"""Of all tokens together. Every way to cut a token in two is looked at, so their lengths are work."""


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """A tokenizer with the ids, the word boundaries and the special tokens that the GGUF fields describe."""
    model = _text(metadata, "model")
    build = _BUILDERS.get(model)
    if build is None:
        raise StartupError(f"tokenizer.ggml.model is {model!r}, which is unknown; known: {_names(_BUILDERS)}")
    tokens = _tokens(metadata)
    token_types = _token_types(metadata, len(tokens))
    tokenizer = build(metadata, tokens, token_types)
    _add_special_tokens(tokenizer, tokens, token_types)
    _add_begin_and_end(tokenizer, metadata, tokens)
    return tokenizer


def _build_byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str], token_types: Sequence[int]) -> Tokenizer:
    pre = _text(metadata, "pre")
    configure = _PRE_TOKENIZERS.get(pre)
    if configure is None:
        raise StartupError(f"tokenizer.ggml.pre is {pre!r}, which is unknown; known: {_names(_PRE_TOKENIZERS)}")
    merges = [_split_merge(merge) for merge in _list(metadata, "merges", str)]
    tokenizer = Tokenizer(_bpe(tokens, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    tokenizer.decoder = decoders.ByteLevel()
    configure(tokenizer)
    return tokenizer


def _build_sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: Sequence[str], token_types: Sequence[int]
) -> Tokenizer:
    scores = _list(metadata, "scores", int, float)
    if len(scores) != len(tokens):
        raise StartupError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    unknown_id = _get(metadata, "unknown_token_id")
    unknown = None if unknown_id is None else _token_at(tokens, unknown_id, "unknown_token_id")
    has_bytes = TokenType.BYTE in token_types
    merges = _merges_from_scores(tokens, scores, token_types)
    tokenizer = Tokenizer(_bpe(tokens, merges, unk_token=unknown, byte_fallback=has_bytes, fuse_unk=True))

    # SentencePiece puts one space before the text; so does the GGUF's reference implementation before every stretch of
    # text that follows a special token. A normalizer runs on exactly these stretches.
    mark_spaces = normalizers.Replace(" ", WORD_MARK)
    to_text: list[Any] = [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _get(metadata, "add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_MARK), mark_spaces])
        to_text.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = mark_spaces
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def _bpe(tokens: Sequence[str], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # bare exceptions for a merge of tokens that do not exist; panics are no Exception
        raise StartupError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error


def _split_merge(merge: str) -> tuple[str, str]:
    # The left half is never empty, so the separator is looked for behind the first character.
    separator_at = merge.find(" ", 1)
    if separator_at < 0 or separator_at + 1 == len(merge):
        raise StartupError(f"tokenizer.ggml.merges has {merge[:80]!r}, which is not a pair of tokens")
    return merge[:separator_at], merge[separator_at + 1 :]


def _merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], token_types: Sequence[int]
) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose joint piece scores highest: every way to cut a piece in two is a merge,
    ranked by the piece's score. Only ordinary pieces take part; the others never come out of joining."""
    ids = {token: token_id for token_id, token in enumerate(tokens) if token_types[token_id] == TokenType.NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, piece_id in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[piece_id], piece_id, cut, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _smollm(tokenizer: Tokenizer) -> None:
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)])


def _gpt2(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = _byte_level(use_regex=True)


def _qwen2(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _words(max_digits=1)


def _llama3(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = _words(max_digits=3)


def _words(max_digits: int) -> pre_tokenizers.PreTokenizer:
    """The word pattern that Llama 3 and Qwen 2 share; they differ in how many digits make a group."""
    alternatives = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # English contractions
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # letters, with one leading space or sign
        rf"\p{{N}}{{1,{max_digits}}}",  # a group of digits
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # signs, with the line ends after them
        r"\s*[\r\n]+",  # blank lines
        r"\s+(?!\S)",  # spaces, leaving the last to the word behind them
        r"\s+",
    )
    split = pre_tokenizers.Split(Regex("|".join(alternatives)), behavior="isolated")
    return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _add_special_tokens(tokenizer: Tokenizer, tokens: Sequence[str], token_types: Sequence[int]) -> None:
    """Control tokens are special: they have no text. User-defined ones are text that is never cut."""
    added = [
        AddedToken(token, normalized=False, special=token_type != TokenType.USER_DEFINED)
        for token, token_type in zip(tokens, token_types, strict=True)
        if token_type in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED) and token
    ]
    tokenizer.add_tokens(added)


def _add_begin_and_end(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    begins_by_default = metadata["tokenizer.ggml.model"] == "llama" or _get(metadata, "pre") in _BEGIN_BY_DEFAULT
    wanted = {
        "bos": _get(metadata, "add_bos_token", begins_by_default),
        "eos": _get(metadata, "add_eos_token", False),
    }
    ids = {name: _required(metadata, f"{name}_token_id") for name, wants in wanted.items() if wants}
    if not ids:
        return
    names = {name: _token_at(tokens, token_id, f"{name}_token_id") for name, token_id in ids.items()}
    before, after = ([names[name]] if name in names else [] for name in ("bos", "eos"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=[(names[name], ids[name]) for name in ids],
    )


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = _list(metadata, "tokens", str)
    if len(tokens) > MAX_TOKENS:
        raise StartupError(f"tokenizer.ggml.tokens has {len(tokens)} tokens, more than {MAX_TOKENS}")
    if max(map(len, tokens), default=0) > MAX_TOKEN_CHARS or sum(map(len, tokens)) > MAX_CHARS:
        raise StartupError(
            f"tokenizer.ggml.tokens has a token longer than {MAX_TOKEN_CHARS} characters, or more than {MAX_CHARS} in all"
        )
    if len(set(tokens)) != len(tokens):
        raise StartupError("tokenizer.ggml.tokens names a token twice, so ids and tokens cannot be matched")
    return tokens


def _token_types(metadata: Mapping[str, Any], num_tokens: int) -> list[int]:
    if _get(metadata, "token_type") is None:
        return [TokenType.NORMAL] * num_tokens
    token_types = _list(metadata, "token_type", int)
    if len(token_types) != num_tokens:
        raise StartupError(f"tokenizer.ggml.token_type has {len(token_types)} entries for {num_tokens} tokens")
    return token_types


def _token_at(tokens: Sequence[str], token_id: Any, field: str) -> str:
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise StartupError(f"tokenizer.ggml.{field} is {str(token_id)[:80]}, but there are {len(tokens)} tokens")
    return tokens[token_id]


def _get(metadata: Mapping[str, Any], field: str, default: Any = None) -> Any:
    return metadata.get(f"tokenizer.ggml.{field}", default)


def _required(metadata: Mapping[str, Any], field: str) -> Any:
    value = _get(metadata, field)
    if value is None:
        raise StartupError(f"the GGUF file has no tokenizer.ggml.{field}")
    return value


def _text(metadata: Mapping[str, Any], field: str) -> str:
    value = _required(metadata, field)
    if not isinstance(value, str):
        raise StartupError(f"tokenizer.ggml.{field} is not a string")
    return value[:80]


def _list(metadata: Mapping[str, Any], field: str, *kinds: type) -> list[Any]:
    value = _required(metadata, field)
    if not isinstance(value, list) or not all(isinstance(entry, kinds) for entry in value):
        raise StartupError(f"tokenizer.ggml.{field} is not a list of {kinds[-1].__name__}")
    return value


def _names(known: Mapping[str, Any]) -> str:
    return ", ".join(sorted(known))


_BUILDERS: dict[str, Callable[[Mapping[str, Any], Sequence[str], Sequence[int]], Tokenizer]] = {
    "gpt2": _build_byte_level_bpe,
    "llama": _build_sentencepiece_bpe,
}

_PRE_TOKENIZERS: dict[str, Callable[[Tokenizer], None]] = {
    "gpt-2": _gpt2,
    "llama-bpe": _llama3,
    "llama-v3": _llama3,
    "llama3": _llama3,
    "qwen2": _qwen2,
    "smollm": _smollm,
}

_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama-v3", "llama3"})
"""A word that is a token is that token, whether or not merges lead to it."""

_BEGIN_BY_DEFAULT = _WHOLE_WORDS_FIRST
"""Where `add_bos_token` is absent, these begin with the bos token, and so does SentencePiece."""
