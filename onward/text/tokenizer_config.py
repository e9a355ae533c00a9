"""Applies `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json` to a tokenizer.

Added tokens, their flags, and the tokens that begin and end a text are as in transformers. The ids are those that the
files declare; otherwise loading fails.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, processors

from onward.errors import StartupError
from onward.text.token_table import MAX_TOKENS

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")


class AddedTokenConfig(msgspec.Struct, frozen=True):
    content: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None
    special: bool = False

    def to_library(self, *, is_special: bool) -> AddedToken:
        return AddedToken(
            self.content,
            lstrip=self.lstrip,
            rstrip=self.rstrip,
            single_word=self.single_word,
            normalized=not is_special if self.normalized is None else self.normalized,
            special=is_special,
        )


class TokenizerConfig(msgspec.Struct, frozen=True):
    tokenizer_class: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    add_bos_token: bool | None = None
    """None: the file does not say."""
    add_eos_token: bool | None = None
    add_prefix_space: bool | None = None
    legacy: bool | None = None
    added_tokens: dict[int, AddedTokenConfig] = {}
    special_tokens: list[AddedTokenConfig] = []
    """Special tokens with a role (`bos_token`, …), and those that are only listed."""


def parse_tokenizer_config(
    raw: Mapping[str, Any], added_tokens_json: Mapping[str, Any] | None = None
) -> TokenizerConfig:
    """Returns the settings of a tokenizer. `raw` has the fields of `tokenizer_config.json`, and those of
    `special_tokens_map.json` that the former does not have. `added_tokens_json` is an older form, with ids by token; it
    counts if `raw` declares no added tokens. Raises `StartupError` for an invalid field."""
    return TokenizerConfig(
        tokenizer_class=_optional(raw, "tokenizer_class", str),
        bos_token=_text_of(raw.get("bos_token"), "bos_token"),
        eos_token=_text_of(raw.get("eos_token"), "eos_token"),
        add_bos_token=_optional(raw, "add_bos_token", bool),
        add_eos_token=_optional(raw, "add_eos_token", bool),
        add_prefix_space=_optional(raw, "add_prefix_space", bool),
        legacy=_optional(raw, "legacy", bool),
        added_tokens=_added_tokens(raw.get("added_tokens_decoder") or {}, added_tokens_json or {}),
        special_tokens=_special_tokens(raw),
    )


def apply_tokenizer_config(tokenizer: Tokenizer, config: TokenizerConfig) -> Tokenizer:
    """Adds the config's tokens to `tokenizer`, and returns it."""
    special = {token.content: token for token in config.special_tokens}
    tokenizer.add_tokens(_declared_tokens(tokenizer, config, special))
    for token_id, token in config.added_tokens.items():
        if (actual := tokenizer.token_to_id(token.content)) != token_id:
            raise StartupError(
                f"tokenizer_config.json: added_tokens_decoder: {token.content[:80]!r} has the id {token_id} there, "
                f"but {actual} in the vocabulary"
            )
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens(
        [token.to_library(is_special=True) for token in special.values() if token.content not in known]
    )
    return tokenizer


def with_special_tokens(config: TokenizerConfig, contents: list[str]) -> TokenizerConfig:
    """Returns the configuration with further special tokens before those that the files name."""
    tokens = {content: AddedTokenConfig(content) for content in contents}
    tokens |= {token.content: token for token in config.special_tokens}
    return msgspec.structs.replace(config, special_tokens=list(tokens.values()))


def read_tokenizer(description: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(description)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare exceptions, and its panics are no Exception at all
        raise StartupError(f"the tokenizer cannot be read: {str(error)[:200]}") from error


def _declared_tokens(
    tokenizer: Tokenizer, config: TokenizerConfig, special: Mapping[str, AddedTokenConfig]
) -> list[AddedToken]:
    """Returns the config's added tokens in the order of their ids. The library gives a new token the next id, so ids
    that no file names get a placeholder before the next declared token."""
    declared: list[AddedToken] = []
    next_id = tokenizer.get_vocab_size()
    for token_id, token in sorted(config.added_tokens.items()):
        if tokenizer.token_to_id(token.content) is None:
            names = [f"<|reserved_token_{unnamed}|>" for unnamed in range(next_id, token_id)]
            declared += [AddedToken(name, normalized=False, special=True) for name in names]
            next_id = token_id + 1
        declared.append(token.to_library(is_special=token.special or token.content in special))
    return declared


def apply_begin_and_end(tokenizer: Tokenizer, config: TokenizerConfig, *, begins_by_default: bool = False) -> Tokenizer:
    """Has `tokenizer` put the tokens around a text that the config wants there, and returns it. `begins_by_default`: a text
    begins with the bos token unless the config says otherwise."""
    adds_bos = begins_by_default if config.add_bos_token is None else config.add_bos_token
    before = [config.bos_token] if adds_bos and config.bos_token else []
    after = [config.eos_token] if config.add_eos_token and config.eos_token else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[(token, _id_of(tokenizer, token)) for token in dict.fromkeys([*before, *after])],
        )
    return tokenizer


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, "special tokens were added"
    return token_id


def _added_tokens(by_id: Any, added_tokens_json: Mapping[str, Any]) -> dict[int, AddedTokenConfig]:
    source = "tokenizer_config.json: added_tokens_decoder"
    if not isinstance(by_id, dict):
        raise StartupError(f"{source}: must be an object")
    entries: list[tuple[Any, Any]] = list(by_id.items())
    if not entries:
        source = "added_tokens.json"
        entries = [(token_id, {"content": token}) for token, token_id in added_tokens_json.items()]
    return {_token_id(token_id, source): _token(entry, source) for token_id, entry in entries}


def _special_tokens(raw: Mapping[str, Any]) -> list[AddedTokenConfig]:
    entries = [(name, raw.get(name)) for name in _NAMED]
    for name in _LISTED:
        listed = raw.get(name) or []
        if isinstance(listed, dict):  # by a role that the model's authors have named
            listed = list(listed.values())
        if not isinstance(listed, list):
            raise StartupError(f"tokenizer_config.json: {name}: must be a list of tokens")
        entries += [(name, entry) for entry in listed]
    tokens = [_token(entry, f"tokenizer_config.json: {name}") for name, entry in entries if entry is not None]
    return list({token.content: token for token in tokens if token.content}.values())


def _token(entry: Any, source: str) -> AddedTokenConfig:
    if isinstance(entry, str):
        return AddedTokenConfig(entry)
    try:
        return msgspec.convert(entry, AddedTokenConfig)
    except msgspec.ValidationError as fault:
        raise StartupError(f"{source}: {fault}") from None


def _token_id(value: Any, source: str) -> int:
    try:
        token_id = int(value)
    except (TypeError, ValueError):
        token_id = -1
    if not 0 <= token_id < MAX_TOKENS:
        raise StartupError(f"{source}: {str(value)[:80]!r} is not a token id below {MAX_TOKENS}")
    return token_id


def _text_of(value: Any, name: str) -> str | None:
    return None if value is None else _token(value, f"tokenizer_config.json: {name}").content or None


def _optional(raw: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = raw.get(name)
    if value is not None and not isinstance(value, kind):
        raise StartupError(f"tokenizer_config.json: {name}: must be a {kind.__name__}, not {str(value)[:80]}")
    return value
