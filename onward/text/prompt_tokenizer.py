"""The token ids of a prompt, from what a client has sent: the one way, for api processes and for routers.

A router that makes them and an instance that would have made them must agree, so both use this module, and compare the
hash of what it works with. Does not know requests: whoever calls has found messages or text in one.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from onward.errors import InvalidRequest, StartupError
from onward.proto.model import PreparedModel, TokenizerFiles
from onward.text.chat_template import ChatTemplate
from onward.text.tokenizer import Tokenizer
from onward.text.tool_messages import (
    Message,
    template_joins_arguments,
    template_reads_tools,
    with_template_arguments,
    with_tools_system_message,
)

TOKENIZATION_VERSION = 3
"""Raised whenever this module, the template's environment or the tokenizer's settings make other ids than before."""
OPEN_MARK = "\ue000open\ue001"
"""Ends a message that is left open. Of characters that stand for nothing in Unicode."""


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    reasoning_content: str | None = None
    """What the assistant thought before it said this, for templates that show it."""


class TemplateOptions(msgspec.Struct, frozen=True):
    """What a chat request says about how its messages become a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    variables: dict[str, Any] = {}
    """Further names for the template."""
    tools: list[dict[str, Any]] | None = None
    """As templates expect them. None: there are none to call."""

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the prompt ends with the beginning of the assistant's message."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


DEFAULT_TEMPLATE_OPTIONS = TemplateOptions()

Render = Callable[[list[Message], TemplateOptions], str]


@dataclass(frozen=True, slots=True)
class TemplateRenderer:
    """Some template, and what it expects."""

    render: Render
    reads_tools: bool
    joins_arguments: bool

    @classmethod
    def from_source(cls, source: str, render: Render) -> "TemplateRenderer":
        return cls(render, template_reads_tools(source), template_joins_arguments(source))


class PromptTokenizer:
    """Immutable once built, so threads may share it. Raises `InvalidRequest` for what has no ids."""

    def __init__(self, files: TokenizerFiles) -> None:
        self.tokenizer = None if files.tokenizer is None else Tokenizer(files.tokenizer)
        self._template = (
            None if files.chat_template is None else ChatTemplate(files.chat_template, files.bos_token, files.eos_token)
        )
        source = files.chat_template or ""
        self.knows_tools, self._wants_arguments_as_text = template_reads_tools(source), template_joins_arguments(source)

    def tokenize_chat(
        self,
        messages: Sequence[ChatMessage],
        created_s: int,
        options: TemplateOptions = DEFAULT_TEMPLATE_OPTIONS,
        renderer: TemplateRenderer | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """`renderer`: instead of the model's template. `max_tokens`: as in `tokenize_text`."""
        if (self._template is None and renderer is None) or self.tokenizer is None:
            raise InvalidRequest(
                "messages: chat is disabled: this model has no chat template; use /v1/completions, or start the server "
                "with --chat-template",
                param="messages",
            )
        max_chars = None if max_tokens is None else max_tokens * self.tokenizer.max_bytes_per_token
        rendered = _render(messages, options, renderer or self._model_renderer(created_s, max_chars))
        try:
            return self.tokenizer.encode_chat(rendered, max_tokens)
        except InvalidRequest as error:
            raise InvalidRequest(f"messages: {error.message}", code=error.code, param="messages") from error

    def _model_renderer(self, created_s: int, max_chars: int | None) -> TemplateRenderer:
        template = self._template
        assert template is not None

        def render(messages: list[Message], options: TemplateOptions) -> str:
            return template.render(
                messages,
                created_s=created_s,
                add_generation_prompt=options.adds_generation_prompt,
                tools=options.tools,
                variables=options.variables,
                max_chars=max_chars,
            )

        return TemplateRenderer(render, self.knows_tools, self._wants_arguments_as_text)

    def tokenize_text(self, prompt: str, max_tokens: int | None = None) -> list[int]:
        """`max_tokens`: the context. A text that is far longer is refused before it is tokenized. One that is a little too
        long is not: the caller compares the number of tokens."""
        if self.tokenizer is None:
            raise InvalidRequest("prompt: this model has no tokenizer; send token ids", param="prompt")
        token_ids = self.tokenizer.encode(prompt, max_tokens=max_tokens)
        if not token_ids:
            raise InvalidRequest("prompt: must not be empty", param="prompt")
        return token_ids


def _render(messages: Sequence[ChatMessage], options: TemplateOptions, renderer: TemplateRenderer) -> str:
    plain = with_template_arguments([_plain(message) for message in messages], as_text=renderer.joins_arguments)
    if options.tools and not renderer.reads_tools:
        plain = with_tools_system_message(plain, options.tools)
        options = msgspec.structs.replace(options, tools=None)
    if not options.continue_final_message:
        return renderer.render(plain, options)
    return cut_at_marker(renderer.render(add_marker(plain), options))


def _plain(message: ChatMessage) -> dict[str, Any]:
    """Templates test for a field by its presence, so what was not sent is not there."""
    return {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}


def read_tokenizer_files(model: PreparedModel) -> TokenizerFiles:
    return TokenizerFiles(_tokenizer_of(model), model.chat_template or None, model.bos_token, model.eos_token)


def _tokenizer_of(model: PreparedModel) -> str | None:
    if not model.tokenizer:
        return None
    path = Path(model.folder) / model.tokenizer
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"the tokenizer cannot be read: {path}: {error}") from error


def tokenizer_hash(files: TokenizerFiles) -> str:
    """Empty where there is no tokenizer, and so nothing to agree on."""
    if files.tokenizer is None:
        return ""
    return hashlib.blake2b(msgspec.msgpack.encode((TOKENIZATION_VERSION, files)), digest_size=16).hexdigest()


def add_marker(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Marks the end of the last message, which the model is to go on with. Templates close every message, so the prompt is
    what comes before the mark: a template may cut spaces off the mark, but not off the text.

    Messages may be unchecked: a router renders before they are checked."""
    *before, last = messages or [{}]
    match last.get("content"):
        case str(text):
            return [*before, {**last, "content": text + OPEN_MARK}]
        case [*parts, {"text": str(text)} as final]:
            return [*before, {**last, "content": [*parts, {**final, "text": text + OPEN_MARK}]}]
    raise _refused("there is no last message with a text")


def cut_at_marker(rendered: str) -> str:
    prompt, mark, _ = rendered.rpartition(OPEN_MARK)
    if not mark:
        raise _refused("the chat template does not show the last message as it is, so it cannot be left open")
    return prompt


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(f"continue_final_message: {problem}", param="continue_final_message")
