"""Builds a tokenizer from the vocabulary inside a GGUF file.

The file names the algorithm (`tokenizer.ggml.model`) and, for byte-level BPE, how text is cut into words before merging
(`tokenizer.ggml.pre`). Both decide token ids, so an unknown name is an error and never a guess. Takes the metadata as a
mapping and reads no files; the model's conversion saves the result as `tokenizer.json`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from onward.errors import StartupError
from onward.text import byte_level_bpe, sentencepiece_tokenizer
from onward.text.byte_level_bpe import WordSplit
from onward.text.sentencepiece_model import PieceType
from onward.text.sentencepiece_tokenizer import Prefix
from onward.text.vocabulary_limits import check_tokens


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Returns a tokenizer with the ids, the word boundaries and the special tokens that the GGUF fields describe."""
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
    split = _WORD_SPLITS.get(pre)
    if split is None:
        raise StartupError(f"tokenizer.ggml.pre is {pre!r}, which is unknown; known: {_names(_WORD_SPLITS)}")
    merges = byte_level_bpe.split_merges(_list(metadata, "merges", str), "tokenizer.ggml.merges")
    return byte_level_bpe.byte_level_tokenizer(
        {token: token_id for token_id, token in enumerate(tokens)},
        merges,
        split,
        "tokenizer.ggml.merges does not fit tokenizer.ggml.tokens",
        whole_words_first=pre in _WHOLE_WORDS_FIRST,
    )


def _build_sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: Sequence[str], token_types: Sequence[int]
) -> Tokenizer:
    scores = _list(metadata, "scores", int, float)
    if len(scores) != len(tokens):
        raise StartupError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    unknown_id = _get(metadata, "unknown_token_id")
    unknown = None if unknown_id is None else _token_at(tokens, unknown_id, "unknown_token_id")
    model = sentencepiece_tokenizer.build_bpe_model(
        tokens, scores, token_types, unknown, "tokenizer.ggml.tokens", PieceType.BYTE in token_types
    )
    tokenizer = Tokenizer(model)
    prefix = Prefix.STRETCH if _get(metadata, "add_space_prefix", True) else Prefix.NEVER
    sentencepiece_tokenizer.configure_spaces(tokenizer, prefix, decodes_prefix=prefix is Prefix.STRETCH)
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, tokens: Sequence[str], token_types: Sequence[int]) -> None:
    """Adds the unknown, control and user-defined tokens to `tokenizer`. User-defined ones are text that is never cut;
    the others are special, so they have no text."""
    added = [
        AddedToken(token, normalized=False, special=token_type != PieceType.USER_DEFINED)
        for token, token_type in zip(tokens, token_types, strict=True)
        if token_type in (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.USER_DEFINED) and token
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
    check_tokens(tokens, "tokenizer.ggml.tokens")
    return tokens


def _token_types(metadata: Mapping[str, Any], num_tokens: int) -> list[int]:
    if _get(metadata, "token_type") is None:
        return [PieceType.NORMAL] * num_tokens
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

_WORD_SPLITS: dict[str, WordSplit] = {
    "dbrx": byte_level_bpe.LLAMA3,
    "gpt-2": byte_level_bpe.GPT2,
    "gpt-4o": byte_level_bpe.O200K,
    "llama-bpe": byte_level_bpe.LLAMA3,
    "llama-v3": byte_level_bpe.LLAMA3,
    "llama3": byte_level_bpe.LLAMA3,
    "olmo": byte_level_bpe.GPT2,
    "phi-2": byte_level_bpe.GPT2,
    "qwen2": byte_level_bpe.QWEN2,
    "refact": byte_level_bpe.SMOLLM,
    "smollm": byte_level_bpe.SMOLLM,
    "tekken": byte_level_bpe.TEKKEN,
}

_BEGIN_BY_DEFAULT = frozenset({"llama-bpe", "llama-v3", "llama3"})
"""Where `add_bos_token` is absent, these begin with the bos token, and so does SentencePiece."""
_WHOLE_WORDS_FIRST = _BEGIN_BY_DEFAULT | {"tekken"}
"""A word that is a token is that token, whether or not merges lead to it."""
