"""What a checkpoint says about text: chat template, begin and end tokens. The tokenizer's insides are not known here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from onward.errors import StartupError
from onward.models.loader.bounded_read import (
    MAX_JSON_BYTES,
    MAX_TEMPLATE_BYTES,
    MAX_TOKENIZER_BYTES,
    read_json,
    read_text,
)

TOKENIZER = "tokenizer.json"
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""All files of a folder, but for weights, that decide what the model is and says."""

_MAX_TOKEN_ID = 1 << 31
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "spiece.model")


class TextMetadata(msgspec.Struct, frozen=True):
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]


def has_tokenizer(folder: Path) -> bool:
    if (path := folder / TOKENIZER).is_file():
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise StartupError(f"{path} is larger than {MAX_TOKENIZER_BYTES} bytes, the limit for such a file")
        return True
    if other := [name for name in _OTHER_TOKENIZERS if (folder / name).exists()]:
        raise StartupError(
            f"{folder} has {other[0]} but no {TOKENIZER}; save one with "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return False


def read_folder_text_metadata(folder: Path) -> TextMetadata:
    tokenizer_config = _optional_json(folder / "tokenizer_config.json")
    special = _optional_json(folder / "special_tokens_map.json") | tokenizer_config
    eos_token = _token_text(special.get("eos_token"))
    return TextMetadata(
        chat_template=_folder_template(folder, tokenizer_config),
        bos_token=_token_text(special.get("bos_token")),
        eos_token=eos_token,
        eos_token_ids=_folder_eos_ids(folder, eos_token),
    )


def _folder_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_text(file, MAX_TEMPLATE_BYTES)
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return _check_template_size(template, f"{folder / 'tokenizer_config.json'}: chat_template")


def _check_template_size(template: Any, source: str) -> str | None:
    if not isinstance(template, str):
        return None
    if len(template) > MAX_TEMPLATE_BYTES:
        raise StartupError(f"{source} is longer than {MAX_TEMPLATE_BYTES} characters, the limit for a template")
    return template


def _folder_eos_ids(folder: Path, eos_token: str | None) -> list[int]:
    """What generation stops at: generation config, then model config, then the tokenizer's own end token."""
    ids: list[int] = []
    for file in ("generation_config.json", "config.json"):
        value = _optional_json(folder / file).get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if not all(map(_is_token_id, ids)):
        raise StartupError(f"{folder}: eos_token_id must be a number or a list of numbers, not {str(ids)[:200]}")
    if not ids and eos_token is not None:
        ids = _added_ids(folder / TOKENIZER, eos_token)
    return list(dict.fromkeys(ids))


def _added_ids(path: Path, token: str) -> list[int]:
    added = _optional_json(path, MAX_TOKENIZER_BYTES).get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    ids = [entry.get("id") for entry in entries if entry.get("content") == token]
    return [token_id for token_id in ids if _is_token_id(token_id)]


def _is_token_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_TOKEN_ID


def _optional_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    return read_json(path, max_bytes) if path.is_file() else {}


def _token_text(value: Any) -> str | None:
    """`"</s>"`, or `{"content": "</s>", …}`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_gguf_text_metadata(metadata: Mapping[str, Any]) -> TextMetadata:
    ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template")
    return TextMetadata(
        chat_template=_check_template_size(template, "tokenizer.chat_template"),
        bos_token=_gguf_token(metadata, metadata.get("tokenizer.ggml.bos_token_id")),
        eos_token=_gguf_token(metadata, ids[0]),
        eos_token_ids=list(dict.fromkeys(token_id for token_id in ids if _is_token_id(token_id))),
    )


def _gguf_token(metadata: Mapping[str, Any], token_id: Any) -> str | None:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not _is_token_id(token_id) or token_id >= len(tokens):
        return None
    return _token_text(tokens[token_id])
