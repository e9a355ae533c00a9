"""Finds the files that describe a folder's tokenizer, in any supported form, and makes one `tokenizer.json` of them.

A `tokenizer.json` that needs no change is used in place. Everything else is built once and kept in the cache under the
hash of its inputs. The size of files is limited.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.errors import StartupError
from onward.models.loader.bounded_read import MAX_TOKENIZER_BYTES, read_bytes, read_json, read_text
from onward.models.loader.file_property_cache import cached_property_of, write_atomically

if TYPE_CHECKING:
    from onward.text.sentencepiece_model import SentencePieceModel
    from onward.text.tokenizer_config import TokenizerConfig

TOKENIZER = "tokenizer.json"
TOKENIZER_MODELS = ("tokenizer.model", "spiece.model", "tiktoken.model")
"""SentencePiece models, or tiktoken's ranks; the content decides which."""
TIKTOKEN_SUFFIX = ".tiktoken"
TEKKEN = "tekken.json"
VOCAB, MERGES = "vocab.json", "merges.txt"
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

_FORMAT = 1
"""Format of the cached files. Raised when they change for the same input."""
_MODEL_TYPES = {"gpt2": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
"""Tokenizer class by `model_type` of `config.json`, for models whose `tokenizer_config.json` does not name it."""


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """The files that one tokenizer is made of."""

    folder: Path
    kind: str
    files: tuple[Path, ...]
    """The vocabulary, in one or two files."""

    @property
    def all_files(self) -> list[Path]:
        others = [self.folder / name for name in (*CONFIG_FILES, "config.json")]
        return [*self.files, *(path for path in others if path.is_file())]


def find_tokenizer(folder: Path) -> TokenizerSource | None:
    """Returns the folder's tokenizer in the form that it has; `tokenizer.json` comes before other forms. None: the
    folder has no tokenizer, so the model is served with token ids only."""
    if (path := folder / TOKENIZER).is_file():
        return TokenizerSource(folder, TOKENIZER, (path,))
    for name in TOKENIZER_MODELS:
        if (path := folder / name).is_file():
            return TokenizerSource(folder, "model", (path,))
    if ranks := sorted(folder.glob("*" + TIKTOKEN_SUFFIX)):
        return TokenizerSource(folder, "model", (ranks[0],))
    if (path := folder / TEKKEN).is_file():
        return TokenizerSource(folder, TEKKEN, (path,))
    if (folder / VOCAB).is_file():
        if not (folder / MERGES).is_file():
            raise StartupError(f"{folder} has {VOCAB} but no {MERGES}, without which it is not a tokenizer")
        return TokenizerSource(folder, VOCAB, (folder / VOCAB, folder / MERGES))
    return None


def prepare_tokenizer(folder: Path, cache_dir: Path) -> str | None:
    """Returns the path of a `tokenizer.json` for the folder: relative to it, or absolute if it was built in the
    cache."""
    source = find_tokenizer(folder)
    if source is None:
        return None
    key = _key(source)
    path = cache_dir / "tokenizers" / f"{key}.json"
    if path.is_file():
        return str(path.absolute())
    if source.kind == TOKENIZER:
        # Whether the file needs no change is found out once.
        is_unchanged = cached_property_of(
            source.files[0],
            f"tokenizer {key}",
            cache_dir,
            lambda _: "yes" if build_description(source) is None else "no",
        )
        if is_unchanged == "yes":
            return TOKENIZER
    description = build_description(source)
    assert description is not None, "only a tokenizer.json can be used as it is"
    write_atomically(path, description.encode())
    return str(path.absolute())


def write_tokenizer(folder: Path, target: Path) -> str | None:
    """Puts the folder's tokenizer into `target` as `tokenizer.json` and returns that name, if there is a tokenizer."""
    source = find_tokenizer(folder)
    if source is None:
        return None
    description = build_description(source)
    content = read_bytes(source.files[0], MAX_TOKENIZER_BYTES) if description is None else description.encode()
    (target / TOKENIZER).write_bytes(content)
    return TOKENIZER


def build_description(source: TokenizerSource) -> str | None:
    """Returns the contents of a `tokenizer.json`. None: the existing one needs no change."""
    from onward.text.tokenizer_config import parse_tokenizer_config

    raw, added = _optional_json(source.folder, CONFIG_FILES[1]) | _optional_json(source.folder, CONFIG_FILES[0]), None
    if (source.folder / CONFIG_FILES[2]).is_file():
        added = _optional_json(source.folder, CONFIG_FILES[2])
    config = parse_tokenizer_config(raw, added)
    try:
        return _BUILDERS[source.kind](source, config)
    except StartupError as fault:
        names = " and ".join(path.name for path in source.files)
        raise StartupError(f"the tokenizer of {source.folder} ({names}): {fault.message}") from fault


def _build_from_json(source: TokenizerSource, config: "TokenizerConfig") -> str | None:
    from onward.text.tokenizer_config import apply_tokenizer_config, read_tokenizer

    # The file itself defines how a text begins and ends; transformers, too, ignores `add_bos_token` then.
    tokenizer = read_tokenizer(read_text(source.files[0], MAX_TOKENIZER_BYTES))
    before = tokenizer.to_str()
    after = apply_tokenizer_config(tokenizer, config).to_str()
    return None if after == before else after


def _build_from_model(source: TokenizerSource, config: "TokenizerConfig") -> str:
    from onward.text.tiktoken_ranks import looks_like_ranks

    data = read_bytes(source.files[0], MAX_TOKENIZER_BYTES)
    return (_build_from_ranks if looks_like_ranks(data) else _build_from_sentencepiece)(source, config, data)


def _build_from_sentencepiece(source: TokenizerSource, config: "TokenizerConfig", data: bytes) -> str:
    import msgspec

    from onward.text import sentencepiece_tokenizer
    from onward.text.sentencepiece_model import parse_model
    from onward.text.sentencepiece_tokenizer import Prefix
    from onward.text.tokenizer_config import apply_begin_and_end, apply_tokenizer_config

    model = parse_model(data)
    adds_prefix = model.add_dummy_prefix if config.add_prefix_space is None else config.add_prefix_space
    prefix = Prefix.NEVER if not adds_prefix else Prefix.STRETCH if config.legacy else Prefix.TEXT
    bos, eos = (model.pieces[i] if 0 <= i < len(model.pieces) else None for i in (model.bos_id, model.eos_id))
    config = msgspec.structs.replace(config, bos_token=config.bos_token or bos, eos_token=config.eos_token or eos)
    tokenizer = sentencepiece_tokenizer.build_from_model(model, prefix)
    apply_tokenizer_config(tokenizer, config)
    apply_begin_and_end(tokenizer, config, begins_by_default=True)
    return sentencepiece_tokenizer.describe(tokenizer, prefix, also_before=_undeclared_pieces(model, config))


def _undeclared_pieces(model: "SentencePieceModel", config: "TokenizerConfig") -> list[str]:
    """Returns the user-defined pieces that only the model file declares. SentencePiece treats them as text."""
    declared = {token.content for token in (*config.added_tokens.values(), *config.special_tokens)}
    return [piece for piece in model.user_defined_pieces if piece not in declared]


def _build_from_ranks(source: TokenizerSource, config: "TokenizerConfig", data: bytes) -> str:
    from onward.text import byte_level_bpe
    from onward.text.tiktoken_ranks import parse_ranks
    from onward.text.tokenizer_config import apply_begin_and_end, apply_tokenizer_config

    name = source.files[0].name
    split = byte_level_bpe.TIKTOKEN_SPLITS.get(name.removesuffix(TIKTOKEN_SUFFIX), byte_level_bpe.LLAMA3)
    tokenizer = byte_level_bpe.tokenizer_from_ranks(parse_ranks(data, name), split, name)
    apply_tokenizer_config(tokenizer, config)
    return apply_begin_and_end(tokenizer, config).to_str()


def _build_from_tekken(source: TokenizerSource, config: "TokenizerConfig") -> str:
    import msgspec

    from onward.text import tekken_file
    from onward.text.tokenizer_config import apply_begin_and_end, apply_tokenizer_config

    tokenizer = tekken_file.build_from_tekken(read_json(source.files[0], MAX_TOKENIZER_BYTES), TEKKEN)
    bos, eos = config.bos_token or tekken_file.BEGIN, config.eos_token or tekken_file.END
    config = msgspec.structs.replace(config, bos_token=bos, eos_token=eos)
    apply_tokenizer_config(tokenizer, config)
    return apply_begin_and_end(tokenizer, config, begins_by_default=tokenizer.token_to_id(bos) is not None).to_str()


def _build_from_vocab(source: TokenizerSource, config: "TokenizerConfig") -> str:
    from onward.text import byte_level_bpe
    from onward.text.tokenizer_config import apply_begin_and_end, apply_tokenizer_config, with_special_tokens

    vocab_path, merges_path = source.files
    vocab = read_json(vocab_path, MAX_TOKENIZER_BYTES)
    byte_level_bpe.check_vocab(vocab, VOCAB)
    lines = read_text(merges_path, MAX_TOKENIZER_BYTES).split("\n")
    merges = [line.removesuffix("\r") for line in lines[1 if lines[0].startswith("#version") else 0 :]]
    class_name = _tokenizer_class(source.folder, config)
    split = byte_level_bpe.CLASS_SPLITS.get(class_name.removesuffix("Fast"))
    if split is None:
        raise StartupError(
            f"tokenizer_config.json: tokenizer_class is {class_name[:80]!r}, so how text is cut into words is not known; "
            f"known: {', '.join(byte_level_bpe.CLASS_SPLITS)}"
        )
    tokenizer = byte_level_bpe.byte_level_tokenizer(
        vocab,
        byte_level_bpe.split_merges([merge for merge in merges if merge], MERGES),
        split,
        f"{MERGES} does not fit {VOCAB}",
        add_prefix_space=bool(config.add_prefix_space),
    )
    # Both classes have this token by default, in all of its roles.
    if byte_level_bpe.END_OF_TEXT in vocab:
        config = with_special_tokens(config, [byte_level_bpe.END_OF_TEXT])
    apply_tokenizer_config(tokenizer, config)
    return apply_begin_and_end(tokenizer, config).to_str()


def _tokenizer_class(folder: Path, config: "TokenizerConfig") -> str:
    if config.tokenizer_class is not None:
        return config.tokenizer_class
    model_type = str(_optional_json(folder, "config.json").get("model_type"))
    return _MODEL_TYPES.get(model_type, f"(none, for model_type {model_type})")


def _optional_json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    return read_json(path) if path.is_file() else {}


def _key(source: TokenizerSource) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {source.kind}".encode())
    for path in source.all_files:
        content = read_bytes(path, MAX_TOKENIZER_BYTES)
        digest.update(f"\n{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


_BUILDERS: "Mapping[str, Callable[[TokenizerSource, TokenizerConfig], str | None]]" = {
    TOKENIZER: _build_from_json,
    "model": _build_from_model,
    TEKKEN: _build_from_tekken,
    VOCAB: _build_from_vocab,
}
