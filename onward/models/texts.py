"""What a checkpoint says about text: chat template, begin and end tokens. The tokenizer's insides are not known here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from onward.errors import StartupError
from onward.models.checkpoint import read_json

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

_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "spiece.model")


class Texts(msgspec.Struct, frozen=True):
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]


def has_tokenizer(folder: Path) -> bool:
    if (folder / TOKENIZER).is_file():
        return True
    if other := [name for name in _OTHER_TOKENIZERS if (folder / name).exists()]:
        raise StartupError(
            f"{folder} has {other[0]} but no {TOKENIZER}; save one with "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    return False


def of_folder(folder: Path) -> Texts:
    tokenizer_config = _optional_json(folder / "tokenizer_config.json")
    special = _optional_json(folder / "special_tokens_map.json") | tokenizer_config
    eos_token = _token_text(special.get("eos_token"))
    return Texts(
        chat_template=_folder_template(folder, tokenizer_config),
        bos_token=_token_text(special.get("bos_token")),
        eos_token=eos_token,
        eos_token_ids=_folder_eos_ids(folder, eos_token),
    )


def _folder_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except UnicodeDecodeError as fault:
            raise StartupError(f"{file} is not valid UTF-8: {fault.reason} at byte {fault.start}") from None
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _folder_eos_ids(folder: Path, eos_token: str | None) -> list[int]:
    """What generation stops at: generation config, then model config, then the tokenizer's own end token."""
    ids: list[int] = []
    for file in ("generation_config.json", "config.json"):
        value = _optional_json(folder / file).get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise StartupError(f"{folder}: eos_token_id must be a number or a list of numbers, not {ids}")
    if not ids and eos_token is not None:
        added = _optional_json(folder / TOKENIZER).get("added_tokens") or []
        ids = [entry["id"] for entry in added if entry.get("content") == eos_token]
    return list(dict.fromkeys(ids))


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(value: Any) -> str | None:
    """`"</s>"`, or `{"content": "</s>", …}`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def of_gguf(metadata: Mapping[str, Any]) -> Texts:
    ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template")
    return Texts(
        chat_template=template if isinstance(template, str) else None,
        bos_token=_gguf_token(metadata, metadata.get("tokenizer.ggml.bos_token_id")),
        eos_token=_gguf_token(metadata, ids[0]),
        eos_token_ids=list(dict.fromkeys(token_id for token_id in ids if isinstance(token_id, int))),
    )


def _gguf_token(metadata: Mapping[str, Any], token_id: Any) -> str | None:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not isinstance(token_id, int) or token_id >= len(tokens):
        return None
    return tokens[token_id]
