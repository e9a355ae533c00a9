"""Reads a checkpoint's metadata about text: chat template, begin and end tokens. Knows nothing of the tokenizer's
internals."""

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
from onward.models.loader.tokenizer_files import CONFIG_FILES, find_tokenizer

_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_JSON = "chat_template.json"
_MAX_TOKEN_ID = 1 << 31


class TextMetadata(msgspec.Struct, frozen=True):
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]


def text_files(folder: Path) -> list[Path]:
    """Returns all files of a folder, except weights, that determine the model and its text."""
    names = ["config.json", "generation_config.json", *CONFIG_FILES, _TEMPLATE_FILE, _TEMPLATE_JSON]
    source = find_tokenizer(folder)
    files = [folder / name for name in names] + (list(source.files) if source is not None else [])
    return [path for path in files if path.is_file()]


def read_folder_text_metadata(folder: Path, tokenizer: str | None = None) -> TextMetadata:
    """Reads the metadata of a folder. `tokenizer`: the path of its `tokenizer.json`, relative to the folder or
    absolute."""
    tokenizer_config = _optional_json(folder / "tokenizer_config.json")
    special = _optional_json(folder / "special_tokens_map.json") | tokenizer_config
    eos_token = _token_text(special.get("eos_token"))
    return TextMetadata(
        chat_template=_folder_template(folder, tokenizer_config),
        bos_token=_token_text(special.get("bos_token")),
        eos_token=eos_token,
        eos_token_ids=_folder_eos_ids(folder, eos_token, tokenizer),
    )


def _folder_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """Returns the chat template. Its own file comes before files in which it is a field."""
    if (file := folder / _TEMPLATE_FILE).is_file():
        return read_template(file)
    for path, fields in (
        (folder / _TEMPLATE_JSON, _optional_json(folder / _TEMPLATE_JSON)),
        (folder / "tokenizer_config.json", tokenizer_config),
    ):
        if (template := fields.get("chat_template")) is not None:
            return _checked_template(template, f"{path}: chat_template")
    return None


def read_template(path: Path) -> str:
    return read_text(path, MAX_TEMPLATE_BYTES)


def _checked_template(template: Any, source: str) -> str | None:
    if isinstance(template, list):
        template = _template_of_named(template, source)
    if template is None:
        return None
    if not isinstance(template, str):
        raise StartupError(f"{source} is neither a template nor a list of named templates")
    return _check_template_size(template, source)


def _template_of_named(entries: list[Any], source: str) -> str | None:
    """Returns the `default` template of several. If there is one for tools as well, returns a template that chooses
    between the two. Returns None without `default`, because no request uses the other templates."""
    named: dict[str, str] = {}
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(template)}:
                named[name] = template
            case _:
                raise StartupError(f"{source} has an entry without a name and a template")
    if "default" not in named or "tool_use" not in named:
        return named.get("default")
    # The line ends and plus signs prevent Jinja from trimming the beginnings and ends of the two templates. One line
    # end
    # is removed from each, as Jinja does for a whole file.
    tool_use, default = (named[name].removesuffix("\n") for name in ("tool_use", "default"))
    return f"{{% if tools %}}\n{tool_use}{{%+ else %}}\n{default}{{%+ endif %}}"


def _check_template_size(template: str, source: str) -> str:
    if len(template) > MAX_TEMPLATE_BYTES:
        raise StartupError(f"{source} is longer than {MAX_TEMPLATE_BYTES} characters, the limit for a template")
    return template


def _folder_eos_ids(folder: Path, eos_token: str | None, tokenizer: str | None) -> list[int]:
    """Returns the token ids at which generation stops: those of generation config and model config, or else the
    tokenizer's own end token."""
    ids: list[int] = []
    for file in ("generation_config.json", "config.json"):
        value = _optional_json(folder / file).get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if not all(map(_is_token_id, ids)):
        raise StartupError(f"{folder}: eos_token_id must be a number or a list of numbers, not {str(ids)[:200]}")
    if not ids and eos_token is not None and tokenizer is not None:
        ids = _added_ids(folder / tokenizer, eos_token)
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
    """Returns the text of a token that is stored as `"</s>"` or as `{"content": "</s>", …}`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_gguf_text_metadata(metadata: Mapping[str, Any]) -> TextMetadata:
    ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template")
    return TextMetadata(
        chat_template=_check_template_size(template, "tokenizer.chat_template") if isinstance(template, str) else None,
        bos_token=_gguf_token(metadata, metadata.get("tokenizer.ggml.bos_token_id")),
        eos_token=_gguf_token(metadata, ids[0]),
        eos_token_ids=list(dict.fromkeys(token_id for token_id in ids if _is_token_id(token_id))),
    )


def _gguf_token(metadata: Mapping[str, Any], token_id: Any) -> str | None:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not _is_token_id(token_id) or token_id >= len(tokens):
        return None
    return _token_text(tokens[token_id])
