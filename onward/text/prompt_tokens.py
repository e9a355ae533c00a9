"""The token ids of a prompt, from what a client has sent: the one way, for api processes and for routers.

A router that makes them and an instance that would have made them must agree, so both use this module, and compare the
hash of what it works with. Does not know requests: whoever calls has found messages or text in one.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from onward.errors import InvalidRequest, StartupError
from onward.proto.model import ModelText, PreparedModel
from onward.text.chat_template import ChatTemplate
from onward.text.tokenizer import Tokenizer

RENDERING = 1
"""Raised whenever this module, the template's environment or the tokenizer's settings make other ids than before."""


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None


class PromptTokens:
    """Immutable once built, so threads may share it. Raises `InvalidRequest` for what has no ids."""

    def __init__(self, text: ModelText) -> None:
        self.tokenizer = None if text.tokenizer is None else Tokenizer(text.tokenizer)
        self._template = (
            None if text.chat_template is None else ChatTemplate(text.chat_template, text.bos_token, text.eos_token)
        )

    def of_chat(self, messages: Sequence[ChatMessage], created_s: int) -> list[int]:
        if self._template is None or self.tokenizer is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        rendered = self._template.render([_plain(message) for message in messages], created_s=created_s)
        return self.tokenizer.encode_chat(rendered)

    def of_text(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise InvalidRequest("prompt: this model has no tokenizer; send token ids", param="prompt")
        token_ids = self.tokenizer.encode(prompt)
        if not token_ids:
            raise InvalidRequest("prompt: must not be empty", param="prompt")
        return token_ids


def _plain(message: ChatMessage) -> dict[str, Any]:
    """Templates test for a field by its presence, so what was not sent is not there."""
    return {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}


def read_text(model: PreparedModel) -> ModelText:
    return ModelText(_tokenizer_of(model), model.chat_template or None, model.bos_token, model.eos_token)


def _tokenizer_of(model: PreparedModel) -> str | None:
    if not model.tokenizer:
        return None
    path = Path(model.folder) / model.tokenizer
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"the tokenizer cannot be read: {path}: {error}") from error


def text_hash(text: ModelText) -> str:
    """Empty where there is no tokenizer, and so nothing to agree on."""
    if text.tokenizer is None:
        return ""
    return hashlib.blake2b(msgspec.msgpack.encode((RENDERING, text)), digest_size=16).hexdigest()
