"""Converts a client's prompt to token ids, in the same way in api processes and routers.

A router and an instance must compute the same ids, so both use this module, and compare the hash of its inputs. Does
not know requests: the caller passes messages or text.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    with_tool_calls,
    with_tools_system_message,
)
from onward.text.truncation import Truncation

TOKENIZATION_VERSION = 5
"""Raised whenever this module, the template's environment or the tokenizer's settings make other ids than before."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
OPEN_MARK = "\ue000open\ue001"
"""Ends a message that is left open. Of characters that stand for nothing in Unicode."""


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    """One of `ROLES`, or another one that the template renders."""
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None
    """The older form of a call, with a `name` and `arguments`."""
    reasoning_content: str | None = None
    """The assistant's reasoning before this message, for templates that show it."""


class TemplateOptions(msgspec.Struct, frozen=True):
    """Options of a chat request for turning its messages into a prompt."""

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
        *,
        add_special_tokens: bool = False,
        truncation: Truncation | None = None,
    ) -> list[int]:
        """Returns the token ids of the messages as the chat template renders them. `renderer` replaces the model's
        template. `max_tokens` and `truncation` are as in `tokenize_text`. With `add_special_tokens` the tokenizer adds
        its own to those that the template writes. Raises `InvalidRequest` if there is no template, or if the messages
        cannot be rendered or tokenized."""
        if (self._template is None and renderer is None) or self.tokenizer is None:
            raise InvalidRequest(
                "messages: chat is disabled: this model has no chat template; use /v1/completions, or start the server "
                "with --chat-template",
                param="messages",
            )
        max_chars: int | None = None
        if max_tokens is not None and (truncation is None or truncation.max_tokens > max_tokens):
            max_chars = max_tokens * self.tokenizer.max_bytes_per_token
        renderer = renderer or self._model_renderer(created_s, max_chars)
        rendered = _render(messages, options, renderer)
        _check_custom_roles(messages, options, renderer)
        try:
            return self.tokenizer.encode_chat(
                rendered, max_tokens, add_special_tokens=add_special_tokens, truncation=truncation
            )
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

    def tokenize_text(
        self, prompt: str, max_tokens: int | None = None, *, truncation: Truncation | None = None
    ) -> list[int]:
        """Returns the token ids of the prompt. Raises `InvalidRequest` if there are none or the model has no tokenizer.

        `max_tokens` is the number of tokens of the context: a text that is far longer is refused before it is
        tokenized. A text that is a little too long is not refused, so the caller must compare the number of tokens.
        With `truncation`, by which the caller cuts the tokens, no text is too long if the tokens that it keeps fit."""
        if self.tokenizer is None:
            raise InvalidRequest("prompt: this model has no tokenizer; send token ids", param="prompt")
        token_ids = self.tokenizer.encode(prompt, max_tokens=max_tokens, truncation=truncation)
        if not token_ids:
            raise InvalidRequest("prompt: must not be empty", param="prompt")
        return token_ids


def _render(messages: Sequence[ChatMessage], options: TemplateOptions, renderer: TemplateRenderer) -> str:
    plain = with_tool_calls([_plain(message) for message in messages])
    plain = with_template_arguments(plain, as_text=renderer.joins_arguments)
    if options.tools and not renderer.reads_tools:
        plain = with_tools_system_message(plain, options.tools)
        options = msgspec.structs.replace(options, tools=None)
    if not options.continue_final_message:
        return renderer.render(plain, options)
    return cut_at_marker(renderer.render(add_marker(plain), options))


def _check_custom_roles(messages: Sequence[ChatMessage], options: TemplateOptions, renderer: TemplateRenderer) -> None:
    """Refuses a role that the template leaves out. Templates cannot be asked, so marks are rendered in the place of the
    texts."""
    marks = {index: f"\ue000{index}\ue001" for index, message in enumerate(messages) if message.role not in ROLES}
    if not marks:
        return
    marked = [
        msgspec.structs.replace(message, content=marks[index]) if index in marks else message
        for index, message in enumerate(messages)
    ]
    rendered = _render(marked, options, renderer)
    for index, mark in marks.items():
        if mark not in rendered:
            path = f"messages[{index}].role"
            problem = f"the chat template does not render the role {messages[index].role[:80]!r}"
            raise InvalidRequest(f"{path}: {problem}", param=path)


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
    """Returns a hash of everything that decides token ids, by which a router finds out whether instances agree. Returns
    an empty string without a tokenizer, because there is nothing to agree on."""
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
